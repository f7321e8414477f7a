"""Check that this machine, or each node of a cluster, has all that studies need, then run them one after another."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from pydantic import ValidationError
from rich.console import Console

from search_spaces.declaration.presets import PRESETS
from search_spaces.declaration.study import Study
from trainable.backend.gpus import make_bundles
from trainable.config.constants import TEACHERS
from trainable.config.own_parts import PartFile
from trainable.config.run_config import format_validation_error, list_outside_settings
from trainable.config.setting_types import flatten_settings, format_value
from trainable.runs.study_record import WandbMode, WandbTarget, check_wandb_project
from tune_study.commands.describe import PreparedStudy, print_plan, summarize_plan
from tune_study.commands.requests import ChosenPreset, LaunchRequest, StudyRequest, list_assigned_settings
from tune_study.folder import outputs
from tune_study.folder.origin import find_last_wandb
from tune_study.host.console import print_error, print_json, print_line
from tune_study.host.interrupt import TimeLimit, make_interrupt, start_time_limit
from tune_study.host.machine_checks import count_cpus, explain_long_path, find_ray_folder, measure_scratch_space
from tune_study.placement import disk, memory_plan, resources
from tune_study.placement.memory_plan import GpuCapacity
from tune_study.placement.model_files import (
    check_file,
    check_model,
    describe_teachers,
    make_missing_teachers,
    read_model_shape,
)
from tune_study.placement.resources import compile_kernels
from tune_study.plan.errors import MisfitError, PlanError, as_plan_error
from tune_study.plan.own_study import check_parts
from tune_study.plan.remarks import find_remarks
from tune_study.plan.study_plan import NO_WANDB, WANDB_MODES, StudyPlan, check_level_seeds
from tune_study.tune import cluster
from tune_study.tune.cluster import Node
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.run import execute_study
from tune_study.tune.session import SuiteContext

_GPU_SETTINGS = ("model.path", "model_path", "n_gpus_per_node", "gpu_memory_utilization")
"""Settings whose values suit only certain GPUs or the paper preset, as their keys end."""

_INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as in a shell: 128 plus the number of SIGINT."""


class Launch(NamedTuple):
    """A study, and where it is to run."""

    plan: StudyPlan
    options: LaunchRequest
    nodes: tuple[Node, ...] | None = None
    """The nodes of the cluster; None for this machine."""


def start_studies(
    plans: Sequence[StudyPlan],
    options: LaunchRequest,
    dry_run: bool,
    console: Console,
    time_limit: TimeLimit | None = None,
    *,
    json_command: str = "",
) -> int:
    """Check the requirements of all studies, then run them one after another; in a dry run, only print their plans.

    time_limit: a limit that is already running; None to start one of --max-hours now.
    json_command: the command whose dry run prints the plans as JSON; empty for text.
    Returns the exit code: 0 if every study returns 0, or that of a misfit for a dry run of a study that does not fit.
    Raises PlanError before anything starts if a study cannot be run.
    """
    plans = [replace(plan, wandb=choose_wandb(options, plan)) for plan in plans]
    for plan in plans:
        try:  # runs are left out: their names were checked with the plan
            outputs.make_study_record(replace(plan, runs=()))
        except ValidationError as error:
            raise PlanError(
                f"Study {plan.study.name} cannot be recorded in study.json: {format_validation_error(error)} Correct "
                "its declaration, or the settings that were typed."
            ) from None
        check_parts([spec.config for spec in plan.runs])
        for game in resources.load_game_requirements(plan):
            game.check(plan)
        check_level_seeds(plan)
        _check_context(plan)

    def run_study(study: PreparedStudy, suite: SuiteContext | None = None) -> int:
        """Run a prepared study and return its exit code (see `execute_study`)."""
        plan, resource_plan = study.plan, study.resource_plan
        preset_line, remarks = f"Preset {plan.preset}: {plan.preset_reason}", find_remarks(plan)
        notes = resource_plan.notes if resource_plan.cluster_address else ()
        for line in (preset_line, study.space_line, *notes, *remarks):
            print_line(console, line)
        return execute_study(plan, study.resource_plan, console, options.skipped_statuses, time_limit, suite)

    with nullcontext() if options.address is None else cluster.join_cluster(options.address) as nodes:
        launches = [Launch(plan, options, nodes) for plan in plans]
        if any(plan.model is not None for plan in plans):  # in a suite, --gpus is for the studies that use GPUs
            cpu_options = replace(options, gpus=None)
            launches = [launch if launch.plan.model else launch._replace(options=cpu_options) for launch in launches]
        if dry_run:
            summaries = []
            for number, launch in enumerate(launches, start=1):
                summaries.append(_preview(launch))
                if json_command:
                    continue
                if len(plans) > 1:
                    print_line(console, f"Study {number} of {len(plans)}: {launch.plan.study.name}")
                print_plan(console, launch.plan, summaries[-1])
            if json_command:
                print_json(json_command, {"plans": summaries})
            return 0 if all(summary["fits"] for summary in summaries) else MisfitError.exit_code
        time_limit = time_limit or start_time_limit(options.max_hours)
        # All studies are checked before the first one starts, so that a suite does not fail hours later.
        studies = [prepare_study(launch) for launch in launches]
        if nodes is None:
            make_missing_teachers([path for plan in plans for path in plan.model_paths], os.environ, console)
            compile_kernels([config for plan in plans for config in plan.ppo_configs], os.environ, console)
        if len(plans) == 1:
            return run_study(studies[0])
        # Studies with a storage keep nothing large on this disk.
        disk.check_budgets([study.disk_budget for study in studies if study.plan.storage is None])
        return run_suite(launches, run_study, console)


def _check_context(plan: StudyPlan) -> None:
    """Raise PlanError if replies could fill the context of the model and leave no token for a prompt."""
    for config in plan.ppo_configs:
        shape, length = read_model_shape(config.model.path, os.environ), config.rollout.response_length
        if shape is not None and shape.max_position_embeddings and shape.max_position_embeddings <= length:
            raise PlanError(
                f"rollout.response_length={length}: the context of {config.model.path} has "
                f"{shape.max_position_embeddings} tokens for prompts and replies",
                "set a shorter rollout.response_length",
            )


def choose_wandb(options: LaunchRequest, plan: StudyPlan) -> WandbTarget:
    """Choose W&B's mode and project: as typed, as at the last start, or offline if trainer.logger names wandb.

    Raises PlanError for an unknown mode, for a project without W&B or with an invalid name, and for mode online without
    a key.
    """
    last = find_last_wandb(plan.folder)[0]
    mode = options.wandb or (last.mode if last else "offline" if "wandb" in plan.base_config.trainer.logger else "off")
    if mode not in WANDB_MODES:
        raise PlanError(f"--wandb {format_value(mode)} is not a mode: choose from {', '.join(WANDB_MODES)}.")
    if mode == "off":
        if options.wandb_project is not None:
            raise PlanError("--wandb-project names a project of W&B, which is off: add --wandb offline or online.")
        return NO_WANDB
    # The last start takes precedence over the environment, or a study's rows could be split over two projects.
    last_project = last.project if last else ""
    project = options.wandb_project or last_project or os.environ.get("WANDB_PROJECT") or plan.wandb_project
    with as_plan_error(ValueError):
        check_wandb_project(project)
    if mode == "online":
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        try:  # the user is not asked, and no server is contacted
            problem = "" if wandb.login(prompt=False, verify=False) else "no key is configured"
        except wandb.Error as error:
            problem = str(error)
        if problem:
            remedy = "type `wandb login`, set WANDB_API_KEY, or log with --wandb offline and upload later"
            raise PlanError(f"--wandb online needs a login, and W&B says: {problem}", remedy)
    return WandbTarget(cast(WandbMode, mode), project)


def make_plans_that_fit(
    make_plan: Callable[..., StudyPlan],
    studies: Sequence[tuple[Study, PartFile | None]],
    request: StudyRequest,
    options: LaunchRequest,
) -> list[StudyPlan]:
    """Make the plans of studies under the typed or default preset, and adapt them if the GPUs are too small.

    If the runs do not fit, they train adapters, where the preset has settings for this and the user has not chosen
    their rank, also as 0 for none. If adapters do not fit either, `Study.cpu_preset` replaces paper, unless the user
    chose GPUs, or a setting that suits only certain GPUs.

    make_plan: `plan_from_options` or `plan_search`, with its requests. studies: each with the file that declares it.
    """

    def make_plans(name: str | None, reason: str, *settings: Any) -> list[StudyPlan]:
        """Make the plans under a preset; None is for the one that each study declares for CPUs."""
        plans = []
        for study, source in studies:
            own = name is None and study.cpu_preset != Study.cpu_preset
            why = f"{reason}; the study is declared for {study.cpu_preset}" if own else reason
            preset = ChosenPreset(study.cpu_preset if name is None else name, why, *settings)
            plans.append(make_plan(study, preset, source=source))
        return plans

    preset, reason = None, "no CUDA GPU is visible"
    if request.preset is not None:
        preset, reason = request.preset, "set by --preset"
    elif gpus := options.visible_gpus:
        preset, reason = "paper", f"a CUDA GPU is visible ({gpus[0].name})"
    plans = make_plans(preset, reason)
    small_settings = PRESETS[preset].small_gpu_settings if preset in PRESETS else None
    if options.address is not None or not small_settings:  # the GPUs of a cluster are not known here
        return plans
    misfit, remedies = explain_misfit(plans, options)
    if not misfit:
        return plans
    keys = [assignment.partition("=")[0].strip() for assignment in request.list_assignments()]
    keys += [setting for _, setting, _ in list_assigned_settings(request)]
    if not any("lora_rank" in key for key in keys):
        settings_text = ", ".join(f"{name}={value}" for name, value in small_settings.items())
        small_reason = f"{reason}; adapters instead of all weights ({settings_text}), which do not fit: {misfit}"
        small_plans = make_plans(preset, small_reason, small_settings)
        if not explain_misfit(small_plans, options)[0]:
            return small_plans
    has_gpus = options.gpus is not None or options.gpu_memory_gib is not None
    if request.preset is not None or has_gpus or any(key.endswith(_GPU_SETTINGS) for key in keys):
        return plans
    advice = f"it fits with --preset {preset} {remedies[0]}" if remedies else "no setting makes it fit"
    return make_plans(None, f"{reason}, but preset {preset} does not fit it: {misfit}; {advice}")


def explain_misfit(plans: Sequence[StudyPlan], options: LaunchRequest) -> tuple[str, list[str]]:
    """Return why the first study that does not fit this machine's GPUs does not, and options that make it fit."""
    for plan in plans:
        memory = _estimate_requirements(Launch(plan, options), dry_run=True).memory
        if memory is not None and memory.capacity.is_known and not memory.fits:
            return memory_plan.describe_peak(memory), memory_plan.find_remedies(memory, plan.study)
    return "", []


def _preview(launch: Launch) -> dict[str, Any]:
    """Summarize the plan of a dry run (`summarize_plan`), whether it fits, and in notes first what does not.

    Of the files of this machine only models are checked. Raises PlanError if one is missing and its size is unknown.
    """
    plan, is_local = launch.plan, launch.nodes is None
    outputs.check_writable(plan.output)
    notes = []
    for path, option in _list_models(plan) if is_local else ():
        try:
            check_model(path, os.environ, plan.ppo_config.model.chat_format, option)
        except PlanError as error:  # a plan for another machine may ignore it, but needs the sizes of the model
            if read_model_shape(path, os.environ) is None:
                raise
            notes.append(str(error))
    study = _estimate_requirements(launch, dry_run=True)
    shortages = [
        memory_plan.format_misfit(study.memory, plan.study) if study.memory and not study.memory.fits else "",
        disk.explain_shortage([study.disk_budget]) if plan.storage is None else "",
    ]
    notes += describe_teachers(plan.model_paths, os.environ, is_local)
    return {
        **summarize_plan(study),
        "fits": not any(shortages),
        "notes": list(filter(None, [*shortages, *notes])),
    }


def _list_models(plan: StudyPlan) -> list[tuple[str, str]]:
    """List the models that the runs of a study load, each with the option that names it; none for toy studies.

    Teachers are left out: a missing one is made once all checks have passed.
    """
    options = {plan.model: "--model "}
    return [
        (path, options.get(path, "--set model.reference_path=")) for path in plan.model_paths if path not in TEACHERS
    ]


def prepare_study(launch: Launch) -> PreparedStudy:
    """Check the requirements of a study. Raises PlanError if one is not met, and UnsafePathError for a link."""
    plan = launch.plan
    outputs.check_study_links(plan)
    outputs.check_writable(plan.output)
    study = _check_machine(launch) if launch.nodes is None else _check_cluster(launch, launch.nodes)
    # With a storage, checkpoints are written on the nodes, and their space was checked above.
    if plan.storage is None:
        disk.check_budgets([study.disk_budget])
    return study


def _estimate_requirements(
    launch: Launch, dry_run: bool = False, gpu_capacity: GpuCapacity | None = None
) -> PreparedStudy:
    """Plan what a study gets and needs. gpu_capacity: of the nodes of a cluster, if it is known."""
    plan, options, nodes = launch
    if nodes is not None and options.address is not None:
        resource_plan = cluster.allocate_cluster(
            plan, options.address, nodes, options.gpus, options.max_concurrent, options.wait_for_nodes
        )
    else:
        resource_plan = resources.preflight(
            plan, options.gpus, options.visible_gpus, count_cpus(), options.max_concurrent, is_real=not dry_run
        )
    notes = list(resource_plan.notes)
    if options.wandb is None and (reason := find_last_wandb(plan.folder)[1]):
        notes.append(reason)
    if plan.wandb.mode == "online":
        import wandb

        # A file wandb/settings in the current folder may have chosen the server.
        notes.append(f"W&B: rows are sent to {wandb.setup().settings.base_url}, project {plan.wandb_project}.")
    used_gpus = tuple(gpu for gpu in options.visible_gpus if gpu.id in resource_plan.gpus)
    memory, settings = None, resource_plan.placement_settings
    if resource_plan.gpu_slots and plan.model is not None:
        gpu_capacity = gpu_capacity or resources.find_gpu_capacity(options.gpu_memory_gib, used_gpus)
        memory = memory_plan.plan_memory(plan, resource_plan, gpu_capacity, os.environ)
    if memory is not None:
        settings = {**settings, **memory.placement_settings}
    resource_plan = resource_plan._replace(notes=tuple(notes), placement_settings=settings)
    disk_budget = disk.estimate_disk_budget(plan, resource_plan, os.environ)
    return PreparedStudy(plan, resource_plan, disk_budget, memory, used_gpus)


def _check_machine(launch: Launch) -> PreparedStudy:
    """Raise PlanError if this machine lacks something that the study needs: files, a model, memory or disk space."""
    plan, study = launch.plan, _estimate_requirements(launch)
    if obstacle := explain_long_path(find_ray_folder(os.environ)):
        raise PlanError(f"Ray cannot start here: {obstacle}", "type `export RAY_TMPDIR=/tmp`, or another short path")
    # Seeds share their files: one configuration per arm is enough.
    family = plan.study.family
    for arm_config in {spec.arm: spec.config for spec in plan.runs}.values():
        if obstacle := family.explain_obstacle(arm_config):
            raise PlanError(obstacle)
        arm_settings = flatten_settings(arm_config.model_dump())
        for setting in list_outside_settings(family.config_class, "file"):
            if arm_settings[setting] is not None:
                check_file(setting, arm_settings[setting])
        # Of other families; `_list_models` has the models of language models.
        loads_models = plan.model is None and family.get_model_path(arm_config)
        for setting in list_outside_settings(family.config_class, "model") if loads_models else ():
            check_model(arm_settings[setting], os.environ, option=f"--set {setting}=")
    for path, option in _list_models(plan):
        check_model(path, os.environ, plan.ppo_config.model.chat_format, option)
    for config in plan.ppo_configs:
        resources.check_engines(config, os.environ)
    if study.memory is not None:
        resources.check_memory(study.memory, plan, study.used_gpus)
    if plan.study_uri is not None:
        remedy = "set RAY_TMPDIR to a folder on a larger disk"
        n_runs = study.resource_plan.max_concurrent * plan.max_runs_per_trial
        disk.check_scratch("This machine", measure_scratch_space(), n_runs, study.disk_budget.scratch_bytes, remedy)
    return study


def _check_cluster(launch: Launch, nodes: tuple[Node, ...]) -> PreparedStudy:
    """Plan for the nodes that have what a study needs, and the smallest GPU of these.

    Raises PlanError if no node does, or if one has too little memory or disk space.
    """
    from tune_study.commands import node_checks

    plan, trainer = launch.plan, launch.plan.base_config.trainer
    bundles = make_bundles(trainer.n_gpus_per_node, trainer.cpu_threads, has_ranks=trainer.has_ranks)
    reports = node_checks.inspect_nodes(plan, cluster.find_usable_nodes(nodes, bundles))
    problems = {node: report.problem for node, report in reports.items() if report.problem}
    if problems and len(problems) == len(reports) and not launch.options.wait_for_nodes:
        node, problem = next(iter(problems.items()))
        raise PlanError(f"The node {node.name} cannot run a study: {problem}")
    reports = {node: report for node, report in reports.items() if node not in problems}
    # --gpu-memory-gib takes precedence over the memory that the nodes report.
    gpu_capacity = None if launch.options.gpu_memory_gib else node_checks.find_smallest_gpu(reports)
    fit_nodes = tuple(node for node in nodes if node not in problems)
    study = _estimate_requirements(launch._replace(nodes=fit_nodes), gpu_capacity=gpu_capacity)
    if study.memory is not None:
        memory_plan.check_fits(study.memory, plan.study)
    scratch_bytes = 0 if plan.storage is None else study.disk_budget.scratch_bytes * plan.max_runs_per_trial
    host_bytes = 0 if study.memory is None else study.memory.host_bytes
    node_checks.check_capacity(reports, study.resource_plan, scratch_bytes, host_bytes)
    notes = (f"No run is placed on the node {node.name}: {problem}" for node, problem in problems.items())
    resource_plan = study.resource_plan._replace(
        notes=(*study.resource_plan.notes, *notes), avoided_nodes=tuple(node.id for node in problems)
    )
    return study._replace(resource_plan=resource_plan)


def run_suite(
    launches: Sequence[Launch], run_study: Callable[[PreparedStudy, SuiteContext], int], console: Console
) -> int:
    """Run studies one after another until all have run or one is interrupted; a failed study does not end the suite.

    A study's requirements are checked again when its turn comes, since the studies before it have used disk space.

    Returns the exit code: 0 if every study returned 0 and the index was written, 130 after Ctrl-C or the time limit,
    and else 1. Raises FolderLockedError, and writes nothing, while another suite runs in the output folder, since both
    would write its index.
    """
    plans, exit_code, n_started, is_refused = [launch.plan for launch in launches], 0, 0, False
    with (
        outputs.lock_folder(plans[0].folder.parent, "a suite"),
        LocalRay([plan.folder for plan in plans], console, is_local=launches[0].nodes is None) as local_ray,
    ):
        try:
            for launch in launches:
                print_line(console, f"Study {n_started + 1} of {len(plans)}: {launch.plan.study.name}")
                finish_early = partial(_finish_suite, plans, n_started + 1, console)
                suite = SuiteContext(local_ray, make_interrupt(launch.plan.folder), finish_early)
                # One interrupt covers training and all that follows, so that files being written are finished.
                with suite.interrupt.handle_signals(partial(print_line, console)):
                    study = prepare_study(launch)
                    n_started += 1  # not before: a study whose requirements are no longer met does not start
                    exit_code = max(exit_code, run_study(study, suite))
                # If an interrupt comes as the last runs of a study end, the study still returns 0.
                if n_started < len(plans) and suite.interrupt.is_requested:
                    exit_code = _INTERRUPTED_EXIT_CODE
                if exit_code == _INTERRUPTED_EXIT_CODE:
                    break
        except outputs.FolderLockedError:
            is_refused = n_started == 1  # nothing was run, so the index is not ours to write
            raise
        finally:
            # After an error, too, the index covers the studies that have ended.
            if not is_refused:
                exit_code = max(exit_code, _finish_suite(plans, n_started, console))
    return exit_code


def _finish_suite(plans: Sequence[StudyPlan], n_started: int, console: Console) -> int:
    """Name the studies that were not started, and write the index; return 1 if that fails, else 0."""
    if n_started < len(plans):
        names = ", ".join(plan.study.name for plan in plans[n_started:])
        print_line(console, f"Not started: {names}. Type the same command again to continue.")
    from analysis.report.pages import write_index  # imports pandas

    try:
        print_line(console, f"Index: {write_index(plans[0].output)}")
    except (OSError, ValueError) as error:
        print_error(f"The index of the studies in {plans[0].output} could not be written: {error}")
        return 1
    return 0

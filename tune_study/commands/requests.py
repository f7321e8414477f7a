"""What a user asks for, and the plan of the study that follows from it.

The fields of a request are options of the command line, and arguments of `tune_study.run` in Python.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_type_hints

from typer import Option

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.command_lines import format_command
from trainable.config.constants import DATA_SUFFIXES
from trainable.config.own_parts import PART_FORM, PartFile, parse_part_name
from trainable.config.run_config import ConfigError, list_field_names, list_outside_settings
from trainable.config.setting_types import flatten_settings, format_value
from trainable.runs.study_record import MAX_RUNS, STUDY_FILE
from tune_study.commands import arguments as opt
from tune_study.commands.arguments import Setting, option
from tune_study.folder import locate
from tune_study.folder.statuses import DEFAULT_SKIPPED, parse_skipped_statuses
from tune_study.folder.study_file import read_study
from tune_study.host.machine_checks import Gpu, detect_gpus
from tune_study.placement.model_files import make_absolute
from tune_study.placement.resources import TORCH_SETTINGS, find_compiled_obstacle
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.own_study import (
    OwnStudy,
    load_game_settings,
    load_named_files,
    load_own_study,
    load_typed_code,
)
from tune_study.plan.study_plan import StudyPlan, check_preset, make_plan, set_max_seeds
from tune_study.plan.typed_settings import (
    collect_overrides,
    expand_groups,
    find_study,
    merge_assignments,
    normalize_study_name,
    parse_values,
)

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""
DEFAULT_MAX_SEEDS = 20


@dataclass(frozen=True)
class StudyRequest:
    """What `run` and `search` train."""

    preset: opt.Preset = None
    model: Annotated[
        str | None, option("PATH", "Model to train: sokoban-tiny, a folder, or a hub id."), Setting("model.path")
    ] = None
    env: opt.Env = None
    steps: Annotated[int | None, option("N", "Training steps per run."), Setting("trainer.total_training_steps")] = None
    seeds: Annotated[int | None, option("N", "Number of seeds per arm: seeds 0 to N-1.")] = None
    assignments: opt.Assignments = None
    config: Annotated[
        list[Path] | None,
        option("FILE", "A file with a line KEY=VALUE per setting, repeatable; --set takes precedence."),
    ] = None
    kl_type: Annotated[str | None, option("NAME", "Study smoke: low_var_kl (default), kl or mse.")] = None
    trainer: Annotated[
        str | None, option("NAME", "Studies kl and top-p: ragen trains them, see docs/your_trainer.md.")
    ] = None
    rollout_filter_include_zero: Annotated[
        str | None,
        option("BOOL", "Keep groups whose rewards are all equal; default in the studies kl and entropy: True."),
        Setting("filter.rollout_filter_include_zero"),
    ] = None
    rollout_filter_strategy: Annotated[
        str | None,
        option(
            "NAME",
            "top_p (default), top_k (in the studies smoke and smoke-all a count of groups), min_p or top_f.",
        ),
        Setting("filter.rollout_filter_strategy"),
    ] = None
    smoke: Annotated[
        bool, Option("--smoke", help="Smoke run: one seed, a few steps, small batches. Results are meaningless.")
    ] = False
    code: opt.Code = None
    output: opt.Output = Path()
    storage: Annotated[
        str | None, option("URI", "Also copy results and checkpoints to s3://, gs://, or a shared path.")
    ] = None
    extend: opt.Extend = False
    save_freq: Annotated[
        int | None, option("N", "Save a checkpoint every N steps; -1: never."), Setting("trainer.save_freq")
    ] = None
    keep_best: Annotated[
        bool,
        Option("--keep-best", help="Also keep the checkpoint of each run's best validation, for `export --step best`."),
        Setting("trainer.keep_best"),
    ] = False
    dry_run: opt.DryRun = False
    gpus_per_exp: opt.GpusPerExp = None
    ray_num_cpus: opt.RayNumCpus = None
    gpu_memory_utilization: opt.GpuMemoryUtilization = None
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None

    def list_assignments(self) -> tuple[str, ...]:
        """List the `key=value` of each --set and each line of --config. Raises PlanError if a file cannot be used."""
        return merge_assignments(self.config or (), self.assignments or ())


@dataclass(frozen=True)
class RunRequest(StudyRequest):
    """What `run` trains. The options that catalog studies declare for their axes are fields of the same names."""

    values: Annotated[str | None, option("LIST", "Values of the study's axis, for any study; see `list`.")] = None
    kl_values: Annotated[str | None, option("LIST", "Study kl: values of actor.kl_loss_coef, such as 0,0.01.")] = None
    entropy_values: Annotated[
        str | None, option("LIST", "Study entropy: values of actor.entropy_coeff, such as 0,0.003.")
    ] = None
    rollout_filter_value: Annotated[
        str | None, option("LIST", "Study top-p: values of filter.rollout_filter_value, such as 1.0,0.98.")
    ] = None
    algo: Annotated[
        str | None, option("LIST", "Study gradient-analysis: values of algorithm.adv_estimator, PPO,GRPO.")
    ] = None
    arms: Annotated[
        str | None, option("LIST", "Other studies: names of arms, such as ppo-kl0-lr1e-4,ppo-kl0-lr3e-4.")
    ] = None
    groups: Annotated[str | None, option("LIST", "Studies smoke and smoke-all: groups of arms, such as 1,2.")] = None
    baseline_seeds: Annotated[int | None, option("N", "Least number of seeds of the baseline arm.")] = None
    until_resolved: Annotated[
        bool, Option("--until-resolved", help="Add seeds to open arms and the baseline until every arm has a verdict.")
    ] = False
    max_seeds: Annotated[int | None, option("N", "Seeds per arm at which --until-resolved ends; default 20.")] = None


@dataclass(frozen=True)
class SearchRequest:
    """What `search` looks for."""

    trials: Annotated[
        int, option("N", "Number of points to try; the first is the default settings.", min=2, max=MAX_RUNS)
    ]
    vary: Annotated[
        list[str] | None,
        option(
            "SPEC",
            "A setting to change: KEY=LOW:HIGH (:log or :linear), KEY=VALUE,VALUE, or KEY alone; 'SPEC if "
            "KEY=VALUE' for a setting that depends on another; repeatable. Default: rate, KL, entropy, clip range and "
            "filter.",
        ),
    ] = None
    objective: Annotated[str, option("LIST", "success, or success,cost (cost: tokens) for a Pareto front.")] = "success"
    points_per_round: Annotated[int, option("N", "Points that are drawn from the same results.", min=1)] = 4
    search_seed: Annotated[int, option("S", "Seed of the draws of points.", min=0)] = 0
    confirm_seeds: Annotated[
        int,
        option(
            "N",
            "Fresh seeds to compare the best point with the default at the end; 0: no comparison.",
            min=0,
        ),
    ] = 5
    asha: Annotated[
        int | None,
        option(
            "N",
            "Successive halving: at steps N, 3N, 9N, ... stop runs that are not in the best third. They are "
            "censored: their points have no outcome.",
            min=1,
        ),
    ] = None


@dataclass(frozen=True)
class LaunchRequest:
    """Where and how a command that trains runs. Raises PlanError for an unknown status."""

    gpus: opt.Gpus = None
    gpu_memory_gib: Annotated[
        float | None,
        option("N", "Plan for GPUs with N GiB of memory; default: the memory of the visible GPUs, else 80."),
    ] = None
    max_concurrent: Annotated[int | None, option("N", "Maximum number of concurrent runs.")] = None
    address: Annotated[
        str | None, option("A", "Ray cluster to run on (host:port, or auto); default: this machine.")
    ] = None
    wait_for_nodes: Annotated[
        bool, Option("--wait-for-nodes", help="With --address: start although no node can hold a run yet.")
    ] = False
    max_hours: Annotated[
        float | None, option("H", "Stop after H hours, like Ctrl-C: steps are saved.", min=0.001, max=10_000)
    ] = None
    skip_statuses: Annotated[
        str,
        option(
            "LIST",
            "Skip runs that have one of these statuses; the list may also include failed and interrupted.",
        ),
    ] = DEFAULT_SKIPPED
    wandb: Annotated[
        str | None,
        option(
            "MODE",
            "offline (to disk), online, or off; default: as the study was last started, or offline if "
            "trainer.logger contains wandb, else off.",
        ),
    ] = None
    wandb_project: Annotated[
        str | None,
        option("NAME", "Project in W&B; default: that of the last start, WANDB_PROJECT, or that of the study."),
    ] = None

    def __post_init__(self) -> None:
        parse_skipped_statuses(self.skip_statuses)
        if self.wait_for_nodes and self.address is None:
            raise PlanError("--wait-for-nodes waits for nodes of a cluster: type its --address too, or leave it out.")

    @property
    def skipped_statuses(self) -> tuple[str, ...]:
        """The statuses of --skip-statuses; runs with one of them are not run again."""
        return parse_skipped_statuses(self.skip_statuses)

    @cached_property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
        return detect_gpus(os.environ)


@dataclass(frozen=True)
class ProbeRequest:
    """Which checkpoint `probe` measures, and how."""

    trial: opt.Trial = None
    algo: Annotated[str | None, option("NAME", "Study gradient-analysis: choose the run of PPO or of GRPO.")] = None
    checkpoint_step: Annotated[int | None, option("N", "Step of the checkpoint; default: the newest.")] = None
    checkpoint_root: Annotated[
        Path | None, option("DIR", "Folder that contains global_step_<N>; default: the run's.")
    ] = None
    resume_from_path: Annotated[Path | None, option("DIR", "Path of the checkpoint folder global_step_<N>.")] = None
    with_val: Annotated[bool, Option("--with-val", help="First validate the run, sampled and greedy.")] = False
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None
    gpus: opt.Gpus = None
    gpu_memory_utilization: opt.GpuMemoryUtilization = None
    ray_num_cpus: opt.RayNumCpus = None
    assignments: opt.Assignments = None


@dataclass(frozen=True)
class TypedAgain:
    """What a user must type again to use the runs of a folder, because the folder may not decide it."""

    study: Annotated[str | None, option("FILE", "The file of a study that was run from a file, like lr.py.")] = None
    code: opt.Code = None
    allow: opt.Allow = None

    @property
    def allowed(self) -> frozenset[str]:
        """The entries of --allow, as `plan_from_folder` takes them."""
        return frozenset(self.allow or ())

    def load(self) -> OwnStudy | None:
        """Execute the files and return the study of --study, if typed. See `load_typed_code` for the errors."""
        return load_typed_code(self.study, self.code)


def list_assigned_settings(request: object) -> Iterator[tuple[str, str, Any]]:
    """Yield (option, setting, value) for each setting that a typed option of a request assigns."""
    for name, hint in get_type_hints(type(request), include_extras=True).items():
        _, *markers = hint.__metadata__
        value = getattr(request, name)
        if value is not None and value is not False:
            yield from ((f"--{name.replace('_', '-')}", setting, value) for setting in markers)


class ChosenPreset(NamedTuple):
    """The typed or default preset, why it was chosen, and further settings for it."""

    name: str
    reason: str
    settings: Mapping[str, object] = MappingProxyType({})


def find_studies(name: str, request: StudyRequest) -> list[tuple[Study, PartFile | None]]:
    """Find a study, or those of a suite, by its name or its file, each with its source if a file declares it.

    Raises PlanError if there is no such study.
    """
    suite = SUITES.get(normalize_study_name(name))
    is_file = name.endswith(".py")
    for option_name, value in (("--kl-type", request.kl_type), ("--trainer", request.trainer)):
        if value is not None and (is_file or suite is not None):
            raise PlanError(f"{option_name} does not belong to {format_value(name, 1000)}: leave it out.")
    if is_file:
        return [load_own_study(name)]
    if suite is not None:
        return [(STUDIES[study], None) for study in suite]
    return [(find_study(name, request.kl_type, request.trainer), None)]


def plan_from_options(
    study: Study,
    preset: ChosenPreset,
    request: RunRequest,
    source: PartFile | None = None,
    complete: Callable[[StudyPlan], StudyPlan] = lambda plan: plan,
) -> StudyPlan:
    """Plan a study, merged with the study that its folder may already contain. A dry run does not access the storage.

    preset: the preset; the one in `request` is ignored. source: the file that declares the study; None for a study of
    this package. complete: changes the plan before it is merged with the study in the folder.

    Raises PlanError or ConfigError if the study cannot be run.
    """
    check_preset(study, preset.name)
    values = parse_axis_values(study, request)
    known_settings = list_field_names(study.family.config_class)
    game_settings = _collect_game_settings(study, request.env, preset.name)
    # Except those in which the arms differ.
    preset_settings = {
        name: value
        for name, value in preset.settings.items()
        if name in known_settings and name not in study.axis.swept_fields
    }
    option_settings = _collect_option_settings(study, request)
    # Typed settings take precedence over the game's.
    typed_settings = collect_overrides(study, option_settings, request.list_assignments())
    overrides = {**game_settings, **preset_settings, **typed_settings}
    load_named_files(study, source.path if source else "", values, preset.name, overrides.values())
    # The processes of runs have other working folders, where a relative path would not be found.
    for setting in overrides.keys() & set(list_outside_settings(study.family.config_class, "model", "file")):
        if overrides[setting] is not None:
            overrides[setting] = make_absolute(str(overrides[setting]))
    n_seeds = request.seeds
    if request.smoke:
        if not study.smoke_settings:
            raise PlanError(f"--smoke does not belong to study {study.name}: type --steps N for a short run.")
        # Typed settings and seeds take precedence over --smoke.
        overrides = {**study.smoke_settings, **overrides}
        n_seeds = 1 if n_seeds is None else n_seeds
    output = Path(os.path.abspath(os.path.expanduser(request.output)))

    def make_plan_with(settings: Mapping[str, object], reason: str) -> StudyPlan:
        all_overrides = {**overrides, **settings}
        return make_plan(study, preset.name, reason, all_overrides, values, n_seeds, output, request.baseline_seeds)

    try:
        plan = make_plan_with({}, preset.reason)
        torch_settings, reason = _choose_torch(plan, overrides)
        if torch_settings:
            plan = make_plan_with(torch_settings, preset.reason + reason)
    except ConfigError as error:
        # A problem of `--steps 0` names the option, not the setting that it sets.
        problem = str(error)
        for flag, setting, value in list_assigned_settings(request):
            problem = problem.replace(f"{setting}={value}:", f"{flag} {value}:")
        raise ConfigError(problem) from None
    storage = None if request.storage is None else locate.parse_storage_uri(request.storage)
    plan = complete(replace(plan, storage=storage, source=source))
    plan = locate.merge_with_existing(plan, request.extend, is_real=not request.dry_run)
    if not request.until_resolved and request.max_seeds is not None:
        raise PlanError("--max-seeds belongs to --until-resolved: type both, or neither.")
    if not request.until_resolved and plan.max_seeds is None:
        return plan
    from analysis.stats.sequential import find_fewest_seeds  # imports SciPy

    # Without --max-seeds, a study keeps the maximum that it has.
    max_seeds = request.max_seeds or plan.max_seeds or DEFAULT_MAX_SEEDS
    return set_max_seeds(plan, max_seeds, find_fewest_seeds(max(len(plan.values) - 1, 1)))


def _choose_torch(plan: StudyPlan, overrides: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """Choose torch if the preset's compiled code cannot run an arm: return its settings and the reason, else nothing.

    A study that is already in the folder keeps the code with which it began. Typed settings are never replaced:
    compiled code is then used or refused.
    """
    settings = {name: value for name, value in TORCH_SETTINGS.items() if name not in overrides}
    if plan.model is None or not settings:
        return {}, ""
    if (plan.folder / STUDY_FILE).exists():
        recorded_settings = flatten_settings(read_study(plan.folder).settings)
        return {name: recorded_settings[name] for name in settings if name in recorded_settings}, ""
    obstacles = (find_compiled_obstacle(config, os.environ) for config in plan.ppo_configs)
    obstacle = next(filter(None, obstacles), "")
    return (settings, f"; torch instead of compiled code: {obstacle}") if obstacle else ({}, "")


def _collect_option_settings(study: Study, request: RunRequest) -> dict[str, object]:
    """Collect the settings of the typed options. Raises PlanError for a setting that the study does not have."""
    known_settings = list_field_names(study.family.config_class)
    option_settings: dict[str, object] = {}
    for flag, setting, value in list_assigned_settings(request):
        if setting not in known_settings:
            raise PlanError(
                f"{flag} does not belong to study {study.name}, which has no setting {setting}: leave it out. "
                f"`{format_command('settings', study.name, '--all')}` lists its settings."
            )
        is_strategy = setting == "filter.rollout_filter_strategy"
        option_settings[setting] = study.strategy_aliases.get(value, value) if is_strategy else value
    return option_settings


def _collect_game_settings(study: Study, game: str | None, preset: str) -> dict[str, object]:
    """Collect the settings that come with the game of --env. Raises PlanError if study or game do not allow it."""
    games = study.family.games
    if game is None:
        return {}
    if not games:
        raise PlanError(f"--env does not belong to study {study.name}, which plays no game: leave it out.")
    if game.endswith(DATA_SUFFIXES):  # the settings of its game, its file, and the digest of the file
        from trainable.envs.games.dataset import compute_digest  # imports NumPy and pyarrow

        file = Path(game).expanduser().absolute()
        with as_plan_error(ValueError, f"--env {format_value(game, 1000)}: "):
            digest = compute_digest(file)
        settings = _collect_game_settings(study, "dataset", preset)
        return {**settings, "env.dataset.file": str(file), "env.dataset.digest": digest}
    is_own_game = parse_part_name(game) is not None
    if game not in games and not is_own_game:
        raise PlanError(
            f"--env {format_value(game)} is not a game: type one of {', '.join(games)}, a data set of prompts and "
            f"answers ({' or '.join(DATA_SUFFIXES)}), or a game of yours as {PART_FORM}."
        )
    if study.game and game != study.game:
        raise PlanError(
            f"--env does not belong to study {study.name}, whose arms are named after {study.game}: leave it out."
        )
    if is_own_game:
        return {**load_game_settings(game), "env.name": game}
    return study.family.make_game_settings(game, preset)


def parse_axis_values(study: Study, request: RunRequest) -> tuple[str, ...] | None:
    """Parse the typed values of the study's axis, from its flag or --values; None if none were typed.

    Raises PlanError for a flag of another study's axis, and if both options were typed.
    """
    flags = dict.fromkeys((VALUES_OPTION, *(known.axis.option for known in STUDIES.values())))
    texts = {flag: getattr(request, flag.removeprefix("--").replace("-", "_"), None) for flag in flags}
    typed_texts = {flag: text for flag, text in texts.items() if text is not None}
    for flag in typed_texts:
        if flag not in (study.axis.option, VALUES_OPTION):
            raise PlanError(
                f"{flag} does not belong to study {study.name}, whose axis is {study.axis.setting}: "
                f"type {study.axis.option}."
            )
    if len(typed_texts) > 1:
        raise PlanError(
            f"{' and '.join(typed_texts)} are two names for one option of study {study.name}: type one of them."
        )
    return next((expand_groups(study, parse_values(text, flag)) for flag, text in typed_texts.items()), None)

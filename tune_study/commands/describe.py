"""Print studies, plans, settings and statuses: as tables on a terminal, as plain lines elsewhere."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.console import Console

from search_spaces.catalog import FAMILIES
from search_spaces.declaration.study import Study
from trainable.config.command_lines import format_command, quote_argument, split_words
from trainable.config.own_parts import PART_FORM, Choice
from trainable.config.run_config import iter_fields
from trainable.config.setting_types import flatten_settings, format_value, is_common
from trainable.files.json_values import DamageWarning, parse_finite
from trainable.files.step_phase import read_phase
from trainable.runs.history import RunHistory, describe_missing_signal, format_signal_problems
from trainable.runs.study_record import ENDED_STATUSES, RunRecord, StudyRecord, find_record, find_total_steps
from tune_study.folder.outputs import make_study_record
from tune_study.host.console import print_line, print_table
from tune_study.host.machine_checks import Gpu
from tune_study.placement import memory_plan, time_estimate
from tune_study.placement.disk import DiskBudget, format_disk_line
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.placement.resources import load_game_requirements
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import list_resume_options
from tune_study.plan.remarks import find_remarks
from tune_study.plan.search import describe_space
from tune_study.plan.storage_uri import is_uri
from tune_study.plan.study_plan import ResourcePlan, StudyPlan, check_preset, make_base_config
from tune_study.plan.typed_settings import format_values


def print_studies(console: Console, studies: Sequence[Study], suites: Mapping[str, Sequence[str]]) -> None:
    """Print a table of studies and their questions, and of the suites."""
    rows = [[study.name, study.question.strip()] for study in studies]
    suite_rows = [[name, f"a suite: {', '.join(members)}, one after another"] for name, members in suites.items()]
    print_table(console, ("study", "question"), rows + suite_rows)
    print_line(console, f"Axis and values of a study: {format_command('list', studies[0].name)}")


def print_study(console: Console, study: Study) -> None:
    """Print the question of a study, its axis, and the values of each preset."""
    print_line(console, f"{study.name}: {study.question.strip()}")
    print_line(console, f"  axis    {study.axis.setting}, option {study.axis.option}")
    grids = study.axis.grids
    is_same = len(set(grids.values())) == 1  # all presets have the same values
    for name, grid in [("values", next(iter(grids.values())))] if is_same else grids.items():
        print_line(console, f"  {name:<7} {format_values(study, grid)}")
    if study.cpu_preset != Study.cpu_preset:
        print_line(console, f"  preset  {study.cpu_preset} by default, where the GPUs cannot hold paper")
    print_line(console, f"Plan of its runs: {format_command('run', study.name, '--dry-run')}")


class PreparedStudy(NamedTuple):
    """A study, and the resources that it gets and needs."""

    plan: StudyPlan
    resource_plan: ResourcePlan
    disk_budget: DiskBudget
    memory: MemoryPlan | None
    """None without GPUs, or if no memory plan can be made."""
    used_gpus: tuple[Gpu, ...]
    """The GPUs of this machine that the study uses."""

    @property
    def space_line(self) -> str:
        """The disk budget as a line; for a study with a storage, the space that it needs there."""
        return format_disk_line(self.disk_budget, self.plan.study_uri)


def summarize_plan(study: PreparedStudy) -> dict[str, Any]:
    """Summarize the plan of a study: its runs, and in lines its resources, steps, paths, memory and time, where known.

    resolved_difference: the smallest one that the seeds probably resolve (`find_resolved_difference`); missing if there
    is none. memory: missing without GPUs.
    """
    plan, resource_plan, memory = study.plan, study.resource_plan, study.memory
    difference, power = math.nan, ""
    if len(plan.values) > 1:
        from analysis.sweep.planned_power import describe_power, find_resolved_difference  # imports pandas and SciPy

        record = make_study_record(plan)
        power = describe_power(record)
        if plan.max_seeds is None:  # with a test at every look, it depends on how many looks follow
            difference = find_resolved_difference(record, len(plan.seeds))
    arm_configs = {run.arm: run.config for run in plan.runs if run.seed == plan.seeds[0]}
    commands = {arm: text for arm, config in arm_configs.items() if (text := plan.study.family.format_command(config))}
    lines = [
        *_describe_runs(plan, resource_plan),
        *_describe_search(plan),
        *_describe_fork(plan),
        *_describe_game(plan),
        *_describe_commands(commands),
        *plan.study.family.describe(plan.base_config),
        power,
        time_estimate.format_time_line(plan, resource_plan, memory, [gpu.name for gpu in study.used_gpus]),
        study.space_line,
        f"Results: {plan.folder}",
        f"Summary log: {plan.summary_log}",
    ]
    if memory is not None:
        lines += memory_plan.format_memory_plan(memory)
    elif resource_plan.gpu_slots and plan.model is not None:
        lines.append(
            f"Memory: unknown, because no config.json of a trainable model was found for {plan.model}, and its sizes "
            "are not built in."
        )
    return {
        "study": plan.study.name,
        "preset": plan.preset,
        "model": plan.model,
        "setting": plan.study.axis.setting,
        "arms": list(plan.values),
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "resolved_difference": difference,
        "results": str(plan.folder),
        "cpus": resource_plan.cpus,
        "gpu_slots": list(resource_plan.gpu_slots),
        "max_concurrent": resource_plan.max_concurrent,
        "disk": {"needed_bytes": study.disk_budget.needed_bytes, "free_bytes": study.disk_budget.free_bytes},
        "memory": memory
        and {"peak_bytes": memory.peak, "budget_bytes": memory.budget, "host_bytes": memory.host_bytes},
        "runs": [
            {
                "run": run.run_id,
                "arm": run.arm,
                "seed": run.seed,
                "steps": run.steps,
                "log": run.log_path.as_posix(),
                "checkpoints": run.checkpoint_dir.as_posix(),
            }
            for run in plan.runs
        ],
        "commands": commands,
        "lines": list(filter(None, lines)),
    }


def _describe_commands(commands: Mapping[str, str]) -> Iterator[str]:
    """Describe the command of the first arm, and in what those of the others differ from it."""
    first: list[str] = []
    for arm, text in commands.items():
        words = split_words(text)
        if len(words) != len(first):
            yield f"Command of arm {arm}: {text}"
            first = first or words
            continue
        differing = [
            # A value stands behind its flag.
            f"{words[number - 1]} " * words[number - 1].startswith("-") + quote_argument(word)
            for number, word in enumerate(words)
            if word != first[number]
        ]
        yield f"Arm {arm} differs in: {' '.join(differing)}"


def print_plan(console: Console, plan: StudyPlan, summary: Mapping[str, Any]) -> None:
    """Print the notes and the plan of a study. summary: from `summarize_plan`, with notes."""
    for line in (*summary["notes"], *summary["lines"]):
        print_line(console, line)
    if plan.search is not None or plan.forks is not None:
        # A point has no value for a setting whose condition it does not meet.
        settings = list(dict.fromkeys(name for point in plan.points.values() for name in point))
        points = [[arm, *(str(point.get(name, "")) for name in settings)] for arm, point in plan.points.items()]
        print_table(
            console, ("point" if plan.search else "arm", *(name.rpartition(".")[2] for name in settings)), points
        )
    rows = [[str(cell) for cell in run.values()] for run in summary["runs"]]
    print_table(console, ("run", "arm", "seed", "steps", "log", "checkpoints"), rows, ("checkpoints", "log", "run"))


def _describe_search(plan: StudyPlan) -> Iterator[str]:
    """Describe what a search does after the runs of its plan; yield nothing for other studies."""
    if plan.search is None:
        return
    search, num_points = plan.search, len(plan.points)
    yield f"Space: {describe_space(search.space)}"
    if rest := search.num_points - num_points:
        yield (
            f"Search: {rest} points follow these {num_points}, drawn {search.points_per_round} at a time from their "
            f"results: {rest * len(plan.seeds)} more runs"
        )
    if search.confirm_seeds:
        yield (
            f"Then the best point is compared with the default on {search.confirm_seeds} fresh seeds: "
            f"{2 * search.confirm_seeds} more runs"
        )


def _describe_fork(plan: StudyPlan) -> Iterator[str]:
    """Describe what the runs of a fork continue; yield nothing for other studies."""
    forks = plan.forks
    if forks is None:
        return
    from analysis.data.summaries import LATE_EVALUATIONS  # imports pandas

    parent = find_record(StudyRecord, plan.folder.with_name(forks.folder))
    others = [] if parent is None else [entry.seed for entry in parent.runs if entry.arm == forks.arm]
    left_out = [str(seed) for seed in others if seed not in plan.seeds]
    steps = sorted({*forks.steps.values()})
    exception = f"; without its seed{'s' * (len(left_out) > 1)} {', '.join(left_out)}" if left_out else ""
    yield (
        f"Fork: arm {format_value(forks.arm)} of {format_value(forks.folder)} is continued from "
        f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}, with its rows up to there{exception}"
    )
    trainer = plan.base_config.trainer
    if trainer.test_freq > 0 and trainer.total_training_steps - steps[-1] < LATE_EVALUATIONS * trainer.test_freq:
        yield (
            f"Remark: the outcome is the mean of the last {LATE_EVALUATIONS} validations, and some of them are not "
            f"after step {steps[-1]}, so they are equal in all arms: type --steps for longer runs."
        )


def _describe_game(plan: StudyPlan) -> Iterator[str]:
    """Describe what success means in the game of the base configuration, what games read, and what they send."""
    if not plan.study.family.games:
        return
    from trainable.envs.games.make import describe_success_range  # imports NumPy

    yield describe_success_range(plan.ppo_config.env)
    for game in load_game_requirements(plan):
        yield from game.describe(plan)


def _describe_runs(plan: StudyPlan, resource_plan: ResourcePlan) -> Iterator[str]:
    """Describe the study, its model, its runs and their steps, and the resources that each run reserves."""
    trainer = plan.base_config.trainer
    yield f"Study {plan.study.name}: {plan.study.question.strip()}"
    is_own = not plan.study.family.format_command(plan.base_config)
    if is_own:  # a command has its own scale
        yield f"Preset {plan.preset}: {plan.preset_reason}"
    if plan.model is not None:
        yield f"Model: {plan.model}"
    seeds = ",".join(map(str, plan.seeds))
    for value, added in plan.extra_seeds.items():  # single arms may have more
        name = "the baseline" if value == plan.baseline else format_value(value)
        seeds += f"; of {name} also {','.join(map(str, added))}"
    values = format_values(plan.study, plan.values)
    yield f"{len(plan.runs)} run{'s' * (len(plan.runs) > 1)}: {plan.study.axis.setting} in {values}; seeds {seeds}"
    validation = f"every {trainer.test_freq} steps" if trainer.test_freq > 0 else "after the last one only"
    yield f"Steps per run: {trainer.total_training_steps}" + f", validation {validation}" * is_own
    trial = "Each trial (all seeds of an arm)" if plan.study.family.has_batched_seeds else "Each run"
    bundles = " + ".join(" ".join(f"{n:g} {kind}" for kind, n in bundle.items()) for bundle in resource_plan.bundles)
    note = " (--ray-num-cpus; the cores of this machine are not counted)" if resource_plan.gpu_slots else ""
    yield f"{trial} reserves {bundles}; {resource_plan.max_concurrent} at once on {resource_plan.cpus} CPUs{note}"
    if resource_plan.gpu_slots:
        yield f"GPU slots (ids): {' '.join(resource_plan.gpu_slots)}"
    yield from resource_plan.notes
    yield from find_remarks(plan)


def read_status(folder: Path, location: str, study: StudyRecord, is_running: bool) -> dict[str, Any]:
    """Read whether a study is running, finished or unfinished, and the status of every run.

    location: the folder as it was typed, or the URI that its files were fetched from. study: the content of study.json.
    is_running: whether a driver runs the study. Without one, a run with the status `running` was interrupted: its
    driver was killed before it could write another status.
    """
    family, runs = FAMILIES[study.family], list[dict[str, Any]]()
    problems: list[tuple[str, str]] = []
    for entry in study.runs:
        run_dir = folder / "runs" / entry.run_id
        record = find_record(RunRecord, run_dir)
        # Arms may differ in their steps, so the run's number is used; without run.json, the study's.
        total_steps = find_total_steps({} if record is None else record.config) or study.total_steps
        history = RunHistory.read(run_dir, total_steps, is_live=is_running)
        for note in history.notes:
            warnings.warn(note, DamageWarning, stacklevel=2)
        status, step_rows = history.status, history.rows
        step = step_rows[-1]["step"] if step_rows else 0
        if step_rows:
            problems.append((entry.arm, describe_missing_signal(step_rows)))
        # Rows are read from disk and may be damaged, so values that are not finite numbers are skipped.
        values = (parse_finite(row.get(family.primary_metric)) for row in reversed(step_rows))
        collapse_step = history.find_collapse(study.get_fork_step(entry.arm)) if family.has_symptoms else math.inf
        phase = read_phase(run_dir, step + 1) if status.status == "running" else ""
        runs.append(
            {
                "run": entry.run_id,
                "arm": entry.arm,
                "seed": entry.seed,
                "status": status.status,
                "status_text": status.display_text,
                "step": step,
                "steps": total_steps,
                "value": next((value for value in values if value is not None), None),
                "collapse_step": None if collapse_step == math.inf else collapse_step,
                "reason": f"step {step + 1}: {phase}" if phase else status.reason,
            }
        )
    is_finished = {run["status_text"] for run in runs} <= set(ENDED_STATUSES)
    is_running |= any(run["status"] == "running" for run in runs)
    state = "running" if is_running else "finished" if is_finished else "unfinished"
    command = None
    if state == "unfinished" and family.trainable:
        code_paths = [file.path for file in study.code]
        options = list_resume_options(study.declaration.path if study.declaration else None, code_paths)
        command = format_command("resume", location if is_uri(location) else Path(location), *options)
    return {
        "study": study.name,
        "preset": study.preset,
        "state": state,
        "metric": family.primary_metric,
        "runs": runs,
        "notes": list(format_signal_problems(problems)),
        "resume_command": command,
    }


def print_status(console: Console, status: Mapping[str, Any]) -> None:
    """Print the progress of a study from `read_status`."""
    counts = Counter(run["status_text"] for run in status["runs"])
    runs_text = ", ".join(f"{count} {name}" for name, count in counts.items())
    print_line(console, f"{status['study']} ({status['preset']}): {status['state']}; runs: {runs_text}")
    rows = [
        [
            run["arm"],
            str(run["seed"]),
            run["status_text"],
            f"{run['step']}/{run['steps']}",
            "-" if run["value"] is None else f"{run['value']:.3f}",
            "" if run["collapse_step"] is None else f"step {run['collapse_step']:g}",
            run["reason"] if run["status"] != "completed" else "",  # the steps say it
            run["run"],
        ]
        for run in status["runs"]
    ]
    metric = status["metric"].replace("_", " ")
    headings = ["arm", "seed", "status", "step", metric, "collapsed", "reason", "run"]
    columns = [
        column
        for column in zip(headings, *rows, strict=True)
        if any(column[1:]) or column[0] not in ("collapsed", "reason")
    ]
    headings, *rows = map(list, zip(*columns, strict=True))
    print_table(console, headings, rows, ("run",))
    for sentence in status["notes"]:
        print_line(console, sentence)
    if status["resume_command"]:
        print_line(console, f"Continue with: {status['resume_command']}")


def print_settings(
    console: Console, study: Study, words: str = "", preset: str | None = None, *, with_all: bool = False
) -> None:
    """Print the settings of a study except the seed: their values under each preset, meaning and allowed values.

    words: print the settings whose names begin with this, or else those with all words in name or meaning. Without
    words, print every setting (with_all), or the most common ones, and the command that lists the others. preset: the
    only one whose values are printed. Raises PlanError if there is no such setting or preset.
    """
    family = study.family
    if preset is not None:
        check_preset(study, preset)
    presets = [*family.presets] if preset is None else [preset]
    configs = [flatten_settings(make_base_config(study, name).model_dump()) for name in presets]
    fields = {name: field for name, field in iter_fields(family.config_class) if name != "seed"}
    meanings = {name: " ".join((field.description or "").split()) for name, field in fields.items()}
    parts = words.lower().split()
    listed = [name for name in fields if name.startswith(words)] or [
        name for name in fields if all(part in f"{name} {meanings[name]}".lower() for part in parts)
    ]
    if not listed:
        raise PlanError(
            f"No setting of study {study.name} has {format_value(words)} in its name or meaning: type other words, or "
            f"first the name of another study. All settings: {format_command('settings', study.name, '--all')}"
        )
    if not (words or with_all):
        listed = [name for name in listed if is_common(fields[name])]
    rows = []
    for name in listed:
        field, values = fields[name], [config[name] for config in configs]
        defaults = [f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value) for value in values]
        if name in study.axis.swept_fields:  # the arms differ in it
            defaults = [study.axis.option] * len(values)
        allowed = _format_allowed(field.annotation, field.metadata)
        if name in family.config_class.schedulable_settings:
            allowed += ", or a schedule"
        rows.append([name, *defaults, meanings[name], allowed])
    print_table(console, ("setting", *presets, "meaning", "allowed"), rows)
    if not words and len(rows) < len(fields):
        command = format_command("settings", study.name, "--all")
        print_line(console, f"{len(fields) - len(rows)} more settings are rarely changed: {command}")


def _format_allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    """Describe the allowed values of a field. annotation, metadata: the field's type and constraints in pydantic."""
    for constraint in metadata:
        if isinstance(choice := getattr(constraint, "func", None), Choice):
            return " | ".join((*choice.names, PART_FORM))
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    bounds = [
        f"{sign} {getattr(constraint, bound):g}"
        for constraint in metadata
        for bound, sign in {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}.items()
        if getattr(constraint, bound, None) is not None
    ]
    type_names = {bool: "True | False", int: "whole number", float: "number", str: "text"}
    # Checked before other unions: `int | None` is shown as `whole number, or null`.
    alternatives = get_args(annotation)
    if type(None) in alternatives:
        inner = FieldInfo.from_annotation(alternatives[0])  # which may have bounds of its own
        return f"{_format_allowed(inner.annotation, [*metadata, *inner.metadata])}, or null"
    if get_origin(annotation) is Union:
        return " | ".join(_format_allowed(form, metadata) for form in alternatives)
    return " ".join([type_names.get(annotation, "list"), ", ".join(bounds)]).strip()

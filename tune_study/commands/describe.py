"""Studies, plans, settings and statuses as tables for a terminal, and as plain lines for everything else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console

from search_spaces import FAMILIES
from search_spaces.declaration.family import Family
from search_spaces.declaration.study import Study
from search_spaces.language_model.family import PPO
from trainable.config.run_config import RunConfig
from trainable.config.setting_types import is_common
from trainable.runs.run_files import METRICS_FILE, read_rows
from tune_study.folder import outputs
from tune_study.host.console import print_line, print_table
from tune_study.placement import memory_plan, time_estimate
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.plan.allotment import ResourcePlan
from tune_study.plan.study_plan import StudyPlan, format_values


def print_studies(console: Console, studies: Sequence[Study], suites: Mapping[str, Sequence[str]]) -> None:
    """Each study with its question, axis and grids, then the suites."""
    for study in studies:
        print_line(console, f"{study.name}: {study.question.strip()}")
        print_line(console, f"  setting {study.axis.setting}, chosen with {study.axis.option}")
        grids = study.axis.grids
        if len(set(grids.values())) == 1:
            print_line(console, f"  values  {format_values(study, next(iter(grids.values())))}")
        else:
            for preset, grid in grids.items():
                print_line(console, f"  {preset:<7} {format_values(study, grid)}")
        print_line(console, "")
    for name, members in suites.items():
        print_line(console, f"{name}: the studies {', '.join(members)}, one after another")


def print_plan(
    console: Console,
    plan: StudyPlan,
    resource_plan: ResourcePlan,
    disk_line: str,
    memory: MemoryPlan | None,
    gpu_names: tuple[str, ...],
) -> None:
    """What would run: names, resources, steps, places and memory.

    disk: the line of its disk budget. memory: of the run that takes most of its GPUs. cards: names of the GPUs in use.
    """
    for line in [
        *_format_plan_lines(plan, resource_plan),
        disk_line,
        f"results {plan.folder}",
        f"summary log {plan.summary_log}",
    ]:
        print_line(console, line)
    if resource_plan.gpu_slots:
        print_memory(console, plan, resource_plan, memory, gpu_names)
    rows = [
        [
            spec.run_id,
            spec.arm,
            str(spec.seed),
            str(spec.steps),
            spec.log_path.as_posix(),
            spec.checkpoint_dir.as_posix(),
        ]
        for spec in plan.runs
    ]
    print_table(console, ("run", "arm", "seed", "steps", "log", "checkpoints"), rows)


def _format_plan_lines(plan: StudyPlan, resource_plan: ResourcePlan) -> list[str]:
    """What is run, how often, and what each run reserves."""
    trainer = plan.base_config.trainer
    reserved_resources = " + ".join(
        " ".join(f"{n:g} {kind}" for kind, n in bundle.items()) for bundle in resource_plan.bundles
    )
    values = format_values(plan.study, plan.values)
    lines = [
        f"study {plan.study.name}: {plan.study.question.strip()}",
        f"preset {plan.preset}: {plan.preset_reason}",
        *([] if plan.model is None else [f"model {plan.model}"]),
        f"{len(plan.runs)} runs: {plan.study.axis.setting} in {values}; seeds {_format_seeds(plan)}",
        f"steps a run {trainer.total_training_steps}, validation every {trainer.test_freq} steps",
        f"{_describe_trial(plan)} reserves {reserved_resources}; {resource_plan.max_concurrent} at once on {resource_plan.cpus} CPUs",
    ]
    if resource_plan.gpu_slots:
        lines.append(f"GPU slots {' '.join(resource_plan.gpu_slots)}")
    return [*lines, *resource_plan.notes]


def _describe_trial(plan: StudyPlan) -> str:
    """What reserves resources."""
    return "a trial of all seeds of an arm" if plan.study.family.has_batched_seeds else "a run"


def print_memory(
    console: Console,
    plan: StudyPlan,
    resource_plan: ResourcePlan,
    memory: MemoryPlan | None,
    gpu_names: tuple[str, ...],
) -> None:
    """The memory of a run part by part, whether it fits, and an estimate of time for cards whose rates are known."""
    if memory is None:
        print_line(
            console,
            f"memory: not known, since neither a config.json that can be trained nor the sizes of "
            f"{plan.model} are here",
        )
        return
    for line in memory_plan.format_memory_plan(memory, plan.study):
        print_line(console, line)
    print_table(console, *memory_plan.make_memory_table(memory))
    estimate = time_estimate.format_time_line(memory, plan, resource_plan, gpu_names)
    if estimate is not None:
        print_line(console, estimate)


def _format_seeds(plan: StudyPlan) -> str:
    return ",".join(str(seed) for seed in plan.seeds)


def print_status(console: Console, folder: Path, study: dict[str, Any], is_running: bool) -> None:
    """Every run of results/<run> with its status; one that says `running` while nobody runs it was interrupted."""
    rows, metric = [], FAMILIES.get(study.get("family", PPO.name), PPO).primary_metric
    for entry in study["runs"]:
        run_dir = folder / "runs" / entry["run_id"]
        status = outputs.read_status(run_dir) or outputs.RunStatus(entry["run_id"], "never_ran")
        shown_status, reason = status.display_text, status.reason
        if shown_status == "running" and not is_running:
            shown_status, reason = "interrupted", "the process that ran the study is gone"
        step_rows = read_rows(run_dir / METRICS_FILE, first_step=0)
        step = step_rows[-1]["step"] if step_rows else 0
        total_steps = study["settings"]["trainer"]["total_training_steps"]
        metric_values = (row.get(metric) for row in reversed(step_rows))
        metric_value = next(
            (share for share in metric_values if isinstance(share, int | float) and 0 <= share <= 1), None
        )
        cells = [entry["run_id"], entry["arm"], str(entry["seed"]), shown_status, f"{step}/{total_steps}"]
        rows.append([*cells, "-" if metric_value is None else f"{metric_value:.3f}", reason])
    print_line(console, f"{study['name']} ({study['preset']}): {'running' if is_running else 'not running'}")
    print_table(console, ("run", "arm", "seed", "status", "step", metric, "reason"), rows)


class SettingRow(NamedTuple):
    """A setting as it is listed. name: dotted. is_common: whether the short list has it."""

    name: str
    default: str
    meaning: str
    allowed: str
    is_common: bool


def print_settings(console: Console, family: Family = PPO, *, with_all: bool = False) -> None:
    """The settings of a family, each with its default, what it means and what it may be.

    with_all: every setting. Otherwise those that are changed most, and a last line with the number of the others and
    the command that lists them.
    """
    table = make_settings_rows(family.config_class)
    rows = [row for row in table if with_all or row.is_common]
    print_table(console, ("setting", "default", "meaning", "allowed"), [list(row[:-1]) for row in rows])
    if len(rows) < len(table):
        n_others = len(table) - len(rows)
        print_line(
            console,
            f"{n_others} more settings are seldom changed: python -m tune_study {family.config_class.list_command} --all",
        )


def make_settings_rows(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[SettingRow]:
    """Every setting in order of declaration; the seed, which is --seeds, left out."""
    rows: list[SettingRow] = []
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += make_settings_rows(annotation, f"{prefix}{name}.")
        elif name != "seed":
            cells = _format_value(field.default), field.description or "", _format_allowed(annotation, field.metadata)
            rows.append(SettingRow(prefix + name, *cells, is_common(field)))
    return rows


def _format_value(value: object) -> str:
    return f"[{', '.join(str(entry) for entry in value)}]" if isinstance(value, tuple) else str(value)


def _format_allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    """The values that a field takes, in words."""
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    operators = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(constraint, bound):g}"
        for constraint in metadata
        for bound, sign in operators.items()
        if getattr(constraint, bound, None) is not None
    ]
    type_names = {bool: "True | False", int: "whole number", float: "number", str: "text"}
    alternatives = get_args(annotation)
    if type(None) in alternatives:
        return f"{_format_allowed(alternatives[0], metadata)}, or null"
    if get_origin(annotation) is Union:
        return " | ".join(_format_allowed(form, metadata) for form in alternatives)
    return " ".join([type_names.get(annotation, "list"), ", ".join(bounds)]).strip()

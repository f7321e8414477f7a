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
from trainable.runs.run_files import METRICS, read_rows
from tune_study.folder import outputs
from tune_study.host.console import print_table, say
from tune_study.placement import memory_plan, time_estimate
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import StudyPlan, values_said


def print_studies(console: Console, studies: Sequence[Study], suites: Mapping[str, Sequence[str]]) -> None:
    """Each study with its question, axis and grids, then the suites."""
    for study in studies:
        say(console, f"{study.name}: {study.question.strip()}")
        say(console, f"  setting {study.axis.setting}, chosen with {study.axis.option}")
        grids = study.axis.grids
        if len(set(grids.values())) == 1:
            say(console, f"  values  {values_said(study, next(iter(grids.values())))}")
        else:
            for preset, grid in grids.items():
                say(console, f"  {preset:<7} {values_said(study, grid)}")
        say(console, "")
    for name, members in suites.items():
        say(console, f"{name}: the studies {', '.join(members)}, one after another")


def print_plan(
    console: Console,
    plan: StudyPlan,
    allotment: Allotment,
    disk: str,
    memory: MemoryPlan | None,
    cards: tuple[str, ...],
) -> None:
    """What would run: names, resources, steps, places and memory.

    disk: the line of its disk budget. memory: of the run that takes most of its GPUs. cards: names of the GPUs in use.
    """
    for line in [*_plan_lines(plan, allotment), disk, f"results {plan.folder}", f"summary log {plan.summary_log}"]:
        say(console, line)
    if allotment.slots:
        print_memory(console, plan, allotment, memory, cards)
    rows = [
        [spec.run_id, spec.arm, str(spec.seed), str(spec.steps), spec.log.as_posix(), spec.checkpoints.as_posix()]
        for spec in plan.runs
    ]
    print_table(console, ("run", "arm", "seed", "steps", "log", "checkpoints"), rows)


def _plan_lines(plan: StudyPlan, allotment: Allotment) -> list[str]:
    """What is run, how often, and what each run reserves."""
    trainer = plan.base.trainer
    reserved = " + ".join(" ".join(f"{n:g} {kind}" for kind, n in bundle.items()) for bundle in allotment.bundles)
    values = values_said(plan.study, plan.values)
    lines = [
        f"study {plan.study.name}: {plan.study.question.strip()}",
        f"preset {plan.preset}: {plan.preset_reason}",
        *([] if plan.model is None else [f"model {plan.model}"]),
        f"{len(plan.runs)} runs: {plan.study.axis.setting} in {values}; seeds {_seeds(plan)}",
        f"steps a run {trainer.total_training_steps}, validation every {trainer.test_freq} steps",
        f"{_carrier(plan)} reserves {reserved}; {allotment.max_concurrent} at once on {allotment.cpus} CPUs",
    ]
    if allotment.slots:
        lines.append(f"GPU slots {' '.join(allotment.slots)}")
    return [*lines, *allotment.notes]


def _carrier(plan: StudyPlan) -> str:
    """What reserves resources."""
    return "a trial of all seeds of an arm" if plan.study.family.seeds_together else "a run"


def print_memory(
    console: Console, plan: StudyPlan, allotment: Allotment, memory: MemoryPlan | None, cards: tuple[str, ...]
) -> None:
    """The memory of a run part by part, whether it fits, and an estimate of time for cards whose rates are known."""
    if memory is None:
        say(
            console,
            f"memory: not known, since neither a config.json that can be trained nor the sizes of "
            f"{plan.model} are here",
        )
        return
    for line in memory_plan.lines(memory, plan.study):
        say(console, line)
    print_table(console, *memory_plan.table(memory))
    estimate = time_estimate.line(memory, plan, allotment, cards)
    if estimate is not None:
        say(console, estimate)


def _seeds(plan: StudyPlan) -> str:
    return ",".join(str(seed) for seed in plan.seeds)


def print_status(console: Console, folder: Path, study: dict[str, Any], is_running: bool) -> None:
    """Every run of results/<run> with its status; one that says `running` while nobody runs it was interrupted."""
    rows, measure = [], FAMILIES.get(study.get("family", PPO.name), PPO).measure
    for entry in study["runs"]:
        run_dir = folder / "runs" / entry["run_id"]
        status = outputs.read_status(run_dir) or outputs.RunStatus(entry["run_id"], "never_ran")
        shown, reason = status.shown, status.reason
        if shown == "running" and not is_running:
            shown, reason = "interrupted", "the process that ran the study is gone"
        measured = read_rows(run_dir / METRICS, first=0)
        step = measured[-1]["step"] if measured else 0
        total = study["settings"]["trainer"]["total_training_steps"]
        found = (row.get(measure) for row in reversed(measured))
        share = next((share for share in found if isinstance(share, int | float) and 0 <= share <= 1), None)
        cells = [entry["run_id"], entry["arm"], str(entry["seed"]), shown, f"{step}/{total}"]
        rows.append([*cells, "-" if share is None else f"{share:.3f}", reason])
    say(console, f"{study['name']} ({study['preset']}): {'running' if is_running else 'not running'}")
    print_table(console, ("run", "arm", "seed", "status", "step", measure, "reason"), rows)


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
    table = settings_table(family.config)
    rows = [row for row in table if with_all or row.is_common]
    print_table(console, ("setting", "default", "meaning", "allowed"), [list(row[:-1]) for row in rows])
    if len(rows) < len(table):
        others = len(table) - len(rows)
        say(console, f"{others} more settings are seldom changed: python -m tune_study {family.config.listed} --all")


def settings_table(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[SettingRow]:
    """Every setting in order of declaration; the seed, which is --seeds, left out."""
    rows: list[SettingRow] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += settings_table(kind, f"{prefix}{name}.")
        elif name != "seed":
            words = _text(field.default), field.description or "", _allowed(kind, field.metadata)
            rows.append(SettingRow(prefix + name, *words, is_common(field)))
    return rows


def _text(value: object) -> str:
    return f"[{', '.join(str(entry) for entry in value)}]" if isinstance(value, tuple) else str(value)


def _allowed(kind: Any, metadata: Sequence[Any]) -> str:
    """The values that a field takes, in words."""
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(constraint, bound):g}"
        for constraint in metadata
        for bound, sign in signs.items()
        if getattr(constraint, bound, None) is not None
    ]
    words = {bool: "True | False", int: "whole number", float: "number", str: "text"}
    forms = get_args(kind)
    if type(None) in forms:
        return f"{_allowed(forms[0], metadata)}, or null"
    if get_origin(kind) is Union:
        return " | ".join(_allowed(form, metadata) for form in forms)
    return " ".join([words.get(kind, "list"), ", ".join(found)]).strip()

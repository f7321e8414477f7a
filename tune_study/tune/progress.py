"""What a person sees while a study runs: a live table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from search_spaces.declaration.family import Family
from trainable.runs.stop_rules import finite
from tune_study.plan.study_plan import RunSpec, StudyPlan

_LINE_EVERY = 10
"""Without a terminal: steps between two lines of a run that does not validate."""


@dataclass
class RunView:
    """What is shown of one run; None is "not known yet". numbers: the last that were measured of the shown columns."""

    spec: RunSpec
    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    status: str = "waiting"

    @property
    def seconds_a_step(self) -> float | None:
        """Mean seconds of a step so far."""
        return self.seconds / self.step if self.seconds is not None and self.step else None

    @property
    def is_open(self) -> bool:
        """Whether steps are still to come."""
        return self.status in ("waiting", "running")


def step_line(family: Family, row: dict[str, Any], total: int) -> str:
    """One training step as a readable line: names in full, what was not measured left out."""
    parts = [f"step {row.get('step')}/{total}"]
    for shown in family.line:
        value = finite(row.get(shown.column))
        if value is not None:
            parts.append(f"{shown.name}={value:{shown.form}}")
    if row.get("stop_rule"):
        parts.append(f"early_stop={stop_reason(row)}")
    return " ".join(parts)


def stop_reason(row: dict[str, Any]) -> str:
    """The decision of a stop rule, as it stands in its row, in words."""
    side = "is below" if row["stop_value"] < row["stop_threshold"] else "reached"
    return (
        f"{row['stop_rule']} at step {row['stop_step']}: {row['stop_value']:.4g} {side} "
        f"the threshold {row['stop_threshold']:.4g}"
    )


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss or m:ss; a dash when not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """The state of every run of a study, shown as it changes."""

    def __init__(self, plan: StudyPlan, max_concurrent: int, console: Console) -> None:
        self.title = f"{plan.study.name} ({plan.preset})"
        self._family = plan.study.family
        self.views = {spec.run_id: RunView(spec) for spec in plan.runs}
        self._trials = [[self.views[spec.run_id] for spec in specs] for specs in plan.trials]
        self._lanes = max_concurrent
        self._console = console
        self._started = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the terminal while the body runs, and leave it there at the end."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self.table, console=self._console, refresh_per_second=2, transient=False):
            yield

    def skip(self, run_id: str, status: str, step: int, measured: float | None) -> None:
        """A run that had ended before this start. measured: its last number of the family's measure."""
        view = self.views[run_id]
        view.status, view.step = status, step
        if measured is not None:
            view.numbers[self._family.measure] = measured

    def start(self, run_id: str) -> None:
        """A run starts, or starts again."""
        self.views[run_id].status = "running"
        self._say(run_id, "started")

    def again(self, run_id: str, reason: str) -> None:
        """A run failed and will be tried again."""
        self._say(run_id, f"failed, trying again: {reason}")

    def remark(self, run_id: str, note: str) -> None:
        """Something that a person should know, such as a checkpoint that could not be used."""
        self._say(run_id, note)

    def row(self, run_id: str, row: dict[str, Any]) -> None:
        """A training step is done."""
        view = self.views[run_id]
        view.step = int(finite(row.get("step")) or view.step)
        for shown in self._family.shown:
            known = (finite(row.get(shown.column)), view.numbers.get(shown.column), finite(row.get(shown.before)))
            value = next((value for value in known if value is not None), None)
            if value is not None:
                view.numbers[shown.column] = value
        view.seconds = finite(row.get("seconds_total"))
        if finite(row.get(self._family.measure)) is not None or view.step % _LINE_EVERY == 0:
            line = step_line(self._family, row, view.spec.steps)
            self._say(run_id, f"{line} time_left={clock(self.time_left(view))}")

    def end(self, run_id: str, status: str, reason: str) -> None:
        """A run has ended."""
        self.views[run_id].status = status
        self._say(run_id, f"{status}: {reason}")

    def time_left(self, view: RunView) -> float | None:
        """Seconds that a run still needs at its mean pace, or at that of the others before its first step."""
        if not view.is_open:
            return 0.0
        paces = [other.seconds_a_step for other in self.views.values() if other.seconds_a_step is not None]
        pace = view.seconds_a_step if view.seconds_a_step is not None else (sum(paces) / len(paces) if paces else None)
        return None if pace is None else pace * (view.spec.steps - view.step)

    def study_time_left(self) -> float | None:
        """Seconds that the study still needs: its work over the trials at once, but at least its longest one.

        The runs of a trial go on together: it needs what the longest of them does.
        """
        trials = [[self.time_left(view) for view in views if view.is_open] for views in self._trials]
        if any(seconds is None for left in trials for seconds in left):
            return None
        known = [max(seconds for seconds in left if seconds is not None) for left in trials if left]
        return max(sum(known) / max(min(self._lanes, len(known)), 1), max(known, default=0.0))

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the live table."""
        return ("arm", "seed", "step", *(shown.name for shown in self._family.shown), "time left", "status")

    def table(self) -> Table:
        """The live table."""
        elapsed, left = clock(time.monotonic() - self._started), clock(self.study_time_left())
        table = Table(title=f"{self.title}  elapsed {elapsed}  left {left}", title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("arm", "status") else "right")
        for view in self.views.values():
            table.add_row(*self._cells(view))
        return table

    def _cells(self, view: RunView) -> list[str]:
        return [
            view.spec.arm,
            str(view.spec.seed),
            f"{view.step}/{view.spec.steps}",
            *(_cell(view.numbers.get(shown.column), shown.form) for shown in self._family.shown),
            clock(self.time_left(view)) if view.is_open else "",
            view.status,
        ]

    def _say(self, run_id: str, what: str) -> None:
        """A plain line, where there is no live table."""
        if not self._console.is_terminal:
            self._console.print(f"{run_id} {what}", markup=False, highlight=False, soft_wrap=True)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"

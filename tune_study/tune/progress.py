"""Show the progress of a study: a live table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from search_spaces.declaration.family import Family
from trainable.runs.run_ends import OPEN_STATUSES, format_stop_reason
from trainable.runs.stop_rules import parse_finite
from tune_study.host.console import EscapedRenderable
from tune_study.plan.study_plan import RunSpec, StudyPlan

_STEPS_PER_LINE = 10
"""Without a terminal, a run prints a line at every 10th step, and at every step with a validation."""


@dataclass
class RunView:
    """The displayed values of one run.

    Attributes:
        spec: the run.
        step: the last step with a row; 0 before the first one.
        last_values: the last measured value of each column, since most rows have no validation.
        total_seconds: training time of the run over all starts; None before the first row of this start.
        status: waiting, running, or the text with which the run ended.
    """

    spec: RunSpec
    step: int = 0
    last_values: dict[str, float] = field(default_factory=dict)
    total_seconds: float | None = None
    status: str = "waiting"

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds per step so far; None before the first step."""
        return self.total_seconds / self.step if self.total_seconds is not None and self.step else None

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended."""
        return self.status in OPEN_STATUSES


def format_step(family: Family, row: dict[str, Any], total_steps: int) -> str:
    """One training step as a line of `name=value` fields. Values that were not measured are left out."""
    fields = [f"step {row.get('step')}/{total_steps}"]
    for display_column in family.log_columns:
        value = parse_finite(row.get(display_column.column))
        if value is not None:
            fields.append(f"{display_column.name}={value:{display_column.format_spec}}")
    if row.get("stop_rule"):
        fields.append(f"early_stop={format_stop_reason(row)}")
    return " ".join(fields)


def format_duration(seconds: float | None) -> str:
    """Seconds as h:mm:ss or m:ss; a dash if unknown."""
    if seconds is None:
        return "-"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


class Progress:
    """The state of every run of a study, displayed as it changes."""

    def __init__(self, plan: StudyPlan, max_concurrent: int, console: Console) -> None:
        self.title = f"{plan.study.name} ({plan.preset})"
        self._family = plan.study.family
        self.views = {spec.run_id: RunView(spec) for spec in plan.runs}
        self._trials = [[self.views[spec.run_id] for spec in specs] for specs in plan.trials]
        self._max_concurrent = max_concurrent
        self._console = console
        self._started_at = time.monotonic()

    @contextmanager
    def show_live(self) -> Iterator[None]:
        """Display the table in the terminal while the body runs, and leave its last state there.

        A file or a pipe gets the lines of `_print_line` instead: it would contain every redrawing of the table.
        """
        if not self._console.is_terminal:
            yield
            return
        # Twice per second, although rows are rarer: the elapsed time is part of the table.
        with Live(
            get_renderable=lambda: EscapedRenderable(self.make_table()),
            console=self._console,
            refresh_per_second=2,
            transient=False,
        ):
            yield

    def skip_run(self, run_id: str, status: str, step: int, last_value: float | None) -> None:
        """Show a run that ended in an earlier start. last_value: the last value of the primary metric."""
        view = self.views[run_id]
        view.status, view.step = status, step
        if last_value is not None:
            view.last_values[self._family.primary_metric] = last_value

    def start_run(self, run_id: str) -> None:
        """Show that a run starts, or starts again."""
        self.views[run_id].status = "running"
        self._print_line(run_id, "started")

    def retry_run(self, run_id: str, reason: str) -> None:
        """Show that a run failed and will be retried."""
        self._print_line(run_id, f"failed, retrying: {reason}")

    def print_note(self, run_id: str, note: str) -> None:
        """Print a note for the user, such as a checkpoint that cannot be used."""
        self._print_line(run_id, note)

    def record_row(self, run_id: str, row: dict[str, Any]) -> None:
        """Show a training step."""
        view = self.views[run_id]
        # The row may come from a Trainable that reports no step; then the run stays where it is.
        view.step = int(parse_finite(row.get("step")) or view.step)
        for display_column in self._family.progress_columns:
            # The fallback is a constant, such as success before training, which only the first row has. It is shown
            # until the column itself is measured.
            candidates = (
                parse_finite(row.get(display_column.column)),
                view.last_values.get(display_column.column),
                parse_finite(row.get(display_column.fallback_column)),
            )
            value = next((value for value in candidates if value is not None), None)
            if value is not None:
                view.last_values[display_column.column] = value
        view.total_seconds = parse_finite(row.get("seconds_total"))
        if parse_finite(row.get(self._family.primary_metric)) is not None or view.step % _STEPS_PER_LINE == 0:
            line = format_step(self._family, row, view.spec.steps)
            self._print_line(run_id, f"{line} time_left={format_duration(self.estimate_time_left(view))}")

    def end_run(self, run_id: str, status: str, reason: str) -> None:
        """Show that a run has ended."""
        self.views[run_id].status = status
        self._print_line(run_id, f"{status}: {reason}")

    def estimate_time_left(self, view: RunView) -> float | None:
        """Seconds that a run still needs: its remaining steps times its mean seconds per step.

        Before its first step, the mean over the other runs takes the place of its own. None if no run has a step yet.
        """
        if not view.is_open:
            return 0.0
        paces = [other.seconds_per_step for other in self.views.values() if other.seconds_per_step is not None]
        pace = (
            view.seconds_per_step if view.seconds_per_step is not None else (sum(paces) / len(paces) if paces else None)
        )
        return None if pace is None else pace * (view.spec.steps - view.step)

    def estimate_study_time_left(self) -> float | None:
        """Seconds that the study still needs, or None if no run has a step yet.

        The remaining trials share the concurrent slots, so their total time is divided by the number of slots in use.
        The result is at least the time of the longest trial, which cannot be divided. The runs of a trial are trained
        together, so a trial needs as long as its longest run.
        """
        trials = [[self.estimate_time_left(view) for view in views if view.is_open] for views in self._trials]
        if any(seconds is None for run_times in trials for seconds in run_times):
            return None
        trial_seconds = [
            max(seconds for seconds in run_times if seconds is not None) for run_times in trials if run_times
        ]
        return max(
            sum(trial_seconds) / max(min(self._max_concurrent, len(trial_seconds)), 1), max(trial_seconds, default=0.0)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the live table."""
        metric_names = (display_column.name for display_column in self._family.progress_columns)
        return ("arm", "seed", "step", *metric_names, "time left", "status")

    def make_table(self) -> Table:
        """The live table."""
        elapsed, study_time_left = (
            format_duration(time.monotonic() - self._started_at),
            format_duration(self.estimate_study_time_left()),
        )
        # As Text: the names of a study that somebody else started must not be read as rich's markup.
        title = Text(f"{self.title}  elapsed {elapsed}  left {study_time_left}")
        table = Table(title=title, title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("arm", "status") else "right")
        for view in self.views.values():
            table.add_row(*map(Text, self._make_cells(view)))
        return table

    def _make_cells(self, view: RunView) -> list[str]:
        return [
            view.spec.arm,
            str(view.spec.seed),
            f"{view.step}/{view.spec.steps}",
            *(
                _format_value(view.last_values.get(display_column.column), display_column.format_spec)
                for display_column in self._family.progress_columns
            ),
            format_duration(self.estimate_time_left(view)) if view.is_open else "",
            view.status,
        ]

    def _print_line(self, run_id: str, text: str) -> None:
        """Print a plain line, unless there is a live table."""
        if not self._console.is_terminal:
            self._console.print(f"{run_id} {text}", markup=False, highlight=False, soft_wrap=True)


def _format_value(value: float | None, format_spec: str) -> str:
    return "-" if value is None else f"{value:{format_spec}}"

"""Show the progress of a study: a live table in a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from trainable.families import Family
from trainable.files.json_values import parse_finite
from trainable.files.step_phase import QUIET_SECONDS, read_phase
from trainable.runs.history import find_signal_problem, format_signal_problems, format_stop_reason
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import OPEN_STATUSES, StatusRecord
from tune_study.host.console import SECONDS_PER_PHASE_LINE, EscapedRenderable
from tune_study.plan.study_plan import RunSpec, StudyPlan

_STEPS_PER_LINE = 10
"""Without a terminal, a run prints a line at every 10th step and at every step with a validation."""
_WORDS = ("arm", "status")
"""Columns of the live table that are no numbers."""


@dataclass
class RunView:
    """The displayed values of one run."""

    spec: RunSpec
    step: int = 0
    """The last step with a row; 0 before the first one."""
    last_values: dict[str, float] = field(default_factory=dict)
    """The last measured value of each column, since most rows have no validation."""
    total_seconds: float | None = None
    """Training time over all starts; None before the first row of this start."""
    status: str = "waiting"
    """waiting, running, or the text with which the run ended."""
    signal_problem: str = ""
    """Why the run has had nothing to learn from since step 1; empty if it has."""
    phase: str = ""
    """What a long step is doing; empty if unknown."""

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds per step so far; None before the first step."""
        return self.total_seconds / self.step if self.total_seconds is not None and self.step else None

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended."""
        return self.status in OPEN_STATUSES


def format_step(family: Family, row: dict[str, Any], total_steps: int) -> str:
    """Format one training step as a line of `name=value` fields, without values that were not measured."""
    fields = [f"step {row.get('step')}/{total_steps}"]
    for display_column in family.log_columns:
        value = parse_finite(row.get(display_column.column))
        if value is not None:
            fields.append(f"{display_column.name}={value:{display_column.format_spec}}")
    if row.get("stop_rule"):
        fields.append(f"early_stop={format_stop_reason(row)}")
    return " ".join(fields)


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss; a dash if they are unknown (infinite)."""
    if not math.isfinite(seconds):
        return "-"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def estimate_run_seconds(num_steps: int, pace: float | None, paces: Collection[float]) -> float:
    """Estimate the seconds for the remaining steps of a run, at its mean seconds per step so far.

    Before its first step (None), the mean of the paces of all runs is used. Infinite if no run has a step yet.
    """
    if pace is None:
        pace = sum(paces) / len(paces) if paces else math.inf
    return pace * num_steps


def estimate_study_seconds(trials: Iterable[Collection[float]], max_concurrent: int) -> float:
    """Estimate the seconds that a study still needs; infinite if those of a run are.

    The total time of the remaining trials is divided by the number of slots in use. The result is at least the time of
    the longest trial, which cannot be divided. The runs of a trial are trained together, so a trial takes as long as
    its longest run.

    trials: for each trial, the seconds of its runs that have not ended.
    """
    trial_seconds = [max(run_seconds) for run_seconds in trials if run_seconds]
    num_slots = max(min(max_concurrent, len(trial_seconds)), 1)
    return max(sum(trial_seconds) / num_slots, max(trial_seconds, default=0.0))


class Progress:
    """The state of every run of a study, displayed as it changes."""

    def __init__(
        self,
        plan: StudyPlan,
        max_concurrent: int,
        console: Console,
        finished_statuses: Mapping[str, StatusRecord] = MappingProxyType({}),
    ) -> None:
        """Read what earlier starts have trained. finished_statuses: by run_id, of runs that are not run again."""
        self.title = f"{plan.study.name} ({plan.preset})"
        self._family = plan.study.family
        self.views = {spec.run_id: RunView(spec) for spec in plan.runs}
        for run_id, view in self.views.items():
            if run_id in finished_statuses:
                view.status = finished_statuses[run_id].status
            for row in read_rows(plan.get_run_dir(run_id) / METRICS_FILE):
                view.step = int(parse_finite(row.get("step")) or view.step)
                if (value := parse_finite(row.get(self._family.primary_metric))) is not None:
                    view.last_values[self._family.primary_metric] = value
        self._trials = [[self.views[spec.run_id] for spec in specs] for specs in plan.trials]
        self._max_concurrent = max_concurrent
        self._console = console
        self._started_at = time.monotonic()
        self._printed_problems: set[str] = set()
        self._run_dirs = {spec.run_id: plan.get_run_dir(spec.run_id) for spec in plan.runs}
        self._next_look, self._next_phase_lines = 0.0, dict.fromkeys(self.views, 0.0)

    @contextmanager
    def show_live(self) -> Iterator[None]:
        """Display the table in the terminal while the body runs, and leave its last state there.

        A file or a pipe gets the lines of `print_note` instead, since it would contain every redrawing of the table.
        """
        if not self._console.is_terminal:
            yield
            return
        # Twice per second, although rows are rarer, since the table shows the elapsed time.
        with Live(
            get_renderable=lambda: EscapedRenderable(self.make_table()), console=self._console, refresh_per_second=2
        ):
            yield

    def start_run(self, run_id: str) -> None:
        """Show that a run starts, or starts again."""
        self.views[run_id].status = "running"
        self.print_note(run_id, "started")

    def record_row(self, run_id: str, row: dict[str, Any]) -> None:
        """Show a training step."""
        view = self.views[run_id]
        # A Trainable may report no step, and the displayed step then stays.
        view.step, view.phase = int(parse_finite(row.get("step")) or view.step), ""
        for display_column in self._family.progress_columns:
            # The fallback is a constant that only the first row has, such as success before training. It is shown until
            # the column is measured.
            candidates = (
                parse_finite(row.get(display_column.column)),
                view.last_values.get(display_column.column),
                parse_finite(row.get(display_column.fallback_column)),
            )
            value = next((value for value in candidates if value is not None), None)
            if value is not None:
                view.last_values[display_column.column] = value
        # A single step without anything to learn from is normal, but not all steps since the first.
        view.signal_problem = find_signal_problem(row) if view.step == 1 or view.signal_problem else ""
        if view.signal_problem and view.signal_problem not in self._printed_problems:
            self._printed_problems.add(view.signal_problem)  # one line for all runs with this problem
            self.print_note(run_id, f"at step 1, {view.signal_problem}")
        view.total_seconds = parse_finite(row.get("seconds_total"))
        if parse_finite(row.get(self._family.primary_metric)) is not None or view.step % _STEPS_PER_LINE == 0:
            line = format_step(self._family, row, view.spec.steps)
            self.print_note(run_id, f"{line} time_left={format_duration(self.estimate_time_left(view))}")

    def look_at_phases(self) -> None:
        """Show what runs with long steps are doing, every QUIET_SECONDS (in lines: every SECONDS_PER_PHASE_LINE)."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + QUIET_SECONDS
        for run_id, view in self.views.items():
            view.phase = read_phase(self._run_dirs[run_id], view.step + 1) if view.status == "running" else ""
            if view.phase and now >= self._next_phase_lines[run_id]:
                self._next_phase_lines[run_id] = now + SECONDS_PER_PHASE_LINE
                self.print_note(run_id, f"step {view.step + 1}/{view.spec.steps}: {view.phase}")

    def end_run(self, run_id: str, status: str, reason: str) -> None:
        """Show that a run has ended."""
        self.views[run_id].status = status
        self.print_note(run_id, f"{status}: {reason}")

    def estimate_time_left(self, view: RunView) -> float:
        """Estimate the seconds that a run still needs; infinite if no run has a step yet."""
        if not view.is_open:
            return 0.0
        paces = [pace for other in self.views.values() if (pace := other.seconds_per_step) is not None]
        return estimate_run_seconds(view.spec.steps - view.step, view.seconds_per_step, paces)

    def estimate_study_time_left(self) -> float:
        """Estimate the seconds that the study still needs; infinite if no run has a step yet."""
        trials = [[self.estimate_time_left(view) for view in views if view.is_open] for views in self._trials]
        return estimate_study_seconds(trials, self._max_concurrent)

    def make_table(self) -> Table:
        """Make the live table."""
        elapsed = format_duration(time.monotonic() - self._started_at)
        study_time_left = format_duration(self.estimate_study_time_left())
        # Text, so that names from somebody else's study are not read as rich's markup.
        title = Text(f"{self.title}  elapsed {elapsed}  left {study_time_left}")
        problems = format_signal_problems(
            (view.spec.arm, view.signal_problem) for view in self.views.values() if view.step
        )
        # Phases are shown below the table, where they do not change the widths of columns.
        phases = [
            f"{view.spec.name} step {view.step + 1}/{view.spec.steps}: {view.phase}"
            for view in self.views.values()
            if view.phase
        ]
        caption = Text("\n".join((*problems, *phases))) if problems or phases else None
        rows = []  # the cells of each run by heading
        for view in self.views.values():
            cells = {"arm": view.spec.arm, "seed": str(view.spec.seed), "step": f"{view.step}/{view.spec.steps}"}
            for display_column in self._family.progress_columns:
                value = view.last_values.get(display_column.column)
                cells[display_column.name] = "-" if value is None else f"{value:{display_column.format_spec}}"
            cells["time left"] = format_duration(self.estimate_time_left(view)) if view.is_open else ""
            rows.append({**cells, "status": view.status})
        # On a narrow terminal, headings are wrapped, and then the longest names are cut, so that a run is a line.
        columns = [
            Column(name, overflow="fold", no_wrap=name == "status", justify="left" if name in _WORDS else "right")
            for name in rows[0]
        ]
        table = Table(*columns, title=title, title_justify="left", caption=caption, caption_justify="left")
        table.box, table.pad_edge, table.collapse_padding = None, False, True
        for row in rows:
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row.values()))
        return table

    def print_note(self, run_id: str, text: str) -> None:
        """Print a plain line, such as a failure that is retried, unless there is a live table."""
        if not self._console.is_terminal:
            self._console.print(f"{self.views[run_id].spec.name} {text}", markup=False, highlight=False, soft_wrap=True)

"""Report what a long training step is doing.

The code of a step names its phase and its progress, and the caller of the step decides where to show it: a trial writes
it to a small file of its run, which the process of the study reads, and a probe prints it. A process runs one step at a
time, so there is one global `STEP_PHASE`, which code deep inside a rollout can use without an argument.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from trainable.files.json_values import find_object, write_object

T = TypeVar("T")

PHASE_FILE = "phase.json"
QUIET_SECONDS = 2.0
"""Seconds between two reports, and before the first report of a step. Shorter steps report nothing."""


class StepPhase:
    """Reports the phase of the current step. read_clock: returns the time in seconds.

    Example::

        with STEP_PHASE.reporting(print):
            STEP_PHASE.enter("rollout")
            STEP_PHASE.show_share("turn 3 of 5")  # prints "rollout, turn 3 of 5" if two seconds have passed
    """

    def __init__(self, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._read_clock = read_clock
        self._report: Callable[[str], None] | None = None
        self._phase, self._next_report = "", 0.0

    @contextmanager
    def reporting(self, report: Callable[[str], None]) -> Iterator[None]:
        """Pass the phases in the `with` body to `report`, at most one every QUIET_SECONDS."""
        self._report, self._phase, self._next_report = report, "", self._read_clock() + QUIET_SECONDS
        try:
            yield
        finally:
            self._report = None

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._phase = phase
        self._report_if_due(phase)

    def show_share(self, share: str) -> None:
        """Report the progress of the phase, such as `turn 3 of 5`."""
        self._report_if_due(f"{self._phase}, {share}" if self._phase else share)

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Iterate over items, and report the current one."""
        for number, item in enumerate(items, 1):
            self.show_share(f"{name} {number} of {len(items)}")
            yield item

    def _report_if_due(self, text: str) -> None:
        if self._report is not None and (now := self._read_clock()) >= self._next_report:
            self._next_report = now + QUIET_SECONDS
            self._report(text)


STEP_PHASE = StepPhase()
"""The phase of this process, in a step of a trial, a probe, or a report."""


def write_phase(run_dir: Path, step: int, phase: str) -> None:
    """Write the phase of a step to a run's folder. Ignore errors, such as a full disk, since more phases follow."""
    with suppress(OSError):
        write_object(run_dir / PHASE_FILE, {"step": step, "phase": phase})


def remove_phase(run_dir: Path) -> None:
    """Remove the file when its step has ended."""
    with suppress(OSError):
        (run_dir / PHASE_FILE).unlink(missing_ok=True)


def read_phase(run_dir: Path, step: int) -> str:
    """Read the phase of the run's training step `step`. Empty if unknown.

    A killed process leaves its file behind, which the next process of the run removes.
    """
    content = find_object(run_dir / PHASE_FILE) or {}
    phase = content.get("phase")
    return phase[:100] if content.get("step") == step and isinstance(phase, str) else ""

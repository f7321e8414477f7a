"""Timing of the phases of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from trainable.files.step_phase import STEP_PHASE

Phase = Literal[
    "rollout", "values", "reference", "sync_weights", "update_critic", "update_actor", "gradient_analysis", "validation"
]


class Clock:
    """Measures wall time and CPU time (of all threads of this process) since its creation."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds of wall time and of CPU time so far."""
        return time.perf_counter() - self._start, time.process_time() - self._cpu_start


class PhaseTimer:
    """Measures the phases of one step on `device`; the times of a phase that occurs twice are added.

    seconds: time of each phase so far, by name. CUDA calls return before their work is done, so the timer synchronizes
    at both ends of a phase. Without this, the time would be counted in whichever phase first waits for the result.

    Example::

        timer = PhaseTimer(torch.device("cuda"))
        with timer.measure("rollout"):
            episodes = roll_out()
        timer.seconds["rollout"]
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the seconds of the `with` body to `phase`, even if the body raises; `STEP_PHASE` names it meanwhile."""
        STEP_PHASE.enter(phase.replace("_", " "))
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

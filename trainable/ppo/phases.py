"""Seconds of the phases of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Phase = Literal[
    "rollout", "values", "reference", "sync_weights", "update_critic", "update_actor", "gradient_analysis", "validation"
]


class Clock:
    """Seconds of wall and of processor time (all threads of this process) since it was made."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Both, until now."""
        return time.perf_counter() - self._start, time.process_time() - self._cpu_start


class PhaseTimer:
    """Measures the phases of one step on `device`; a phase that comes twice adds up.

    seconds: of each phase so far, by its name. A GPU works on after a call returns, so it is waited for at both ends of
    a phase: otherwise its work would be counted in whichever phase waits for a result.

    Example::

        phases = Phases(torch.device("cuda"))
        with phases.timed("rollout"):
            episodes = roll_out()
        phases.seconds["rollout"]
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the seconds of the body to `phase`."""
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

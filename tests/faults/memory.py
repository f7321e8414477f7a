"""The memory of a driver over hundreds of tiny trials: how much a trial leaves in it in addition to its rows.

Usage: python -m tests.faults.memory FOLDER TRIALS prints the figures as JSON.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console

from tests.fakes.trainer import make_study
from trainable.runs.run_files import METRICS_FILE
from tune_study.placement.resources import preflight
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.progress import Progress
from tune_study.tune.run import execute_study

STEPS = 5


class Reading(NamedTuple):
    """The resident megabytes of this process after `n_ended` runs have ended, and the megabytes of their rows."""

    n_ended: int
    resident: float
    rows: float


def make_tiny_plan(folder: Path, trials: int) -> StudyPlan:
    """Make a plan of `trials` arms of a few fake steps each."""
    study = make_study("Fake")
    values = [f"1.{number:04}" for number in range(trials)]
    return make_plan(study, "laptop", "memory", {"trainer.total_training_steps": STEPS}, values, 1, folder)


def free_unused_memory() -> None:
    """Return to the system what Python and glibc only hold for later: it is not what a trial leaves behind."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def take_readings(folder: Path, trials: int, interval: int) -> list[Reading]:
    """Run a study of `trials` tiny trials, and read the memory each time `interval` more trials have ended."""
    plan, readings, process = make_tiny_plan(folder, trials), list[Reading](), psutil.Process()
    n_ended = [0]
    original_end_run = Progress.end_run

    def count_and_end_run(self: Progress, *arguments: Any) -> None:
        original_end_run(self, *arguments)
        n_ended[0] += 1
        if n_ended[0] % interval == 0:
            free_unused_memory()
            rows = sum(path.stat().st_size for path in plan.folder.glob(f"runs/*/{METRICS_FILE}"))
            readings.append(Reading(n_ended[0], process.memory_info().rss / 1e6, rows / 1e6))

    Progress.end_run = count_and_end_run  # type: ignore[method-assign]
    try:
        code = execute_study(plan, preflight(plan, None, (), 2, None, is_real=True), Console(quiet=True))
    finally:
        Progress.end_run = original_end_run  # type: ignore[method-assign]
    assert code == 0
    return readings


if __name__ == "__main__":
    n_trials = int(sys.argv[2])
    memory_readings = take_readings(Path(sys.argv[1]), n_trials, max(1, n_trials // 15))
    # Kilobytes per trial, over the second half of the readings.
    resident_slope, rows_slope = (
        1e3
        * np.polyfit(
            [reading.n_ended for reading in memory_readings[len(memory_readings) // 2 :]],
            [(reading.resident, reading.rows) for reading in memory_readings[len(memory_readings) // 2 :]],
            1,
        )[0]
    )
    figures = {
        "trials": n_trials,
        "megabytes": [round(reading.resident, 1) for reading in memory_readings],
        "kilobytes_per_trial": round(resident_slope, 1),
        "kilobytes_of_rows_per_trial": round(rows_slope, 2),
    }
    print(json.dumps(figures))

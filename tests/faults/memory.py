"""The memory of a driver over hundreds of tiny trials: what a trial leaves in it beside its rows."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    """Resident megabytes of this process when `ended` runs had ended, and the megabytes of their rows."""

    ended: int
    resident: float
    rows: float


class Watched(Progress):
    """Reads the memory as runs end."""

    readings: list[Reading]
    plan: StudyPlan


def tiny_plan(folder: Path, trials: int) -> StudyPlan:
    """`trials` arms of a few fake steps each, that keep the contract of a run."""
    study = make_study("FAKE")
    values = [f"1.{number:04}" for number in range(trials)]
    return make_plan(study, "laptop", "memory", {"trainer.total_training_steps": STEPS}, values, 1, folder)


def readings(folder: Path, trials: int, every: int) -> list[Reading]:
    """Run `trials` tiny trials through the real study, and read the memory each time `every` more have ended."""
    plan, found, process = tiny_plan(folder, trials), list[Reading](), psutil.Process()
    ended = [0]
    original = Progress.end_run

    def end(self: Progress, *arguments: Any) -> None:
        original(self, *arguments)
        ended[0] += 1
        if ended[0] % every == 0:
            gc.collect()
            rows = sum(path.stat().st_size for path in plan.folder.glob(f"runs/*/{METRICS_FILE}"))
            found.append(Reading(ended[0], process.memory_info().rss / 1e6, rows / 1e6))

    Progress.end_run = end  # type: ignore[method-assign]
    try:
        code = execute_study(plan, preflight(plan, None, (), 2, None, is_real=True), "off", Console(quiet=True))
    finally:
        Progress.end_run = original  # type: ignore[method-assign]
    assert code == 0
    return found


def slope(found: Sequence[Reading]) -> tuple[float, float]:
    """Kilobytes of memory, and of rows, for each further trial: least squares over the second half of the readings."""
    half = found[len(found) // 2 :]
    mean = sum(reading.ended for reading in half) / len(half)
    weight = sum((reading.ended - mean) ** 2 for reading in half)
    resident = sum((reading.ended - mean) * reading.resident for reading in half) / weight
    rows = sum((reading.ended - mean) * reading.rows for reading in half) / weight
    return 1e3 * resident, 1e3 * rows


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        seen = readings(Path(name), 300, 20)
    print(json.dumps([reading._asdict() for reading in seen]), slope(seen))

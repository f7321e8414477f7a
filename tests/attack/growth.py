"""Long studies: memory, open files and disk per step and per trial, which must be flat but for the rows."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.attack.cells import Cell, Kind, Outcome, Workshop
from tests.faults.kills import KL_RECIPE, InterruptedStudy

NAME = "growth"
STEPS = 400
TRIALS = 300
POLL_S = 0.2
PATIENCE_S = 1800.0

MAX_KILOBYTES_PER_TRIAL = 100.0
"""What an ended trial may take in the driver: Ray Tune's own record of it."""
MAX_MEMORY_PER_STEP = 100.0
"""Kilobytes per step in driver and worker. Each keeps the rows of a run, which have several kilobytes as objects."""
MAX_FILES_MORE = 5
MAX_DISK_PER_STEP = 40.0
"""Kilobytes per step of rows, and of what Ray Tune and TensorBoard write about them."""


@dataclass(frozen=True)
class Reading:
    """Megabytes and open files of driver and worker, and megabytes on disk, after a number of steps."""

    step: int
    driver_memory: float
    worker_memory: float
    driver_files: int
    worker_files: int
    disk: float


def fit_slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope of y over x."""
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def count_bytes(folder: Path) -> int:
    """The sizes of all files below a folder."""
    sizes = 0
    for current, _, names in os.walk(folder):
        for name in names:
            path = Path(current) / name
            if path.is_file():
                sizes += path.stat().st_size
    return sizes


def take_readings(study: InterruptedStudy, driver: "subprocess.Popen[str]") -> Iterator[Reading]:
    """Read /proc whenever the study has trained further, until it ends."""
    last_step, deadline = 0, time.monotonic() + PATIENCE_S
    while driver.poll() is None and time.monotonic() < deadline:
        step, pids = study.count_rows(), list(study.find_trial_pids().values())
        if step >= last_step + 5 and pids:
            try:
                processes = psutil.Process(driver.pid), psutil.Process(pids[0])
                memories = [process.memory_info().rss / 1e6 for process in processes]
                files = [process.num_fds() for process in processes]
            except psutil.Error:
                continue
            last_step = step
            disk = (count_bytes(study.folder) - _count_checkpoint_bytes(study)) / 1e6
            yield Reading(step, memories[0], memories[1], files[0], files[1], disk)
        time.sleep(POLL_S)


def _count_checkpoint_bytes(study: InterruptedStudy) -> int:
    """The rolling checkpoints: one or two of them, and sometimes one that is being written."""
    try:
        return sum(count_bytes(run_dir / "state") for run_dir in study.find_run_dirs())
    except FileNotFoundError:
        return 0


def judge(readings: Sequence[Reading]) -> tuple[str, dict[str, Any]]:
    """Fit what grows per step over the second half; return what is too much, and the figures."""
    if len(readings) < 8:
        return f"only {len(readings)} readings", {}
    half = readings[len(readings) // 2 :]
    slopes = {
        name: round(1e3 * fit_slope([(reading.step, getattr(reading, name)) for reading in half]), 2)
        for name in ("driver_memory", "worker_memory", "disk")
    }
    files = {
        name: [getattr(readings[0], name), max(getattr(reading, name) for reading in half)]
        for name in ("driver_files", "worker_files")
    }
    limits = {"driver_memory": MAX_MEMORY_PER_STEP, "worker_memory": MAX_MEMORY_PER_STEP, "disk": MAX_DISK_PER_STEP}
    problems = [f"{name} grows by {slopes[name]} kB per step" for name in limits if slopes[name] > limits[name]]
    middle = readings[len(readings) // 4]
    problems += [
        f"{name} grew from {getattr(middle, name)} to {files[name][1]}"
        for name in files
        if files[name][1] > getattr(middle, name) + MAX_FILES_MORE
    ]
    figures = {
        "steps": readings[-1].step,
        "kilobytes_per_step": slopes,
        "megabytes": {
            name: [round(getattr(readings[0], name), 1), round(getattr(readings[-1], name), 1)] for name in limits
        },
        "open_files": files,
    }
    return "; ".join(problems), figures


NEVER_STOP = (
    "--set=early_stop.empty_stop_steps=0",
    "--set=early_stop.success_patience=1000",
    "--set=early_stop.variance_window=1000",
)


def run_one_arm(folder: Path, steps: int) -> tuple[str, dict[str, Any]]:
    """Run one arm for many steps, whatever the stop rules say; return what grows too much, and the figures."""
    options = [word for word in KL_RECIPE.options if not word.startswith("--kl-values")]
    recipe = replace(KL_RECIPE, options=(*options, "--kl-values=0", *NEVER_STOP))
    study = InterruptedStudy(folder, steps, (), recipe)
    driver = study.start()
    try:
        readings = list(take_readings(study, driver))
        code = driver.wait(PATIENCE_S)
    finally:
        study.log.close()
        for process in study.find_processes():
            process.kill()
    problem, figures = judge(readings)
    if code or study.count_rows() != steps:
        problem = f"exit code {code} after {study.count_rows()} of {steps} rows"
    return problem, figures


def run_many_trials(folder: Path, trials: int) -> tuple[str, dict[str, Any]]:
    """Run many tiny trials; return whether the driver keeps too much of each, and the figures."""
    command = [sys.executable, "-m", "tests.faults.memory", str(folder), str(trials)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if process.returncode:
        return f"exit code {process.returncode}: {process.stderr[-500:]}", {}
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    per_trial = figures["kilobytes_per_trial"]
    return (f"{per_trial} kB per trial" if per_trial > MAX_KILOBYTES_PER_TRIAL else ""), figures


CHECKS = {"one-arm-400-steps": (run_one_arm, STEPS), "300-trials": (run_many_trials, TRIALS)}


def try_cells(workshop: Workshop, cells: Sequence[Cell]) -> Iterator[Outcome]:
    """Run the studies, and judge what grew."""
    for cell in cells:
        folder = workshop.make_folder(f"{NAME}-{cell.name}")
        check, count = cell.fault
        problem, figures = check(folder, count)
        yield Outcome(cell, failure=problem, figures=figures)
        shutil.rmtree(folder, ignore_errors=True)


def make_growth() -> Kind:
    """Make the kind of long studies."""
    return Kind(NAME, [[Cell(name, check)] for name, check in CHECKS.items()], try_cells, uses_ray=True, seconds=200.0)

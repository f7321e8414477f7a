"""Long studies: memory, open files and disk per step and per trial, which must be flat but for the rows."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from tests.faults.kills import KL_RECIPE, InterruptedStudy

STEPS = 400
TRIALS = 300
POLL_S = 0.2
PATIENCE_S = 1800.0

MAX_KILOBYTES_PER_TRIAL = 100.0
"""What an ended trial may take in the driver: Ray Tune's own record of it."""
MAX_KILOBYTES_PER_STEP = {"driver_memory": 100.0, "worker_memory": 100.0, "disk": 40.0}
"""Driver and worker keep the rows of a run, which have several kilobytes as objects. On the disk are rows, and what Ray
Tune and TensorBoard write about them."""
MAX_FILES_MORE = 5


def count_bytes(folder: Path) -> int:
    """The sizes of all files below a folder."""
    sizes = 0
    for current, _, names in os.walk(folder):
        for name in names:
            path = Path(current) / name
            if path.is_file():
                sizes += path.stat().st_size
    return sizes


def take_readings(study: InterruptedStudy, driver: "subprocess.Popen[str]") -> Iterator[dict[str, float]]:
    """Read megabytes and open files whenever the study has trained further, until it ends."""
    last_step, deadline = 0, time.monotonic() + PATIENCE_S
    while driver.poll() is None and time.monotonic() < deadline:
        step, pids = study.count_rows(), list(study.find_trial_pids().values())
        if step >= last_step + 5 and pids:
            try:
                processes = psutil.Process(driver.pid), psutil.Process(pids[0])
                reading = {
                    "step": step,
                    "driver_memory": processes[0].memory_info().rss / 1e6,
                    "worker_memory": processes[1].memory_info().rss / 1e6,
                    "driver_files": processes[0].num_fds(),
                    "worker_files": processes[1].num_fds(),
                    "disk": (count_bytes(study.folder) - _count_checkpoint_bytes(study)) / 1e6,
                }
            except psutil.Error:
                continue
            last_step = step
            yield reading
        time.sleep(POLL_S)


def _count_checkpoint_bytes(study: InterruptedStudy) -> int:
    """The rolling checkpoints: one or two of them, and sometimes one that is being written."""
    try:
        return sum(count_bytes(run_dir / "state") for run_dir in study.find_run_dirs())
    except FileNotFoundError:
        return 0


def judge(readings: pd.DataFrame) -> tuple[str, dict[str, Any]]:
    """Fit what grows per step over the second half; return what is too much, and the figures."""
    if len(readings) < 8:
        return f"only {len(readings)} readings", {}
    first, middle, last = (readings.iloc[index] for index in (0, len(readings) // 4, -1))
    half = readings[len(readings) // 2 :]
    slopes = {name: round(1e3 * np.polyfit(half["step"], half[name], 1)[0], 2) for name in MAX_KILOBYTES_PER_STEP}
    files = {name: [int(first[name]), int(half[name].max())] for name in ("driver_files", "worker_files")}
    problems = [
        f"{name} grows by {slopes[name]} kB per step" for name in slopes if slopes[name] > MAX_KILOBYTES_PER_STEP[name]
    ]
    problems += [
        f"{name} grew from {middle[name]:.0f} to {most}"
        for name, (_, most) in files.items()
        if most > middle[name] + MAX_FILES_MORE
    ]
    figures = {
        "steps": int(last["step"]),
        "kilobytes_per_step": slopes,
        "megabytes": {name: [round(first[name], 1), round(last[name], 1)] for name in slopes},
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
        readings = pd.DataFrame(take_readings(study, driver))
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


@pytest.mark.parametrize(("run", "count"), [(run_one_arm, STEPS), (run_many_trials, TRIALS)])
def test_growth(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Path, int], tuple[str, dict[str, Any]]],
    count: int,
) -> None:
    problem, figures = run(tmp_path, count)
    with capsys.disabled():
        print(json.dumps(figures))
    assert problem == ""

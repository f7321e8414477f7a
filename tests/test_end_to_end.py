"""The command a person types, on the real Trainable and the shipped model, through real Ray."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import analysis
from trainable.runs.records import STEP_COLUMNS, TIME_COLUMNS

# A bonus this large ruins the policy within a few steps; validating at each step lets a rule see it soon.
OPTIONS = [
    "--preset=laptop",
    "--entropy-values=0,5",
    "--steps=9",
    "--set=trainer.test_freq=1",
    "--set=actor.lr=3e-3",
    "--set=env.val_env_groups=32",
    "--set=env.test_env_groups=8",
    "--set=env.env_groups=4",
]
COMMAND = [sys.executable, "-m", "tune_study", "run", "entropy", *OPTIONS]
RUN = "results/entropy_sweep_sokoban-tiny"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    done = subprocess.run([*COMMAND, f"--output={folder}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "report.html" in done.stdout
    return folder


def test_each_arm_ends_in_its_status(straight: Path) -> None:
    trials = analysis.load(straight).trials.set_index("arm")
    assert dict(trials["status"]) == {"0": "completed", "5": "early_stopped"}
    stopped = trials.loc["5"]
    assert stopped["stop_rule"] == "low_validation_success"
    assert stopped["stop_value"] < stopped["stop_threshold"] == 0.01
    assert stopped["stop_step"] == stopped["steps_done"] < 9
    assert trials.loc["0", "steps_done"] == 9
    assert trials["test_success"].notna().all()


def test_the_report_names_the_rule(straight: Path) -> None:
    page = (straight / RUN / "report.html").read_text(encoding="utf-8")
    assert "low_validation_success" in page
    assert re.search(r"failed regime", page)


def test_trials_agree_with_rays_own_frame(straight: Path) -> None:
    from ray.tune import ExperimentAnalysis, ResultGrid

    ours = analysis.load(straight).trials.set_index("run_id")
    grid = ResultGrid(ExperimentAnalysis(str(straight / RUN)))
    theirs = grid.get_dataframe().set_index("run_id").loc[ours.index]
    shared = [name for name in theirs.columns if name in ours.columns and not name.startswith("base_")]
    assert {"total_optimizer_steps", "test_success", "stop_rule", "seed", "arm"} <= set(shared)
    for name in shared:
        if name == "trial_id":
            continue
        mine, rays = ours[name].to_numpy(), theirs[name].to_numpy()
        if ours[name].dtype.kind == "f":
            np.testing.assert_allclose(rays.astype(float), mine, rtol=1e-12, err_msg=name)
        else:
            assert [str(value) for value in rays if value == value] == [
                str(value) for value in mine if value == value and str(value) != "<NA>"
            ], name
    last = analysis.load(straight).steps.groupby("run_id").tail(1).set_index("run_id").loc[ours.index]
    for column in STEP_COLUMNS:
        if column.name in theirs and column.name not in TIME_COLUMNS:
            rays = theirs[column.name].astype(float)
            np.testing.assert_allclose(rays, last[column.name].astype(float), rtol=1e-12, err_msg=column.name)


@pytest.mark.slow  # faults/test_kills.py has it with harder ends
def test_interrupted_and_resumed_equals_straight_through(straight: Path, tmp_path: Path) -> None:
    driver = subprocess.Popen([*COMMAND, f"--output={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rows = tmp_path / RUN / "runs" / "sokoban_entropy_sweep_nofilter_0-sokoban-tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 3):
        assert driver.poll() is None, "the study ended before it could be interrupted"
        assert time.monotonic() < deadline, "no third row within two minutes"
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130, out.decode()
    assert b"tune_study resume" in out
    interrupted = analysis.load(tmp_path).trials
    assert set(interrupted["status"]) <= {"interrupted", "early_stopped", "never_ran", "completed"}
    resumed = subprocess.run(
        [sys.executable, "-m", "tune_study", "resume", str(tmp_path / RUN)], capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert analysis.diff_frames(analysis.load(straight).steps, analysis.load(tmp_path).steps) == []
    same = ["run_id", "status", "stop_rule", "stop_step", "steps_done", "test_success", "test_greedy_success"]
    assert analysis.load(straight).trials[same].equals(analysis.load(tmp_path).trials[same])

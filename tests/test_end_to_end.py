"""A rule that stops a run of the real Trainable, with the `run` and `resume` commands."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import analysis
from tests.fakes.ray_frames import check_trials

# studies/test_run.py stops runs of a fake trainer in every CI, and faults/test_kills.py runs the real one.
pytestmark = pytest.mark.slow

# An entropy bonus this large ruins the policy within a few steps. A validation at each step lets a rule stop it early.
SETTINGS = (
    "trainer.test_freq=1",
    "actor.lr=3e-3",
    "env.val_env_groups=32",
    "env.test_env_groups=8",
    "env.env_groups=4",
)
OPTIONS = ["--preset=laptop", "--entropy-values=0,5", "--seeds=1", "--steps=9", *(f"--set={name}" for name in SETTINGS)]
COMMAND = [sys.executable, "-m", "tune_study", "run", "entropy", *OPTIONS]
RUN = "results/entropy_sweep_sokoban-tiny"


@pytest.fixture(scope="module")
def uninterrupted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    process = subprocess.run([*COMMAND, f"--output={folder}"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "report.html" in process.stdout
    return folder


def test_each_arm_ends_in_its_status(uninterrupted_folder: Path) -> None:
    trials = analysis.load(uninterrupted_folder).trials.set_index("arm")
    assert dict(trials["status"]) == {"0": "completed", "5": "early_stopped"}
    stopped_trial = trials.loc["5"]
    assert stopped_trial["stop_rule"] == "low_validation_success"
    assert stopped_trial["stop_value"] < stopped_trial["stop_threshold"] == 0.01
    assert stopped_trial["stop_step"] == stopped_trial["steps_done"] < 9
    assert trials.loc["0", "steps_done"] == 9
    assert trials["test_success"].notna().all()


def test_the_report_names_the_rule(uninterrupted_folder: Path) -> None:
    page = (uninterrupted_folder / RUN / "report.html").read_text(encoding="utf-8")
    assert re.search(r'<b class="stopped">stopped</b>.*>low_validation_success stopped 1 of 1 runs', page)


def test_trials_agree_with_rays_own_frame(uninterrupted_folder: Path) -> None:
    check_trials(uninterrupted_folder / RUN)


def test_interrupted_and_resumed_equals_straight_through(uninterrupted_folder: Path, tmp_path: Path) -> None:
    driver = subprocess.Popen([*COMMAND, f"--output={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics_path = tmp_path / RUN / "runs" / "sokoban_entropy_sweep_nofilter_0-sokoban-tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics_path.exists() and metrics_path.read_bytes().count(b"\n") >= 3):
        assert driver.poll() is None, "the study ended before it could be interrupted"
        assert time.monotonic() < deadline, "no third row within two minutes"
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130, output.decode()
    assert b"tune_study resume" in output
    interrupted_trials = analysis.load(tmp_path).trials
    assert set(interrupted_trials["status"]) <= {"interrupted", "early_stopped", "never_ran", "completed"}
    resume_process = subprocess.run(
        [sys.executable, "-m", "tune_study", "resume", str(tmp_path / RUN)], capture_output=True, text=True
    )
    assert resume_process.returncode == 0, resume_process.stderr[-3000:]
    assert analysis.diff_frames(analysis.load(uninterrupted_folder).steps, analysis.load(tmp_path).steps) == []
    columns = ["run_id", "status", "stop_rule", "stop_step", "steps_done", "test_success", "test_greedy_success"]
    straight, resumed = (analysis.load(folder).trials[columns] for folder in (uninterrupted_folder, tmp_path))
    assert straight.equals(resumed)

"""How a study of the real command ends when users, batch systems, disks or other studies interfere."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import analysis
from tests.faults.kills import (
    KL_RECIPE,
    PATIENCE_S,
    SMALL_OPTIONS,
    STEPS,
    InterruptedStudy,
    compare,
    finish,
    read_status_output,
    restore_signal_handlers,
    wait_for,
)
from trainable.runs.checkpoint import iter_checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

RARE_CHECKPOINTS = ("--set=trainer.resume_every=100", "--set=trainer.resume_seconds=1000")
FIRST_ARM, LAST_ARM = "0", "0.1"
"""The arms of the study in the order in which they start."""
RARE_RECIPE = replace(KL_RECIPE, options=(*SMALL_OPTIONS, *RARE_CHECKPOINTS))


def assert_same(study: InterruptedStudy, reference: InterruptedStudy, changed_setting: str = "") -> None:
    """Compare a study with an uninterrupted one, but for a setting that changes no row."""
    differences = compare(study, reference)
    assert [line for line in differences if not changed_setting or changed_setting not in line] == []


def read_end(study: InterruptedStudy, driver: "subprocess.Popen[str]", code: int) -> str:
    """Wait for the end of a command and of its processes; return what it printed, which says how to continue."""
    assert driver.wait(PATIENCE_S) == code
    study.log.close()
    assert study.wait_and_count_orphans() == 0
    text = (study.output / "command.log").read_text()
    assert f"Continue with: python -m tune_study resume {study.folder}" in text
    return text


def press_ctrl_c(driver: "subprocess.Popen[str]") -> None:
    """Send Ctrl-C as a terminal does, to every process of the foreground group."""
    os.killpg(driver.pid, signal.SIGINT)


def send_sigterm(driver: "subprocess.Popen[str]") -> None:
    driver.terminate()


@pytest.mark.slow
def test_one_interrupt_finishes_and_saves_the_steps(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    study = InterruptedStudy(tmp_path, STEPS, ["--max-concurrent=1"], RARE_RECIPE)
    interrupt_and_check(study, press_ctrl_c)
    trials = analysis.load(tmp_path).trials.set_index("arm")
    assert tuple(trials.loc[LAST_ARM, ["status", "reason"]]) == (
        "never_ran",
        "the study was interrupted before it started",
    )
    interrupt_and_check(study, send_sigterm)
    n_rows_before = study.count_rows()
    driver = study.start()
    assert wait_for(lambda: study.count_rows() >= n_rows_before + 3, driver)
    os.killpg(driver.pid, signal.SIGTERM)  # Ray's own processes too, as a batch system or `timeout` does
    assert "The study ended early" not in read_end(study, driver, 130)
    assert analysis.load(tmp_path).trials.set_index("arm").loc[FIRST_ARM, "status"] == "interrupted"
    finish(study)
    assert_same(study, uninterrupted_study, "resume_")


def interrupt_and_check(study: InterruptedStudy, interrupt: Callable[["subprocess.Popen[str]"], None]) -> None:
    """Start the study, interrupt it after three more rows of its first run, and check how it ends."""
    n_rows_before = study.count_rows()
    driver = study.start()
    assert wait_for(lambda: study.count_rows() >= n_rows_before + 3, driver)
    interrupt(driver)
    log_text = read_end(study, driver, 130)
    first_run = analysis.load(study.output).trials.set_index("arm").loc[FIRST_ARM]
    steps = first_run["steps_done"]
    assert first_run["status"] == "interrupted"
    assert first_run["reason"] == f"interrupted after step {steps} of {STEPS}"
    checkpoint_steps = [step for step, _ in iter_checkpoints(study.folder / "runs" / first_run["run_id"] / "state")]
    assert checkpoint_steps[0] == steps  # checkpoints are written every hundred steps and at an interruption
    assert "stopping after the current steps, which are finished and saved" in log_text


@pytest.mark.slow
def test_a_closed_terminal_is_a_request_to_stop(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    study = InterruptedStudy(tmp_path, STEPS, ["--max-concurrent=1"], RARE_RECIPE)
    controller, terminal = pty.openpty()
    options = [*study.recipe.options, f"--steps={STEPS}", f"--output={study.output}", *study.options]
    driver = subprocess.Popen(
        [sys.executable, "-m", "tune_study", "run", study.recipe.name, *options],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=study.environment,
        start_new_session=True,
        preexec_fn=take_terminal,
        text=True,
    )
    os.close(terminal)
    reader = threading.Thread(target=read_terminal, args=(controller,), daemon=True)
    reader.start()
    assert wait_for(lambda: study.count_rows() >= 3, driver)
    os.killpg(driver.pid, signal.SIGHUP)  # as a shell does for its jobs, before the terminal goes
    os.close(controller)
    assert driver.wait(PATIENCE_S) == 130
    assert study.wait_and_count_orphans() == 0
    trials = analysis.load(tmp_path).trials.set_index("arm")
    first_run = trials.loc[FIRST_ARM]
    assert first_run["status"] == "interrupted"
    checkpoint_steps = [step for step, _ in iter_checkpoints(study.folder / "runs" / first_run["run_id"] / "state")]
    assert checkpoint_steps == [first_run["steps_done"]]
    assert (study.folder / "report.html").exists()
    finish(study)
    assert_same(study, uninterrupted_study, "resume_")


def take_terminal() -> None:
    """Make standard input the controlling terminal of a new process."""
    restore_signal_handlers()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_terminal(terminal: int) -> None:
    """Read from a terminal until it is closed."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


@pytest.mark.slow
def test_a_study_whose_ray_died_ends_and_says_so(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    daemon = "gcs_server"  # without it Ray's calls do not return; test_kills also ends the raylet
    study = InterruptedStudy(tmp_path, STEPS, ["--max-concurrent=1"])
    driver = study.start()
    assert wait_for(lambda: study.count_rows() >= 3, driver)
    for process in study.find_daemons(daemon):
        process.kill()
    assert f"The study ended early: Ray's process {daemon} (" in read_end(study, driver, 1)
    finish(study)
    assert_same(study, uninterrupted_study)


@pytest.mark.slow
def test_two_studies_at_once_do_not_disturb_each_other(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    studies = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        studies.append(InterruptedStudy(tmp_path / name, STEPS))
    drivers = [study.start() for study in studies]
    assert wait_for(lambda: studies[0].count_rows() >= 2, drivers[0])
    check_shown_and_not_started_twice(studies[0])
    assert [driver.wait(2 * PATIENCE_S) for driver in drivers] == [0, 0]
    for study in studies:
        study.log.close()
        assert_same(study, uninterrupted_study)
        assert study.wait_and_count_orphans() == 0
    assert read_status_output(studies[0].folder).count(" completed ") == 2


def check_shown_and_not_started_twice(study: InterruptedStudy) -> None:
    """Check that `status` shows a running study, and that it cannot be started a second time."""
    status_output = read_status_output(study.folder)
    assert status_output.startswith("kl (laptop): running; runs: ")
    assert status_output.count(" running ") >= 1
    second_driver = subprocess.run(
        [sys.executable, "-m", "tune_study", "resume", str(study.folder)], capture_output=True, text=True
    )
    assert second_driver.returncode == 2
    assert "Another process is running the study in" in second_driver.stderr


def run_on_small_disk(folder: Path, patience: float) -> dict[str, object]:
    """Run tests.faults.full_disk and return its observations."""
    (folder / "mount").mkdir()
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-m", "tests.faults.full_disk"]
    process = subprocess.run(
        [*command, str(folder / "mount"), str(folder / "keep"), str(patience)], capture_output=True, text=True
    )
    if "unshare failed" in process.stderr or "permission denied" in process.stderr.lower():
        pytest.skip("no mount namespace is allowed here")
    assert process.returncode == 0, process.stderr[-3000:]
    observations: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return observations


def open_copied_study(folder: Path) -> InterruptedStudy:
    shutil.copyfile(folder / "command.log", folder / "keep" / "command.log")
    return InterruptedStudy(folder / "keep", STEPS)


@pytest.mark.slow
def test_a_run_waits_for_room_on_a_full_disk(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    observations = run_on_small_disk(tmp_path, patience=100)
    assert observations["is_waiting"]
    assert int(str(observations["rows_while_full"])) <= int(str(observations["rows_when_full"])) + 2
    assert (observations["code"], observations["left"]) == (0, 0)
    log_text = (tmp_path / "command.log").read_text()
    assert "waiting up to 100 s for disk space: [Errno 28]" in log_text
    assert "disk space is available again" in log_text
    assert_same(open_copied_study(tmp_path), uninterrupted_study, "disk_patience")


@pytest.mark.slow
def test_a_disk_that_stays_full_fails_the_runs_and_loses_nothing(
    tmp_path: Path, uninterrupted_study: InterruptedStudy
) -> None:
    observations = run_on_small_disk(tmp_path, patience=1)
    assert (observations["code"], observations["code_again"], observations["left"]) == (1, 0, 0)
    log_text = (tmp_path / "command.log").read_text()
    assert "failed (storage): OSError: [Errno 28] No space left on device" in log_text
    assert_same(open_copied_study(tmp_path), uninterrupted_study, "disk_patience")

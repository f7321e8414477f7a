"""How a study ends when people, batch systems, disks and other studies interfere: the real command, end to end."""

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
from pathlib import Path

import pytest

import analysis
from tests.faults.kills import (
    PATIENCE_S,
    SMALL,
    STEPS,
    Tally,
    Tormented,
    compare,
    finish,
    hear_signals,
    status_of,
    wait_for,
)
from trainable.runs.checkpoint import iter_checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SELDOM = "--set=trainer.resume_every=100"


def terminal_ctrl_c(driver: "subprocess.Popen[str]") -> None:
    """A terminal sends it to every process of the foreground group."""
    os.killpg(driver.pid, signal.SIGINT)


def batch_system(driver: "subprocess.Popen[str]") -> None:
    driver.terminate()


def test_once_finishes_and_saves_the_steps_under_way(tmp_path: Path, straight: Tormented) -> None:
    study = Tormented(tmp_path, STEPS, [SELDOM, "--max-concurrent=1"])
    interrupt_and_check(study, terminal_ctrl_c)
    trials = analysis.load(tmp_path).trials.set_index("arm")
    assert tuple(trials.loc["0.1", ["status", "reason"]]) == (
        "never_ran",
        "the study was interrupted before it started",
    )
    interrupt_and_check(study, batch_system)
    finish(study)
    # The settings differ in what changes no row.
    differences = [line for line in compare(study, straight, Tally()) if "resume_every" not in line]
    assert differences == []


def interrupt_and_check(study: Tormented, interrupt: Callable[["subprocess.Popen[str]"], None]) -> None:
    """Start the study, interrupt it after three more rows of its first run, and see how it ended."""
    tmp_path, rows = study.output, study.rows()
    driver = study.start()
    assert wait_for(lambda: study.rows() >= rows + 3, driver)
    interrupt(driver)
    assert driver.wait(PATIENCE_S) == 130
    study.log.close()
    assert study.all_gone() == 0
    trials = analysis.load(tmp_path).trials.set_index("arm")
    steps = trials.loc["0", "steps_done"]
    assert trials.loc["0", "status"] == "interrupted"
    assert trials.loc["0", "reason"] == f"interrupted after step {steps} of {STEPS}"
    saved = [step for step, _ in iter_checkpoints(study.run_dirs()[0] / "state")]
    assert saved[0] == steps  # every hundred steps, and the last one before the interruption
    said = (tmp_path / "command.log").read_text()
    assert "stopping after the current steps, which are finished and saved" in said
    assert f"Continue with: python -m tune_study resume {study.folder}" in said


def command_of(study: Tormented) -> list[str]:
    """The command that starts the study, for a start with other streams than a log."""
    options = [*SMALL, f"--steps={STEPS}", f"--output={study.output}", *study.more]
    return [sys.executable, "-m", "tune_study", "run", "kl", *options]


def test_a_closed_terminal_is_a_request_to_stop(tmp_path: Path, straight: Tormented) -> None:
    study = Tormented(tmp_path, STEPS, [SELDOM, "--max-concurrent=1"])
    ours, theirs = pty.openpty()
    driver = subprocess.Popen(
        command_of(study),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=study.environment,
        start_new_session=True,
        preexec_fn=take_terminal,
        text=True,
    )
    os.close(theirs)
    reader = threading.Thread(target=read_all, args=(ours,), daemon=True)
    reader.start()
    assert wait_for(lambda: study.rows() >= 3, driver)
    os.killpg(driver.pid, signal.SIGHUP)  # as a shell does for its jobs, before the terminal goes
    os.close(ours)
    assert driver.wait(PATIENCE_S) == 130
    assert study.all_gone() == 0
    trials = analysis.load(tmp_path).trials.set_index("arm")
    assert trials.loc["0", "status"] == "interrupted"
    saved = [step for step, _ in iter_checkpoints(study.run_dirs()[0] / "state")]
    assert saved == [trials.loc["0", "steps_done"]]
    assert (study.folder / "report.html").exists()
    finish(study)
    assert [line for line in compare(study, straight, Tally()) if "resume_every" not in line] == []


def take_terminal() -> None:
    """In a new process: its standard input is the terminal that rules it."""
    hear_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_all(terminal: int) -> None:
    """What a terminal does, until it is closed."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


def test_a_pipe_whose_reader_is_gone_changes_nothing(tmp_path: Path, straight: Tormented) -> None:
    study = Tormented(tmp_path, STEPS)
    driver = subprocess.Popen(
        command_of(study),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=study.environment,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    driver.stdout.readline()
    driver.stdout.close()  # as `| head -1` does
    assert driver.wait(PATIENCE_S) == 0
    (tmp_path / "command.log").touch()
    assert compare(study, straight, Tally()) == []
    assert study.all_gone() == 0


def test_a_study_whose_ray_died_ends_and_says_so(tmp_path: Path, straight: Tormented) -> None:
    daemon = "gcs_server"  # without it Ray's own calls do not come back; test_kills ends the other one too
    study = Tormented(tmp_path, STEPS, ["--max-concurrent=1"])
    driver = study.start()
    assert wait_for(lambda: study.rows() >= 3, driver)
    for process in study.daemons(daemon):
        process.kill()
    assert driver.wait(PATIENCE_S) == 1
    study.log.close()
    said = (tmp_path / "command.log").read_text()
    assert f"The study ended early: Ray's process {daemon} (" in said
    assert f"Continue with: python -m tune_study resume {study.folder}" in said
    assert study.all_gone() == 0
    finish(study)
    assert compare(study, straight, Tally()) == []


def test_two_studies_at_once_do_not_disturb_each_other(tmp_path: Path, straight: Tormented) -> None:
    studies = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        studies.append(Tormented(tmp_path / name, STEPS))
    drivers = [study.start() for study in studies]
    assert wait_for(lambda: studies[0].rows() >= 2, drivers[0])
    shown_and_not_started_twice(studies[0])
    assert [driver.wait(2 * PATIENCE_S) for driver in drivers] == [0, 0]
    for study in studies:
        study.log.close()
        assert compare(study, straight, Tally()) == []
        assert study.all_gone() == 0
    assert status_of(studies[0].folder).count(" completed ") == 2


def shown_and_not_started_twice(study: Tormented) -> None:
    """What other terminals see of a study that runs, and that they cannot start it."""
    shown = status_of(study.folder)
    assert shown.startswith("kl (laptop): running\n")
    assert shown.count(" running ") >= 1
    second = subprocess.run(
        [sys.executable, "-m", "tune_study", "resume", str(study.folder)], capture_output=True, text=True
    )
    assert second.returncode == 2
    assert "Another process is running the study in" in second.stderr


def on_a_small_disk(folder: Path, patience: float) -> dict[str, object]:
    """What tests.faults.full_disk saw."""
    (folder / "mount").mkdir()
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-m", "tests.faults.full_disk"]
    done = subprocess.run(
        [*command, str(folder / "mount"), str(folder / "keep"), str(patience)], capture_output=True, text=True
    )
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("no mount namespace is allowed here")
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return seen


def kept(folder: Path) -> Tormented:
    shutil.copyfile(folder / "command.log", folder / "keep" / "command.log")
    return Tormented(folder / "keep", STEPS)


def test_a_run_waits_for_room_on_a_full_disk(tmp_path: Path, straight: Tormented) -> None:
    seen = on_a_small_disk(tmp_path, patience=100)
    assert seen["is_waiting"]
    assert int(str(seen["rows_while_full"])) <= int(str(seen["rows_when_full"])) + 2
    assert (seen["code"], seen["left"]) == (0, 0)
    said = (tmp_path / "command.log").read_text()
    assert "waiting up to 100 s for disk space: [Errno 28]" in said
    assert "disk space is available again" in said
    differences = [line for line in compare(kept(tmp_path), straight, Tally()) if "disk_patience" not in line]
    assert differences == []


def test_a_disk_that_stays_full_fails_the_runs_and_loses_nothing(tmp_path: Path, straight: Tormented) -> None:
    seen = on_a_small_disk(tmp_path, patience=1)
    assert (seen["code"], seen["code_again"], seen["left"]) == (1, 0, 0)
    said = (tmp_path / "command.log").read_text()
    assert "failed (storage): OSError: [Errno 28] No space left on device" in said
    differences = [line for line in compare(kept(tmp_path), straight, Tally()) if "disk_patience" not in line]
    assert differences == []

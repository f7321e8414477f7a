"""Signals x victims x phases: studies of the real command that are signalled, resumed, and compared at their end."""

import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.attack.conftest import RunReference
from tests.faults.kills import (
    CHECKPOINT_POLL_S,
    KL_RECIPE,
    POLL_S,
    InterruptedStudy,
    Recipe,
    compare,
    count_recomputed,
    read_last_step,
    wait_for,
)

SIGNALS = ("KILL", "TERM", "INT", "HUP", "STOP-CONT", "QUIT", "SEGV")
VICTIMS = ("driver", "worker", "idle-worker", "raylet", "gcs_server", "process-group", "everything")
WHOLE = ("driver", "process-group", "everything")
"""Victims that exist from the first moment, and whose end is the end of the command."""
STEPS = 120
"""Enough that a study is under way when it is signalled for the fifth time."""
PATIENCE_S = 300.0
"""Far more than a study of this size takes, also on a machine that does other things."""
STOPPED_S = 1.5
IDLE_PATIENCE_S = 20.0
SANDBOX_RECIPE = Recipe(
    "influence",
    "results/influence",
    (
        "--preset=laptop",
        "--arms=DG,GRPO",
        "--seeds=1",
        "--set=batch_size=16",
        "--set=seq_len=4",
        "--set=trainer.test_freq=20",
        "--set=trainer.resume_every=20",
    ),
    max_recomputed=40,
)
SANDBOX_STEPS = 1000


class NotPossibleError(Exception):
    """The signal cannot be sent now; the message says why."""


@dataclass(frozen=True)
class Kill:
    """A signal to a process of a study at some moment."""

    victim: str
    signal: str
    phase: str

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self.victim}/{self.signal}/{self.phase}"


@dataclass
class KilledStudy:
    """A study under way.

    driver: its command, if it has been started. log_start: where the log of this start begins. last_killed_steps: the
    steps of the runs whose processes were killed: they are killed again only after a further step, because three
    failures without progress end a run. sent: the names of the signals that were sent.
    """

    study: InterruptedStudy
    rng: random.Random
    driver: "subprocess.Popen[str] | None" = None
    log_start: int = 0
    last_killed_steps: dict[Path, int] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """Whether the command runs."""
        return self.driver is not None and self.driver.poll() is None

    def start(self) -> "subprocess.Popen[str]":
        """Start or resume the study."""
        log = self.study.log_folder / "command.log"
        self.log_start = log.stat().st_size if log.exists() else 0
        self.driver = self.study.start()
        return self.driver

    def read_log(self) -> str:
        """What this start has printed."""
        with (self.study.log_folder / "command.log").open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

    def end(self) -> None:
        """End the study in order, as Ctrl-C does."""
        if self.is_alive and self.driver is not None:
            self.driver.send_signal(signal.SIGINT)
        self.wait()

    def wait(self) -> str:
        """Wait for the command to end, and for its processes; return what is wrong."""
        if self.driver is None:
            return ""
        try:
            code = self.driver.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            for process in self.study.find_processes():
                process.kill()
            self.driver.wait()
            return f"the command did not end within {PATIENCE_S:.0f} s"
        finally:
            self.study.log.close()
        if left := self.study.wait_and_count_orphans():
            return f"{left} processes were left behind"
        # Python itself says what it did when it is interrupted before the command has begun.
        log = self.read_log()
        if "Traceback" in log and not log.rstrip().endswith("KeyboardInterrupt"):
            # What led to it, and how the command ended: Ray prints its own last words after a traceback.
            start = max(log.index("Traceback") - 300, 0)
            return f"a traceback (exit code {code}): {log[start : start + 2000]} ... {log[-400:]}"
        return ""


# Phases: each waits for its moment, and returns False if the command ended before it.


def _wait_for(killed: KilledStudy, condition: Callable[[], bool], poll_s: float = POLL_S) -> bool:
    return killed.driver is not None and wait_for(condition, killed.driver, PATIENCE_S, poll_s)


def _is_alive_after(killed: KilledStudy, seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        if killed.driver is not None:
            killed.driver.wait(seconds)
    return killed.is_alive


def wait_before_study_file(killed: KilledStudy) -> bool:
    return _is_alive_after(killed, killed.rng.uniform(0.05, 1.5))


def wait_for_ray_to_start(killed: KilledStudy) -> bool:
    return _wait_for(killed, lambda: "Starting Ray" in killed.read_log()) and _is_alive_after(
        killed, killed.rng.uniform(0.0, 4.0)
    )


def wait_between_steps(killed: KilledStudy) -> bool:
    target_rows = killed.study.count_rows() + killed.rng.randint(2, 5)
    return _wait_for(killed, lambda: killed.study.count_rows() >= target_rows, CHECKPOINT_POLL_S)


def wait_for_checkpoint(killed: KilledStudy) -> bool:
    first_row = killed.study.count_rows() + 1
    return _wait_for(killed, lambda: killed.study.count_rows() >= first_row) and _wait_for(
        killed, killed.study.is_writing, CHECKPOINT_POLL_S
    )


def wait_for_resume(killed: KilledStudy) -> bool:
    """A process has the lock of a run that has rows, and has written none of its own."""
    return _wait_for(killed, lambda: bool(killed.study.find_trial_pids()), CHECKPOINT_POLL_S)


def wait_for_last_step(killed: KilledStudy) -> bool:
    """A run writes its last rows, or the command its report."""
    if killed.rng.random() < 0.5:
        return _wait_for(killed, lambda: "Summary: " in killed.read_log(), CHECKPOINT_POLL_S)
    last_step = killed.study.steps - 2

    def is_at_end() -> bool:
        return any(read_last_step(run_dir) >= last_step for run_dir in killed.study.find_run_dirs())

    return _wait_for(killed, is_at_end, 0.02)


WAITS: dict[str, Callable[[KilledStudy], bool]] = {
    "before-study.json": wait_before_study_file,
    "ray-starting": wait_for_ray_to_start,
    "between-steps": wait_between_steps,
    "checkpoint": wait_for_checkpoint,
    "resuming": wait_for_resume,
    "last-step": wait_for_last_step,
}
"""In the order in which a study comes to them, so that one study can be signalled in all of them."""


def list_kills(
    victims: Sequence[str] = VICTIMS, signals: Sequence[str] = SIGNALS, phases: Iterable[str] = WAITS
) -> dict[str, list[Kill]]:
    """List the signals of each study. Before study.json there is no Ray, and so no process of it."""
    return {
        f"{victim}/{signal_name}": [
            Kill(victim, signal_name, phase) for phase in phases if phase != "before-study.json" or victim in WHOLE
        ]
        for victim, signal_name in itertools.product(victims, signals)
    }


# Victims.


def find_victims(killed: KilledStudy, victim: str) -> list[psutil.Process]:
    """Find the processes that a signal goes to; empty if there is none now."""
    study = killed.study
    with suppress(psutil.Error):
        if victim == "everything":
            return study.find_processes()
        if victim in ("driver", "process-group") and killed.driver is not None:
            driver = psutil.Process(killed.driver.pid)
            group = [process for process in study.find_processes() if _get_group(process.pid) == killed.driver.pid]
            return [driver] if victim == "driver" else group
        if victim == "worker":
            return _choose_worker(killed)
        if victim == "idle-worker":
            return _find_titled(study, r"ray::IDLE")[:1]
        return study.find_daemons(victim)
    return []


def _choose_worker(killed: KilledStudy) -> list[psutil.Process]:
    """A process that trains a run which has got further since it was last chosen."""
    steps = {
        run_dir: step
        for run_dir in killed.study.find_trial_pids()
        if (step := read_last_step(run_dir)) > killed.last_killed_steps.get(run_dir, -1)
    }
    if not steps:
        return []
    run_dir = killed.rng.choice(sorted(steps))
    pid = killed.study.find_trial_pids().get(run_dir)
    if pid is None:
        return []
    killed.last_killed_steps[run_dir] = steps[run_dir]
    return [psutil.Process(pid)]


def _get_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _find_titled(study: InterruptedStudy, pattern: str) -> list[psutil.Process]:
    """The processes of a study with a title of Ray."""
    processes = []
    for process in study.find_processes():
        with suppress(psutil.Error):
            if re.match(pattern, " ".join(process.cmdline())):
                processes.append(process)
    return processes


def send(killed: KilledStudy, kill: Kill) -> list[psutil.Process]:
    """Send the signal; return the processes that got it. NotPossibleError if there is none of the kind."""
    deadline = time.monotonic() + IDLE_PATIENCE_S
    while not (processes := find_victims(killed, kill.victim)):
        if not killed.is_alive or time.monotonic() > deadline:
            raise NotPossibleError(f"the study had no process of the kind {kill.victim} at that moment")
        time.sleep(CHECKPOINT_POLL_S)
    if kill.signal == "STOP-CONT":
        _send_all(processes, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        _send_all(processes, signal.SIGCONT)
    else:
        _send_all(processes, signal.Signals[f"SIG{kill.signal}"])
    return processes


def _send_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def try_kill(killed: KilledStudy, kill: Kill) -> str:
    """Bring the study to the phase, send the signal, and wait for what must end; return what is wrong."""
    is_first_phase = kill.phase in ("before-study.json", "ray-starting", "resuming")
    if is_first_phase and killed.driver is not None:
        killed.end()
    if not killed.is_alive:
        killed.start()
    rows_before = killed.study.count_rows()
    if not WAITS[kill.phase](killed):
        if problem := killed.wait():
            return problem
        raise NotPossibleError("the command ended before that moment")
    processes = send(killed, kill)
    killed.sent.append(kill.name)
    is_over = kill.victim in WHOLE and kill.signal != "STOP-CONT"
    if kill.victim in ("raylet", "gcs_server"):  # without its daemons the command must end by itself
        time.sleep(0.5)
        is_over = not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    problem = killed.wait() if is_over else ""
    if killed.study.count_rows() < rows_before:
        problem += " Rows were lost from the files."
    return problem


def finish(killed: KilledStudy, reference: InterruptedStudy) -> str:
    """Resume the study to its end, and compare it with one that was never disturbed; return what is wrong."""
    problem = ""
    if killed.is_alive:
        problem = killed.wait()
    if not problem:
        driver = killed.start()
        problem = killed.wait()
        if not problem and driver.returncode != 0:
            problem = f"`resume` ended with {driver.returncode}: {killed.read_log()[-400:]}"
    return problem or find_differences(killed.study, reference)


def find_differences(study: InterruptedStudy, reference: InterruptedStudy) -> str:
    """Return how an ended study differs from one that was never disturbed, and what its kills cost beyond measure."""
    differences = compare(study, reference)
    if "is not used" in (study.output / "command.log").read_text():
        differences.append("a state was not used")
    if (recomputed := count_recomputed(study)) > study.recipe.max_recomputed:
        differences.append(f"a kill cost {recomputed} steps")
    return "; ".join(differences[:4])


def signal_study(killed: KilledStudy, kills: Sequence[Kill]) -> list[str]:
    """Signal a study in all these ways, one after the other; return what is wrong."""
    problems = []
    for kill in kills:
        try:
            if problem := try_kill(killed, kill):
                problems.append(f"{kill.name}: {problem}")
        except NotPossibleError as error:
            print(f"{kill.name}: {error}")
        except AssertionError as error:
            problems.append(f"{kill.name}: {error}: {killed.read_log()[-300:]}")
    return problems


def check_kills(killed: KilledStudy, reference: InterruptedStudy, kills: Sequence[Kill]) -> None:
    """Signal one study in all these ways, and compare it at its end."""
    try:
        assert signal_study(killed, kills) == []
        assert finish(killed, reference) == ""
    finally:
        for process in killed.study.find_processes():
            process.kill()
    if not killed.sent:
        pytest.skip("no signal could be sent")


STUDIES = list_kills()
SANDBOX_STUDIES = list_kills(
    ("driver", "worker", "everything"), ("KILL", "TERM"), ("ray-starting", "between-steps", "checkpoint", "resuming")
)


@pytest.mark.parametrize("kills", STUDIES.values(), ids=STUDIES)
def test_kills(tmp_path: Path, rng: random.Random, run_reference: RunReference, kills: Sequence[Kill]) -> None:
    study = InterruptedStudy(tmp_path, STEPS)
    check_kills(KilledStudy(study, rng), run_reference(STEPS, KL_RECIPE), kills)


@pytest.mark.parametrize("kills", SANDBOX_STUDIES.values(), ids=SANDBOX_STUDIES)
def test_sandbox_kills(tmp_path: Path, rng: random.Random, run_reference: RunReference, kills: Sequence[Kill]) -> None:
    """Studies of update rules, whose trials train several seeds."""
    study = InterruptedStudy(tmp_path, SANDBOX_STEPS, (), SANDBOX_RECIPE)
    check_kills(KilledStudy(study, rng), run_reference(SANDBOX_STEPS, SANDBOX_RECIPE), kills)

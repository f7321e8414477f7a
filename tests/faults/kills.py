"""Studies of the real command, killed at random moments and resumed, then compared with one that was left alone.

Processes are ended by their ids only: the driver that was started here, a trial by the id that its run folder names,
and what carries this study's own mark in its environment.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import psutil
from safetensors.torch import load_file

import analysis
from analysis.data.frames import FRAME_NAMES
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.run_files import LOCK_FILE, METRICS_FILE, STATE_FOLDER, read_rows
from tune_study.tune.watchdog import DAEMON_NAMES

RUN = "results/kl_sweep_sokoban-tiny"
SMALL = [
    "--preset=laptop",
    "--kl-values=0,0.1",
    "--set=env.val_env_groups=16",
    "--set=env.test_env_groups=16",
    "--set=env.env_groups=2",
    "--set=env.group_size=4",
    "--set=actor.ppo_mini_batch_size=8",
    "--set=critic.ppo_mini_batch_size=8",
]
STEPS = 24
MARK = "TUNE_STUDY_FAULTS"
PATIENCE_S = 120.0
GONE_S = 60.0
"""A worker that Ray was starting as its raylet died looks for it for half a minute before it ends."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_GONE_S = 90.0
"""Two agents of Ray first report the raylet's death to a control server that is gone too; Ray gives that a minute."""
POLL_S = 0.05
CHECKPOINT_POLL_S = 0.002
"""A checkpoint is half-written for milliseconds only. Elsewhere a test must not take the CPU from what it waits for."""

DRIVER_KILLS = (
    "at once",
    "at any time",
    "at a row",
    "in a checkpoint",
    "whole machine",
    "SIGTERM to all",
    "Ctrl-C twice",
    *DAEMON_NAMES,
)
TRIAL_KILLS = ("SIGKILL", "SIGSEGV", "in a checkpoint")


@dataclass
class Tally:
    """What was done to studies and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    studies: int = 0
    rows: int = 0
    rows_lost: int = 0
    rows_duplicated: int = 0
    rows_different: int = 0
    states_misread: int = 0
    weights_different: int = 0
    steps_recomputed: int = 0
    most_recomputed_by_a_kill: int = 0
    processes_left: int = 0

    def harm(self) -> int:
        """Everything that must be nought."""
        return (
            self.rows_lost
            + self.rows_duplicated
            + self.rows_different
            + self.states_misread
            + self.weights_different
            + self.processes_left
        )


def hear_signals() -> None:
    """In a new process: Ctrl-C and a closed terminal count, though a background job or nohup started the tests."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Tormented:
    """One study in a folder of its own. Every process of it carries its mark."""

    def __init__(self, output: Path, steps: int, more: Sequence[str] = ()) -> None:
        self.output, self.folder, self.steps = output, output / RUN, steps
        self.more = list(more)
        self.log_folder = output
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark}
        self.drivers: list[int] = []

    def start(self) -> "subprocess.Popen[str]":
        """`run` the first time, `resume` wherever the folder holds the study."""
        words = (
            ["resume", str(self.folder)]
            if (self.folder / "study.json").exists()
            else [
                "run",
                "kl",
                *SMALL,
                f"--steps={self.steps}",
                f"--output={self.output}",
                *self.more,
            ]
        )
        self.log = (self.log_folder / "command.log").open("a")
        self.log.write(f"--- {words[0]}\n")
        self.log.flush()
        command = [sys.executable, "-m", "tune_study", *words]
        driver = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
        self.drivers.append(driver.pid)
        return driver

    def run_dirs(self) -> list[Path]:
        """The folders of the runs, as far as they are there."""
        return sorted((self.folder / "runs").glob("*"))

    def rows(self) -> int:
        """Lines of rows on disk."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob(f"runs/*/{METRICS_FILE}"))

    def trials(self) -> dict[Path, int]:
        """The runs that a process of this study holds now, with its id."""
        found = {}
        for path in self.folder.glob(f"runs/*/{LOCK_FILE}"):
            words = re.match(r"pid (\d+) ", path.read_text(errors="replace"))
            if words and self._is_ours(int(words.group(1))):
                found[path.parent] = int(words.group(1))
        return found

    def is_writing(self) -> bool:
        """Whether a checkpoint is half-written at this moment."""
        return any(self.folder.glob(f"runs/*/{STATE_FOLDER}/.step_*.writing"))

    def processes(self) -> list[psutil.Process]:
        """All live processes that carry the mark, without Ray's two agents."""
        return [process for process in psutil.process_iter() if self._is_ours(process.pid) and not _is_agent(process)]

    def daemons(self, name: str) -> list[psutil.Process]:
        """Ray's raylet or gcs_server of this study."""
        return [process for process in self.processes() if _program(process) == name]

    def agents(self) -> list[psutil.Process]:
        """Ray's two agents of any start of this study: found by their logs, since their titles overwrite the mark."""
        return [process for process in psutil.process_iter() if _is_agent(process) and self._logs_for_us(process)]

    def _logs_for_us(self, agent: psutil.Process) -> bool:
        try:
            logs = [Path(file.path).parts for file in agent.open_files()]
        except psutil.Error:
            return False
        sessions = {part for parts in logs for part in parts if part.startswith("session_")}
        return any(session.endswith(f"_{driver}") for session in sessions for driver in self.drivers)

    def _is_ours(self, pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def all_gone(self) -> int:
        """Wait for every process of the study to end; how many did not. Those are then ended, by their ids."""
        return _ended(self.processes, GONE_S)

    def agents_gone(self) -> int:
        """The same for Ray's two agents."""
        return _ended(self.agents, AGENTS_GONE_S)


def _program(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        words = []
    return Path(words[0]).name if words else ""


def _is_agent(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).strip() in AGENTS
    except psutil.Error:
        return False


def _ended(alive: Callable[[], list[psutil.Process]], patience: float) -> int:
    deadline = time.monotonic() + patience
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        print("left behind:", process.pid, process.cmdline())
        process.kill()
    return len(left)


def last_step(run_dir: Path) -> int:
    """The last step of a run whose row is on disk."""
    rows = read_rows(run_dir / METRICS_FILE)
    return int(rows[-1]["step"]) if rows else 0


def wait_for(
    condition: Callable[[], bool],
    driver: "subprocess.Popen[str]",
    patience: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> bool:
    """Whether the condition came true while the driver was alive."""
    deadline = time.monotonic() + patience
    while driver.poll() is None:
        if condition():
            return True
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(poll_s)
    return False


def unbroken(output: Path, steps: int, more: Sequence[str] = ()) -> Tormented:
    """The same study, left alone."""
    study = Tormented(output, steps, more)
    driver = study.start()
    assert driver.wait(PATIENCE_S) == 0, (output / "command.log").read_text()[-3000:]
    study.log.close()
    return study


def kill_driver(study: Tormented, kind: str, dice: random.Random, tally: Tally) -> None:
    """Start the study, end its driver in the given way, and see that nothing lives on; nothing where it ends first."""
    before = study.rows()
    driver = study.start()
    if kind == "at once":
        is_alive = _after(dice.uniform(0.05, 2.0), driver)
    elif kind == "at a row":
        target = study.rows() + dice.randint(1, 4)
        is_alive = wait_for(lambda: study.rows() >= target, driver)
    elif kind == "in a checkpoint":
        skip = study.rows() + dice.randint(0, 4)
        is_ready = wait_for(lambda: study.rows() >= skip, driver)
        is_alive = is_ready and wait_for(study.is_writing, driver, poll_s=CHECKPOINT_POLL_S)
    elif kind in DAEMON_NAMES:  # Ray starts it some seconds after the driver
        is_alive = wait_for(lambda: bool(study.daemons(kind)), driver) and _after(dice.uniform(0.0, 8.0), driver)
    else:
        is_alive = _after(dice.uniform(1.0, 12.0), driver)
    if is_alive:
        tally.kills[f"driver, {kind}"] += 1
        _end(study, driver, kind, dice)
    driver.wait(PATIENCE_S)
    study.log.close()
    tally.processes_left += study.all_gone()
    _count_recomputed(study, tally)
    assert study.rows() >= before, "rows were lost from the files"


def _after(seconds: float, driver: "subprocess.Popen[str]") -> bool:
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(study: Tormented, driver: "subprocess.Popen[str]", kind: str, dice: random.Random) -> None:
    if kind == "whole machine":
        for process in study.processes():
            _send(process, signal.SIGKILL)
    elif kind == "SIGTERM to all":
        for process in study.processes():
            _send(process, signal.SIGTERM)
    elif kind in DAEMON_NAMES:
        for process in study.daemons(kind):
            _send(process, signal.SIGKILL)
    elif kind == "Ctrl-C twice":
        driver.send_signal(signal.SIGINT)
        time.sleep(dice.uniform(0.0, 1.5))
        driver.send_signal(signal.SIGINT)
    else:
        driver.kill()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def kill_trials(study: Tormented, kills: int, dice: random.Random, tally: Tally) -> None:
    """Start the study and kill its trials, each after a step of its own since it was killed last; then let it end."""
    driver = study.start()
    seen: dict[Path, int] = {}

    def ripe() -> list[Path]:
        return [run_dir for run_dir in study.trials() if last_step(run_dir) > seen.get(run_dir, 0)]

    for _ in range(kills):
        kind = dice.choice(TRIAL_KILLS)
        if not wait_for(lambda: bool(ripe()), driver):
            break
        if kind != "in a checkpoint":
            _after(dice.uniform(0.0, 0.4), driver)
        elif not wait_for(study.is_writing, driver, poll_s=CHECKPOINT_POLL_S):
            break
        chosen = dice.choice(ripe() or [Path()])
        pid = study.trials().get(chosen)
        if pid is not None:
            seen[chosen] = last_step(chosen)
            os.kill(pid, signal.SIGSEGV if kind == "SIGSEGV" else signal.SIGKILL)
            tally.kills[f"trial, {kind}"] += 1
    driver.wait(PATIENCE_S)
    study.log.close()
    tally.processes_left += study.all_gone()
    _count_recomputed(study, tally)


def _raw_steps(run_dir: Path) -> Iterator[int]:
    for line in (run_dir / METRICS_FILE).read_bytes().splitlines() if (run_dir / METRICS_FILE).exists() else ():
        found = re.search(rb'"step": (\d+)', line)
        if found and line.endswith(b"}"):
            yield int(found.group(1))


def _count_recomputed(study: Tormented, tally: Tally) -> None:
    """Steps that were trained again, by going back in the files of rows."""
    total = 0
    for run_dir in study.run_dirs():
        high = 0
        for step in _raw_steps(run_dir):
            if step <= high:
                total += 1
                tally.most_recomputed_by_a_kill = max(tally.most_recomputed_by_a_kill, high - step + 1)
            high = max(step, high) if step > high else high
    tally.steps_recomputed = max(tally.steps_recomputed, total)


def finish(study: Tormented) -> None:
    """Resume until all has ended."""
    driver = study.start()
    assert driver.wait(PATIENCE_S) == 0, (study.output / "command.log").read_text()[-3000:]
    study.log.close()


def status_of(folder: Path) -> str:
    """What `status` prints about the study in a folder."""
    command = [sys.executable, "-m", "tune_study", "status", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compare(study: Tormented, straight: Tormented, tally: Tally) -> list[str]:
    """Tables, rows and final weights against those of the study that was left alone; differences as sentences."""
    ours, theirs = analysis.load(study.output), analysis.load(straight.output)
    found = []
    for name in FRAME_NAMES:
        differences = analysis.diff_frames(getattr(ours, name), getattr(theirs, name), ignored_columns=("axis_label",))
        found += [f"{name}: {difference}" for difference in differences]
    tally.studies += 1
    tally.rows += len(ours.steps)
    tally.rows_different += len(found)
    tally.rows_duplicated += int(pd.read_parquet(study.folder / "steps.parquet").duplicated(["run_id", "step"]).sum())
    wanted = set(zip(theirs.steps["run_id"], theirs.steps["step"], strict=True))
    got = set(zip(ours.steps["run_id"], ours.steps["step"], strict=True))
    tally.rows_lost += len(wanted - got)
    tally.states_misread += (study.output / "command.log").read_text().count("is not used")
    for mine, its in zip(study.run_dirs(), straight.run_dirs(), strict=True):
        if not _same_weights(mine, its):
            tally.weights_different += 1
            found.append(f"{mine.name}: the last state differs")
    return found


def _same_weights(mine: Path, its: Path) -> bool:
    newest = [next((path for _, path in iter_checkpoints(folder / STATE_FOLDER)), None) for folder in (mine, its)]
    if None in newest:
        return False
    a, b = (load_file(path / "state.safetensors") for path in newest if path is not None)
    return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)

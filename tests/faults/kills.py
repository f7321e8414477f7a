"""Studies of the real command that are killed at random times, resumed, and compared with an uninterrupted study.

Processes are killed by their ids only: the driver that was started here, a trial by the id in its run folder, and
processes that have the mark of the study in their environment.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
from safetensors.torch import load_file

import analysis
from analysis.data.frames import FRAME_NAMES
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.run_files import LOCK_FILE, METRICS_FILE, STATE_FOLDER, read_rows

RUN = "results/kl_sweep_sokoban-tiny"
SMALL_OPTIONS = [
    "--preset=laptop",
    "--kl-values=0,0.1",
    "--seeds=1",
    "--set=env.val_env_groups=16",
    "--set=env.test_env_groups=16",
    "--set=env.env_groups=2",
    "--set=env.group_size=4",
    "--set=actor.ppo_mini_batch_size=8",
    "--set=critic.ppo_mini_batch_size=8",
]
ONE_PROCESS = "--max-concurrent=1"
"""One process trains both runs, which imports torch once."""
EVERY_STEP = "--set=trainer.resume_every=1"
"""A rolling checkpoint after every step, so that a kill may cost one step."""
STEPS = 24
MARK_VARIABLE = "TUNE_STUDY_FAULTS"
PATIENCE_S = 120.0
PROCESS_EXIT_S = 60.0
"""A worker that Ray was starting as its raylet died looks for it for half a minute before it ends."""
UNCOMPARED_COLUMNS = ("axis_label", "config/trainer.async_checkpoints")
"""The second is how states are written, in which a study may differ from the uninterrupted one."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENT_EXIT_S = 90.0
"""Two agents of Ray first report the raylet's death to a control server that is gone too; Ray gives that a minute."""
POLL_S = 0.05
CHECKPOINT_POLL_S = 0.002
"""A checkpoint is half-written for milliseconds only. Elsewhere a test must not take the CPU from what it waits for."""


def restore_signal_handlers() -> None:
    """Restore the handlers of Ctrl-C and a closed terminal in a new process.

    They are ignored when the tests were started as a background job or by nohup.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Recipe:
    """The words of `run` that start a study, without its number of steps, and its folder below the output folder.

    max_recomputed: the steps that a kill may cost, which are those between two rolling checkpoints.
    """

    name: str
    run: str
    options: tuple[str, ...]
    max_recomputed: int = 1


KL_RECIPE = Recipe("kl", RUN, (*SMALL_OPTIONS, EVERY_STEP))


class InterruptedStudy:
    """One study in its own folder, whose processes have its mark in their environment and which can be resumed."""

    def __init__(self, output: Path, steps: int, options: Sequence[str] = (), recipe: Recipe = KL_RECIPE) -> None:
        self.output, self.folder, self.steps, self.recipe = output, output / recipe.run, steps, recipe
        self.options = list(options)
        self.log_folder = output
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK_VARIABLE: self.mark}
        self.drivers: list[int] = []

    def start(self) -> "subprocess.Popen[str]":
        """Start the driver with `resume` if the folder contains the study, and with `run` otherwise."""
        words = (
            ["resume", str(self.folder)]
            if (self.folder / "study.json").exists()
            else [
                "run",
                self.recipe.name,
                *self.recipe.options,
                f"--steps={self.steps}",
                f"--output={self.output}",
                *self.options,
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
            preexec_fn=restore_signal_handlers,
        )
        self.drivers.append(driver.pid)
        return driver

    def find_run_dirs(self) -> list[Path]:
        """Return the folders of the runs that exist."""
        return sorted((self.folder / "runs").glob("*"))

    def count_rows(self) -> int:
        """Count the rows on disk."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob(f"runs/*/{METRICS_FILE}"))

    def find_trial_pids(self) -> dict[Path, int]:
        """Return the folders of the runs that a process of this study has locked, with the process id."""
        pids = {}
        for path in self.folder.glob(f"runs/*/{LOCK_FILE}"):
            match = re.match(r"pid (\d+) ", path.read_text(errors="replace"))
            if match and self._is_of_this_study(int(match.group(1))):
                pids[path.parent] = int(match.group(1))
        return pids

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written now."""
        return any(self.folder.glob(f"runs/*/{STATE_FOLDER}/.step_*.writing"))

    def find_processes(self) -> list[psutil.Process]:
        """Return all live processes that have the mark, except Ray's two agents."""
        return [
            process
            for process in psutil.process_iter()
            if self._is_of_this_study(process.pid) and not _is_agent(process)
        ]

    def find_daemons(self, name: str) -> list[psutil.Process]:
        """Return the daemons of this study with a name, such as raylet or gcs_server."""
        return [process for process in self.find_processes() if _get_program_name(process) == name]

    def find_agents(self) -> list[psutil.Process]:
        """Return Ray's two agents of every start of this study.

        They are found by their log files, because their process titles overwrite the mark.
        """
        return [
            process for process in psutil.process_iter() if _is_agent(process) and self._logs_for_this_study(process)
        ]

    def _logs_for_this_study(self, agent: psutil.Process) -> bool:
        try:
            log_paths = [Path(file.path).parts for file in agent.open_files()]
        except psutil.Error:
            return False
        sessions = {component for log_path in log_paths for component in log_path if component.startswith("session_")}
        return any(session.endswith(f"_{driver}") for session in sessions for driver in self.drivers)

    def _is_of_this_study(self, pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.environ().get(MARK_VARIABLE) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def wait_and_count_orphans(self) -> int:
        """Wait for every process of the study to end; kill those that did not by their ids and return their number."""
        return _wait_and_count_alive(self.find_processes, PROCESS_EXIT_S)

    def wait_and_count_orphan_agents(self) -> int:
        """Wait for Ray's two agents in the same way."""
        return _wait_and_count_alive(self.find_agents, AGENT_EXIT_S)


def _get_program_name(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        command = []
    return Path(command[0]).name if command else ""


def _is_agent(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).strip() in AGENTS
    except psutil.Error:
        return False


def _wait_and_count_alive(find_processes: Callable[[], list[psutil.Process]], patience: float) -> int:
    deadline = time.monotonic() + patience
    while (processes := find_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        print("left behind:", process.pid, process.cmdline())
        process.kill()
    return len(processes)


def read_last_step(run_dir: Path) -> int:
    """Return the last step of a run whose row is on disk."""
    rows = read_rows(run_dir / METRICS_FILE)
    return int(rows[-1]["step"]) if rows else 0


def wait_for(
    condition: Callable[[], bool], driver: "subprocess.Popen[str]", patience: float = PATIENCE_S, poll_s: float = POLL_S
) -> bool:
    """Wait for a condition; return False if the driver ended before the condition was true."""
    deadline = time.monotonic() + patience
    while driver.poll() is None:
        if condition():
            return True
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(poll_s)
    return False


def run_uninterrupted(
    output: Path, steps: int, options: Sequence[str] = (), recipe: Recipe = KL_RECIPE, patience: float = PATIENCE_S
) -> InterruptedStudy:
    """Run a study without interruption."""
    study = InterruptedStudy(output, steps, options, recipe)
    driver = study.start()
    assert driver.wait(patience) == 0, (output / "command.log").read_text()[-3000:]
    study.log.close()
    return study


def _iter_raw_steps(run_dir: Path) -> Iterator[int]:
    for line in (run_dir / METRICS_FILE).read_bytes().splitlines() if (run_dir / METRICS_FILE).exists() else ():
        match = re.search(rb'"step": (\d+)', line)
        if match and line.endswith(b"}"):
            yield int(match.group(1))


def count_recomputed(study: InterruptedStudy) -> int:
    """Return the most steps that were trained again at once: how far the steps go back in a file of rows."""
    most_steps = 0
    for run_dir in study.find_run_dirs():
        highest_step = 0
        for step in _iter_raw_steps(run_dir):
            most_steps = max(most_steps, highest_step - step + 1)
            highest_step = max(step, highest_step)
    return most_steps


def finish(study: InterruptedStudy) -> None:
    """Resume the study and wait until it has completed."""
    driver = study.start()
    assert driver.wait(PATIENCE_S) == 0, (study.output / "command.log").read_text()[-3000:]
    study.log.close()


def read_status_output(folder: Path) -> str:
    """Return what `status` prints about the study in a folder."""
    command = [sys.executable, "-m", "tune_study", "status", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compare(study: InterruptedStudy, reference_study: InterruptedStudy) -> list[str]:
    """Compare tables, rows and final weights with an uninterrupted study; return the differences as sentences."""
    frames, reference_frames = analysis.load(study.output), analysis.load(reference_study.output)
    differences = []
    for name in FRAME_NAMES:
        frame_differences = analysis.diff_frames(
            getattr(frames, name), getattr(reference_frames, name), ignored_columns=UNCOMPARED_COLUMNS
        )
        differences += [f"{name}: {difference}" for difference in frame_differences]
    if pd.read_parquet(study.folder / "steps.parquet").duplicated(["run_id", "step"]).any():
        differences.append("steps: a step has two rows")
    for run_dir, reference_dir in zip(study.find_run_dirs(), reference_study.find_run_dirs(), strict=True):
        if not _has_same_weights(run_dir, reference_dir):
            differences.append(f"{run_dir.name}: the last state differs")
    return differences


def _has_same_weights(run_dir: Path, reference_dir: Path) -> bool:
    checkpoints = [
        next((path for _, path in iter_checkpoints(folder / STATE_FOLDER)), None) for folder in (run_dir, reference_dir)
    ]
    if None in checkpoints:
        return False
    weights, reference_weights = (load_file(path / "state.safetensors") for path in checkpoints if path is not None)
    return weights.keys() == reference_weights.keys() and all(
        bool((weights[name] == reference_weights[name]).all()) for name in weights
    )

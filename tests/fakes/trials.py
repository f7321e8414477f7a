"""Trials without Ray's driver: the calls that Tune would make, in this process instead of a process per trial."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.scripted import SMALL_SETTINGS
from trainable.files.json_lines import read_lines
from trainable.language_model import TRAINER as LANGUAGE_MODEL
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.records import CARRIED_KEY, TIME_COLUMNS, drop_carried
from trainable.runs.run_files import read_rows
from trainable.runs.stop_rules import RULES
from trainable.runs.training import TrainerFamily, TrainingLoop
from trainable.trial import PPO

Row = dict[str, Any]
UninterruptedRun = tuple[Path, list[Row]]
TOY = {"task": "token_reversal", "seq_len": 2, "d_model": 8, "num_layers": 1, "batch_size": 8} | {
    "trainer.total_training_steps": 6,
    "trainer.test_freq": 2,
}
"""A small run of update rules."""
IDENTITY = {"run_id": "kl-01-s0", "study": "kl", "arm": "0.1", "seed": 0}


SMALL_TRIAL = {**SMALL_SETTINGS, "env.val_env_groups": 4, "env.test_env_groups": 2}
"""A small run of PPO."""


def save_trial(trial: PPO, folder: Path) -> None:
    """Let a trial save a checkpoint as Tune does."""
    folder.mkdir(parents=True)
    trial.save_checkpoint(str(folder))


def make_trial_config(folder: Path, seed: int = 0, interrupt: str | None = None, **settings: object) -> Row:
    changed_settings = {
        **SMALL_TRIAL,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    run = {
        "run_id": IDENTITY["run_id"],
        "seed": seed,
        "run_dir": str(folder / "runs" / "r"),
        "checkpoint_dir": str(folder / "saved"),
    }
    options = {
        "study": IDENTITY["study"],
        "arm": IDENTITY["arm"],
        "stop_rules": list(RULES),
        "interrupts": [] if interrupt is None else [str(interrupt)],
        "runs": [run],
    }
    return {**changed_settings, "seed": seed, "run": options}


def make_loop(
    folder: Path,
    read_clock: Callable[[], float] = time.monotonic,
    family: TrainerFamily = LANGUAGE_MODEL,
    **settings: object,
) -> TrainingLoop:
    """Make the loop of `PPO.begin`."""
    config = make_trial_config(folder, **settings)
    return TrainingLoop(family, PPO.make_config(config), config["run"]["runs"], config["run"], read_clock=read_clock)


LIVE_TRIALS: list[PPO] = []


def start_trial(folder: Path, **settings: object) -> PPO:
    """Start a trial as Tune does in a new process: trials that were started before are cleaned up first."""
    clean_up_trials()
    LIVE_TRIALS.append(PPO(make_trial_config(folder, **settings)))
    LIVE_TRIALS[-1].begin()
    return LIVE_TRIALS[-1]


def get_rows(trial: PPO) -> list[Row]:
    """Return the rows that the only run of the trial has so far."""
    assert trial.training is not None
    (run,) = trial.training.runs.values()
    return run.rows


def clean_up_trials() -> None:
    """Release the runs of all trials, as the end of their process does."""
    for trial in LIVE_TRIALS:
        trial.cleanup()
    LIVE_TRIALS.clear()


def find_newest_checkpoint(folder: Path) -> Path:
    """Return the newest rolling checkpoint of the run."""
    return next(path for _, path in iter_checkpoints(folder / "runs" / "r" / "state"))


def drop_times(row: Row) -> Row:
    """Drop the times of a row, or of a result of Tune, whose columns that were not measured become None."""
    return {name: value for name, value in drop_carried(row).items() if name not in (*TIME_COLUMNS, CARRIED_KEY)}


def read_run_files(folder: Path) -> tuple[list[Row], list[Row]]:
    run = folder / "runs" / "r"
    return read_rows(run / "metrics.jsonl"), read_lines(run / "levels.jsonl").records

"""Trials without Ray's driver: the calls that Tune would make, in this process instead of a process per trial."""

from pathlib import Path
from typing import Any

from tests.fakes.scripted import SMALL_SETTINGS
from trainable.files.json_lines import read_lines
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.records import TIME_COLUMNS
from trainable.runs.run_files import read_rows
from trainable.runs.stop_rules import RULES
from trainable.trial import Trial

Row = dict[str, Any]
UninterruptedRun = tuple[Path, list[Row]]
FEW_LEVELS = {"env.val_env_groups": 4, "env.test_env_groups": 2}
IDENTITY = {"run_id": "kl-01-s0", "study": "kl", "arm": "0.1", "seed": 0}


def make_trial_config(
    folder: Path, finished: bool = False, seed: int = 0, interrupt: str | None = None, **settings: object
) -> Row:
    changed_settings = {
        **SMALL_SETTINGS,
        **FEW_LEVELS,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    run = {
        "run_id": IDENTITY["run_id"],
        "seed": seed,
        "run_dir": str(folder / "runs" / "r"),
        "checkpoint_dir": str(folder / "saved"),
    }
    return {
        **IDENTITY,
        "seed": seed,
        "settings": changed_settings,
        "runs": [run],
        "side_by_side": False,
        "finished": finished,
        "family": "trainable.families:LANGUAGE_MODEL",
        "stop_rules": list(RULES),
        "interrupts": [] if interrupt is None else [str(interrupt)],
        "storage": None,
        "storage_patience": 0.0,
    }


LIVE_TRIALS: list[Trial] = []


def start_trial(folder: Path, **settings: object) -> Trial:
    """Start a trial as Tune does in a new process: trials that were started before are cleaned up first."""
    clean_up_trials()
    LIVE_TRIALS.append(Trial(make_trial_config(folder, **settings)))
    LIVE_TRIALS[-1].begin()
    return LIVE_TRIALS[-1]


def get_rows(trial: Trial) -> list[Row]:
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
    return {name: row[name] for name in row if name not in TIME_COLUMNS}


def read_run_files(folder: Path) -> tuple[list[Row], list[Row]]:
    run = folder / "runs" / "r"
    return read_rows(run / "metrics.jsonl"), read_lines(run / "levels.jsonl").records

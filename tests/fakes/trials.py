"""A trial without Ray's driver: what Tune would call, in this process, as if each were one of its own."""

import json
from pathlib import Path
from typing import Any

from tests.fakes.scripted import SMALL_SETTINGS
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
        "interrupt": interrupt,
        "storage": None,
        "storage_patience": 0.0,
    }


LIVE_TRIALS: list[Trial] = []


def start_trial(folder: Path, **settings: object) -> Trial:
    """As Tune makes it, in a process of its own: whatever trained before is gone."""
    clean_up_trials()
    LIVE_TRIALS.append(Trial(make_trial_config(folder, **settings)))
    LIVE_TRIALS[-1].begin()
    return LIVE_TRIALS[-1]


def get_rows(trial: Trial) -> list[Row]:
    """The rows that the trial's one run has so far."""
    assert trial.training is not None
    (run,) = trial.training.runs.values()
    return run.rows


def clean_up_trials() -> None:
    """What the end of a process does for the runs that it held."""
    for trial in LIVE_TRIALS:
        trial.cleanup()
    LIVE_TRIALS.clear()


def find_newest_checkpoint(folder: Path) -> Path:
    """The newest rolling state of the run."""
    return next(path for _, path in iter_checkpoints(folder / "runs" / "r" / "state"))


def drop_times(row: Row) -> Row:
    return {name: row[name] for name in row if name not in TIME_COLUMNS}


def read_run_files(folder: Path) -> tuple[list[Row], list[Row]]:
    run = folder / "runs" / "r"
    lines = [json.loads(line) for line in (run / "levels.jsonl").read_text().splitlines()]
    return read_rows(run / "metrics.jsonl"), lines

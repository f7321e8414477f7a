"""A Trainable without Ray's driver: what Tune would call, in this process, as if each were one of its own."""

import json
from pathlib import Path
from typing import Any

from tests.fakes.scripted import SMALL
from trainable.ppo_trainable import PPOTrainable
from trainable.runs.checkpoint import numbered
from trainable.runs.records import TIME_COLUMNS
from trainable.runs.run_files import read_rows

Row = dict[str, Any]
Straight = tuple[Path, list[Row]]
FEW = {"env.val_env_groups": 4, "env.test_env_groups": 2}
IDENTITY = {"run_id": "kl-01-s0", "study": "kl", "arm": "0.1", "seed": 0}


def config(
    folder: Path, finished: bool = False, seed: int = 0, interrupt: str | None = None, **settings: object
) -> Row:
    changed = {**SMALL, **FEW, **{key.replace("__", "."): value for key, value in settings.items()}}
    return {
        **IDENTITY, "seed": seed, "settings": changed, "finished": finished,
        "run_dir": str(folder / "runs" / "r"), "checkpoint_dir": str(folder / "saved"), "interrupt": interrupt,
    }  # fmt: skip


ALIVE: list[PPOTrainable] = []


def started(folder: Path, **settings: object) -> PPOTrainable:
    """As Tune makes it, in a process of its own: whatever trained before is gone."""
    ended()
    ALIVE.append(PPOTrainable(config(folder, **settings)))
    return ALIVE[-1]


def ended() -> None:
    """What the end of a process does for the runs that it held."""
    for trainable in ALIVE:
        trainable.cleanup()
    ALIVE.clear()


def newest(folder: Path) -> Path:
    """The newest rolling state of the run."""
    return next(path for _, path in numbered(folder / "runs" / "r" / "state"))


def timeless(row: Row) -> Row:
    return {name: row[name] for name in row if name not in TIME_COLUMNS}


def run_files(folder: Path) -> tuple[list[Row], list[Row]]:
    run = folder / "runs" / "r"
    lines = [json.loads(line) for line in (run / "rooms.jsonl").read_text().splitlines()]
    return read_rows(run / "metrics.jsonl"), lines

"""Find the files of each run: trackers write several per run, and folders with several runs."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainable.files.paths import read_bytes
from trainable.sources.logs import LogError

STATE_FILE = "trainer_state.json"
"""The file that TRL writes into each checkpoint, with all rows so far."""
_KINDS = (
    re.escape(STATE_FILE),
    r"metrics\.jsonl",
    r"run-.+\.wandb",
    r"events\.out\.tfevents\..+",
)
"""Names of the logs that are looked for in a folder. If it has several kinds, the first one counts: they are of the
same runs, and the first one is the most precise."""
_COMPONENTS = ("trainer", "orchestrator")
"""Folders of the components of a run of prime-rl, each with a metrics.jsonl."""
_HPARAMS_FOLDER = re.compile(r"\d+\.\d+")
"""tensorboardX writes hyper-parameters to a folder that is called like the time."""


def list_runs(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """List the files of each run in `paths`, which may be files, and folders of one run or of several.

    Files of one run are those of a .wandb name within a folder `wandb`, all event files of a folder, and the files of
    the components of prime-rl. Of the checkpoints of TRL the last one counts. Links such as `latest-run` to what is
    there already are left out.

    Raises LogError for a folder without a log.
    """
    runs: dict[tuple[Path, str], list[Path]] = {}
    seen: set[Path] = set()
    for path in paths:
        for file in _find_logs(path) if path.is_dir() else [path]:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                runs.setdefault(_identify_run(file), []).append(file)
    return [
        (max(files, key=_read_global_step),) if files[0].name == STATE_FILE else tuple(files) for files in runs.values()
    ]


def _find_logs(folder: Path) -> list[Path]:
    files = sorted(Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    for kind in _KINDS:
        if logs := [file for file in files if re.fullmatch(kind, file.name)]:
            return logs
    raise LogError(
        f"{folder} has no log that is looked for in folders: trainer_state.json, metrics.jsonl, run-*.wandb, or "
        "events.out.tfevents.*. Give the file with the numbers of each step."
    )


def _identify_run(file: Path) -> tuple[Path, str]:
    """Return what the files of a run have in common."""
    folder = file.resolve().parent
    if file.suffix == ".wandb":
        return folder.parent, file.name
    if re.fullmatch(_KINDS[-1], file.name):
        return (folder.parent if _HPARAMS_FOLDER.fullmatch(folder.name) else folder), "events"
    if file.name == STATE_FILE:
        return (folder.parent if folder.name.startswith("checkpoint-") else folder), file.name
    if file.name == "metrics.jsonl":
        component = next((parent for parent in (folder, *folder.parents) if parent.name in _COMPONENTS), None)
        return (component.parent if component else folder), file.name
    return folder, file.name


def _read_global_step(file: Path) -> float:
    try:
        return float(json.loads(read_bytes(file))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1

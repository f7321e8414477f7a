"""Read the files of offline W&B runs."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto import wandb_internal_pb2

from trainable.sources.wandb_files import iter_records

_MAX_WAIT_S = 30.0


class WandbFile(NamedTuple):
    """A W&B run: its steps in order, the values of each, and what it says of itself."""

    run: Any
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    has_ended: bool

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def read_wandb_file(path: Path) -> WandbFile:
    run, rows, config, summary, has_ended = None, [], {}, {}, False
    for _, data in iter_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        elif record.HasField("summary"):
            updates = record.summary.update
            summary |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}
        has_ended |= record.HasField("exit")
    return WandbFile(run, rows, config, summary, has_ended)


def read_wandb_files(output: Path) -> dict[str, WandbFile]:
    """The offline runs of an output folder, by their names; each name once."""
    files = [_read_ended_file(path) for path in sorted(output.glob("wandb/offline-run-*/run-*.wandb"))]
    by_name = {file.run.display_name: file for file in files}
    assert len(by_name) == len(files)
    return by_name


def _read_ended_file(path: Path) -> WandbFile:
    """The file of a run that has finished, whose service may write the end of the file a moment later."""
    deadline = time.monotonic() + _MAX_WAIT_S
    while not (file := read_wandb_file(path)).has_ended and time.monotonic() < deadline:
        time.sleep(0.02)
    assert file.has_ended, f"{path} has no end"
    return file

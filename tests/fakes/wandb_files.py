"""Read the files of offline W&B runs, which are logs of LevelDB's format with protocol buffers of W&B."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto import wandb_internal_pb2

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_HEADER_BYTES = 7
"""Bytes before each fragment of a record: 4 of a checksum, 2 of a length, 1 of a type."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
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
    for data in _scan_records(path.read_bytes()):
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


def _scan_records(content: bytes) -> Iterator[bytes]:
    position, record = _FILE_HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(content):
        if _BLOCK_BYTES - position % _BLOCK_BYTES < _HEADER_BYTES:  # the rest of a block is padding
            position += _BLOCK_BYTES - position % _BLOCK_BYTES
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        fragment = content[position + _HEADER_BYTES : position + _HEADER_BYTES + length]
        record = fragment if kind in (_FULL, _FIRST) else record + fragment
        position += _HEADER_BYTES + length
        if kind in (_FULL, _LAST):
            yield record

"""Files as trackers write them, by their own writers where these need no service."""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c
from wandb.proto.wandb_internal_pb2 import Record

BLOCK_BYTES = 2**15


class EventWriter:
    """Writes an event file whose events have the times 1, 2, 3, ..., counted from `start`."""

    def __init__(self, folder: Path, start: float = 0) -> None:
        self._folder, self._suffix = folder, f".from-{start}"
        self._writer = SummaryWriter(str(folder), filename_suffix=self._suffix)
        self._time = start

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._time += 1
            self._writer.add_scalar(tag, value, step, walltime=self._time)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._writer.add_hparams(hparams, {})

    def close(self) -> Path:
        self._writer.close()
        (path,) = self._folder.glob(f"*{self._suffix}")
        return path


def write_events(
    folder: Path,
    rows: Iterable[tuple[int, Mapping[str, float]]],
    start: float = 0,
    hparams: Mapping[str, Any] | None = None,
) -> Path:
    writer = EventWriter(folder, start)
    if hparams:
        writer.write_hparams(hparams)
    for step, values in rows:
        writer.write(step, values)
    return writer.close()


def frame_event(event: Event) -> bytes:
    """Frame an event as a TFRecord."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(piece + struct.pack("<I", masked_crc32c(piece)) for piece in (length, data))


def write_wandb(
    path: Path, rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any] = {}, *, has_ended: bool = True
) -> Path:
    """Write records of W&B in blocks of LevelDB, as its service does."""
    run = Record()
    for name, value in config.items():
        run.run.config.update.add(key=name, value_json=json.dumps(value))
    records = [run]
    for row in rows:
        record = Record()
        for name, value in row.items():
            record.history.item.add(nested_key=name.split("."), value_json=json.dumps(value))
        records.append(record)
    if has_ended:
        records.append(Record())
        records[-1].exit.exit_code = 0
    content = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        _append_record(content, record.SerializeToString())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _append_record(content: bytearray, data: bytes) -> None:
    is_first = True
    while data or is_first:
        left = BLOCK_BYTES - len(content) % BLOCK_BYTES
        if left < 7:
            content += bytes(left)
            continue
        chunk, data = data[: left - 7], data[left - 7 :]
        kind = (1 if not data else 2) if is_first else (4 if not data else 3)
        content += struct.pack("<IHB", zlib.crc32(bytes([kind]) + chunk), len(chunk), kind) + chunk
        is_first = False

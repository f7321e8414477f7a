"""Read the offline files of W&B: LevelDB logs of protobuf records, which need neither account nor network."""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainable.sources.logs import LogError, RunLog, flatten, make_log

_MAGIC = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 2**15
_CHUNK = struct.Struct("<IHB")
"""CRC-32 of type and data, length, and type: 1 if it is a whole record, 2, 3, 4 if it is its first, middle, last."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_wandb_files(files: Sequence[tuple[Path, bytes]]) -> RunLog | None:
    """Read the .wandb files of one run; None if the first is none.

    A run has several files if it was resumed, or if several of its processes write: their rows are read in the order
    of time. A run without an exit record was killed.

    Raises LogError if wandb, whose definitions of the records are read, is not installed.
    """
    if not files[0][1].startswith(_MAGIC):
        return None
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise LogError(f"{files[0][0]} needs wandb to be read. Install it with `pip install wandb`.") from None
    notes: list[str] = []
    settings: dict[str, Any] = {}
    rows: list[tuple[float, int, dict[str, Any]]] = []
    has_exit = False
    for path, content in files:
        position = _HEADER_BYTES
        for number, (position, data) in enumerate(iter_records(content), 1):  # noqa: B007
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            has_exit |= kind == "exit"
            if kind == "history":
                row = _parse_items(record.history.item)
                rows.append((float(row.pop("_timestamp", 0)), number, row))
            elif kind in ("run", "config"):
                settings |= _parse_items((record.run.config if kind == "run" else record.config).update)
        if position < len(content):
            notes.append(f"{path} is cut or damaged after byte {position}: the rest was not read.")
    if not has_exit:
        notes.append("The run has no record of its end: it was killed, or still writes.")
    rows.sort(key=itemgetter(0))
    settings = {name: value for name, value in settings.items() if not name.startswith("_wandb")}
    log = make_log(files[0][0], "W&B offline", [(number, row) for _, number, row in rows], settings)
    if log:
        log.notes += notes
    return log


def iter_records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the position after each record, and the record, up to the first one that is not whole."""
    position, pieces = _HEADER_BYTES, b""
    while position < len(content):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _CHUNK.size:  # the rest of a block, which no chunk fits into
            position += left
            continue
        if position + _CHUNK.size > len(content):
            return
        checksum, length, kind = _CHUNK.unpack_from(content, position)
        start = position + _CHUNK.size
        data = content[start : start + length]
        if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            return
        position = start + length
        pieces = data if kind in (_WHOLE, _FIRST) else pieces + data
        if kind in (_WHOLE, _LAST):
            yield position, pieces


def _parse_items(items: Any) -> dict[str, Any]:
    """Parse names and values as JSON to flat names. What is no JSON is left out."""
    values: dict[str, Any] = {}
    for item in items:
        try:
            value = json.loads(item.value_json)
        except ValueError:
            continue
        name = ".".join(item.nested_key) or item.key
        values |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values

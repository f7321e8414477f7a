"""Read the event files of TensorBoard: TFRecords of protobuf events, as tensorboardX and torch write them."""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainable.files.paths import read_bytes
from trainable.sources.logs import STEP_KEYS, RunLog, flatten, make_log

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
"""Bytes before the data of a record: their length, and the checksum of the length."""
MAX_CHECKED_BYTES = 2**16
"""Of longer data, such as images, only the length is checked."""
_SCALAR_FORMATS = {1: "<f", 2: "<d"}
"""DataType of TensorFlow -> format of a number."""


def read_event_files(files: Sequence[tuple[Path, bytes]]) -> RunLog | None:
    """Read the event files of one run; None if the first is none.

    A run has several files if it was resumed, or if several of its processes write. Their events are read in the order
    of time, and neighbors of one step are one entry. Texts that are JSON objects, as the arguments that transformers
    writes, and hyper-parameters are settings.
    """
    # The first record of such a file is its version.
    if not files[0][1][HEADER_BYTES + 9 : HEADER_BYTES + 24].startswith(b"\x1a\x0dbrain.Event:"):
        return None
    notes: list[str] = []
    settings: dict[str, Any] = {}
    scalars: list[tuple[float, int, str, float]] = []
    for path, content in files:
        end = 0
        for end, event in _iter_events(content):  # noqa: B007
            for value in event.summary.value:
                number = _read_scalar(value)
                if number is not None:
                    scalars.append((event.wall_time, event.step, value.tag, number))
                else:
                    settings |= _read_settings(value)
        if end < len(content):
            notes.append(f"{path} is cut or damaged after byte {end}: the rest was not read.")
    scalars.sort(key=itemgetter(0))
    # slime's tags have steps of three counters, by their first word, and the counters are tags, too.
    is_slime = any(tag == "rollout/step" for _, _, tag, _ in scalars)

    def get_counter(scalar: tuple[float, int, str, float]) -> tuple[int, str]:
        return scalar[1], scalar[2].partition("/")[0] if is_slime else ""

    entries = []
    for number, ((step, _), group) in enumerate(groupby(scalars, key=get_counter), 1):
        values = {tag: value for _, _, tag, value in group if is_slime or tag not in STEP_KEYS}
        entries.append((number, values if is_slime else {**values, "step": step}))
    log = make_log(files[0][0], "TensorBoard events", entries, settings)
    if log:
        log.notes += notes
    return log


def read_event_settings(paths: Sequence[Path]) -> dict[str, Any]:
    """Read the settings that the event files of a run contain."""
    events = (event for path in paths for _, event in _iter_events(read_bytes(path)))
    settings = (_read_settings(value) for event in events for value in event.summary.value)
    return {name: value for group in settings for name, value in group.items()}


def _iter_events(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the position after each event, and the event, up to the first one that is cut or damaged."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    def is_intact(start: int, end: int) -> bool:
        return bool(_CHECKSUM.pack(masked_crc32c(content[start:end])) == content[end : end + _CHECKSUM.size])

    position = 0
    while position + HEADER_BYTES <= len(content):
        (length,) = _LENGTH.unpack_from(content, position)
        start, end = position + HEADER_BYTES, position + HEADER_BYTES + length
        is_whole = end + _CHECKSUM.size <= len(content) and is_intact(position, position + _LENGTH.size)
        if not is_whole or (length <= MAX_CHECKED_BYTES and not is_intact(start, end)):
            return
        try:
            event = Event.FromString(content[start:end])
        except DecodeError:
            return
        position = end + _CHECKSUM.size
        yield position, event


def _read_scalar(value: Any) -> float | None:
    """Return the number of a value: a simple one, or a tensor without dimensions; None for all others."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.dtype not in _SCALAR_FORMATS:
        return None
    numbers = [*tensor.float_val, *tensor.double_val]
    number_format = _SCALAR_FORMATS[tensor.dtype]
    if len(tensor.tensor_content) == struct.calcsize(number_format):
        numbers += struct.unpack(number_format, tensor.tensor_content)
    return float(numbers[0]) if len(numbers) == 1 else None


def _read_settings(value: Any) -> dict[str, Any]:
    if value.tag == "_hparams_/session_start_info":
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

        hparams = HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info.hparams
        pairs = ((name, getattr(setting, setting.WhichOneof("kind"))) for name, setting in hparams.items())
        # All numbers are stored as floats.
        return {name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in pairs}
    try:
        return flatten(json.loads(value.tensor.string_val[0]))
    except (IndexError, ValueError, AttributeError):
        return {}

"""JSON Lines files in which a lost, changed or moved line is noticed.

Each line is a JSON object whose last key, `checksum`, covers the line and the checksum of the line before it. Lines
thus form a chain: a flipped digit, a lost line, or two lines that changed places break it at that line. A line without
a checksum is one that a crash cut off while it was written. It is skipped, and the chain continues after it.

A file is only ever appended to, so that copying it to a storage never repeats what is there. A writer that cannot use
some of the lines therefore abandons them with a line of its own, which says how many lines still count.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainable.files.json_values import CHECKSUM_DIGITS, CHECKSUM_KEY, parse_json
from trainable.files.paths import UnsafePathError, atomic_write, fsync_path, is_file, open_regular, read_bytes

MAX_BYTES = 2**32
"""Size of the largest file that is read. The rows of the longest study have some hundred megabytes."""
RESTART_KEY = "valid_lines"
"""Key of a line that abandons earlier ones: the number of lines with a checksum that still count."""
_LINE = re.compile(rb'(\{.*), "checksum": "([0-9a-f]{16})"\}', re.DOTALL)


class LineEnd(NamedTuple):
    """The end of a file after some of its lines: the number of lines with a checksum, and the checksum of the last."""

    line_count: int = 0
    checksum: str = ""


class Line(NamedTuple):
    """A line that has a checksum.

    number: its number in the file, from 1. record: the object without the checksum; None if it does not match.
    is_abandoned: whether a later line says that this one no longer counts.
    """

    number: int
    checksum: str
    record: dict[str, Any] | None
    is_abandoned: bool = False


@dataclass(frozen=True)
class Lines:
    """The lines of a file that have a checksum, in order. unchecked_numbers: the numbers of those that have none."""

    lines: Sequence[Line]
    unchecked_numbers: Sequence[int] = ()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The objects of the intact lines that count."""
        return [
            line.record
            for line in self.lines
            if line.record is not None and not line.is_abandoned and RESTART_KEY not in line.record
        ]

    @property
    def damaged_numbers(self) -> list[int]:
        """The numbers of the lines that do not match their checksum: the line or the one before it was changed."""
        return [line.number for line in self.lines if line.record is None and not line.is_abandoned]

    @property
    def end(self) -> LineEnd:
        """The end of the file."""
        return LineEnd(len(self.lines), self.lines[-1].checksum) if self.lines else LineEnd()

    def contains(self, end: LineEnd) -> bool:
        """Whether the file begins with the very lines that ended at `end`, all of them intact."""
        if end.line_count == 0:
            return True
        if not 0 < end.line_count <= len(self.lines):
            return False
        lines = self.lines[: end.line_count]
        is_same_line = lines[-1].checksum == end.checksum and not lines[-1].is_abandoned
        return is_same_line and all(line.record is not None or line.is_abandoned for line in lines)


def read_lines(path: Path) -> Lines:
    """Read a file; without lines if it does not exist. Raise UnsafePathError if it is a link or no regular file.

    Two equal neighbors count once: a write that failed after its bytes had reached the disk is repeated.
    """
    lines, unchecked_numbers = list[Line](), list[int]()
    previous_bytes, previous_checksum = b"", ""
    for number, line_bytes in enumerate(_read_all(path).split(b"\n"), 1):
        match = _LINE.fullmatch(line_bytes)
        if match is None or line_bytes == previous_bytes:
            if match is None and line_bytes:
                unchecked_numbers.append(number)
            continue
        body, checksum = match.group(1) + b"}", match.group(2).decode()
        is_intact = checksum == _compute_checksum(previous_checksum, body)
        record = _parse_object(body) if is_intact else None
        valid_count = (record or {}).get(RESTART_KEY)
        if type(valid_count) is int and valid_count >= 0:
            lines[valid_count:] = [line._replace(is_abandoned=True) for line in lines[valid_count:]]
        lines.append(Line(number, checksum, record))
        # The next line continues the chain of this one even if this one is damaged: then only one line is lost.
        previous_bytes, previous_checksum = line_bytes, checksum
    return Lines(lines, unchecked_numbers)


def _read_all(path: Path) -> bytes:
    """The content of a file; empty if it does not exist."""
    if not is_file(path):
        return b""
    try:
        return read_bytes(path, MAX_BYTES)
    except ValueError as error:
        raise UnsafePathError(path, f"is too large: {error}") from None


def append_line(path: Path, record: Mapping[str, Any], end: LineEnd) -> LineEnd:
    """Append a line to the file that ends at `end`, flush it to disk, and return the new end.

    Values that are not finite become null. An unfinished line that a crash left is ended first. If this raises, the
    same call may be repeated.
    """
    if RESTART_KEY in record:
        raise ValueError(f"`{RESTART_KEY}` is reserved: {sorted(record)}")
    return _append(path, record, end)


def _append(path: Path, record: Mapping[str, Any], end: LineEnd) -> LineEnd:
    body = _encode(record)
    checksum = _compute_checksum(end.checksum, body)
    is_new = not path.exists()
    with open_regular(path, "ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(_make_line(body, checksum))
        file.flush()
        os.fsync(file.fileno())
    if is_new:  # without this a crash could lose the folder's entry for the new file
        fsync_path(path.parent)
    return LineEnd(end.line_count + 1, checksum)


def abandon_lines(path: Path, valid_end: LineEnd, end: LineEnd) -> LineEnd:
    """Append a line that says that of the file, which ends at `end`, only the lines up to `valid_end` still count.

    Returns the new end. The abandoned lines no longer count, whether they are intact or not.
    """
    return _append(path, {RESTART_KEY: valid_end.line_count}, end)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these lines; a reader sees the old lines or the new ones, never a part of them."""
    checksum = ""
    with atomic_write(path) as temp_path, open_regular(temp_path, "wb") as file:
        for record in records:
            body = _encode(record)
            checksum = _compute_checksum(checksum, body)
            file.write(_make_line(body, checksum))
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


def _encode(record: Mapping[str, Any]) -> bytes:
    """A record as JSON. Raise ValueError for an empty record, and for one that has the key of the checksum."""
    if not record or CHECKSUM_KEY in record:
        raise ValueError(f"a line needs at least one key, and `{CHECKSUM_KEY}` is reserved: {sorted(record)}")
    finite_record = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite_record, allow_nan=False).encode()


def _make_line(body: bytes, checksum: str) -> bytes:
    return b'%s, "%s": "%s"}\n' % (body[:-1], CHECKSUM_KEY.encode(), checksum.encode())


def _compute_checksum(previous_checksum: str, body: bytes) -> str:
    return hashlib.sha256(previous_checksum.encode() + body).hexdigest()[:CHECKSUM_DIGITS]


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _ends_with_newline(path: Path) -> bool:
    with open_regular(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return bool(file.read(1) == b"\n")

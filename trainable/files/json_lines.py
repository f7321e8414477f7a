"""JSON Lines files in which lost, changed or moved lines are noticed.

Each line is a JSON object whose last key, `checksum`, covers the line and the checksum of the previous line. So lines
form a chain, which a flipped digit, a lost line or two swapped lines break. A line without a checksum was cut off by a
crash while it was written. It is skipped, and the chain continues after it.

Files are only ever appended to, so that copying them to a storage never repeats what is there. So if a writer cannot
use some lines, it abandons them by appending a line that says how many lines still count.
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
from trainable.files.paths import UnsafePathError, atomic_write, fsync_path, open_regular, read_bytes

MAX_BYTES = 2**32
"""Maximum size of a file to read. The rows of the longest study take some hundred megabytes."""
RESTART_KEY = "valid_lines"
"""Key of a line that abandons earlier lines, for the number of lines with a checksum that still count."""
_LINE = re.compile(rb'(\{.*), "checksum": "([0-9a-f]{16})"\}', re.DOTALL)


class LineEnd(NamedTuple):
    """An end of a file after some of its lines: the number of lines with a checksum, and the last checksum."""

    line_count: int = 0
    checksum: str = ""


class Line(NamedTuple):
    """A line that has a checksum."""

    number: int
    """Its number in the file, from 1."""
    checksum: str
    record: dict[str, Any] | None
    """The object without the checksum; None if the checksum does not match."""
    is_abandoned: bool = False
    """Whether a later line says that this line no longer counts."""


@dataclass(frozen=True)
class Lines:
    """The lines of a file with a checksum, in order."""

    lines: Sequence[Line]
    unchecked_numbers: Sequence[int] = ()
    """The numbers of the lines without a checksum."""

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
        """The numbers of the lines that do not match their checksum, because they or the line before was changed."""
        return [line.number for line in self.lines if line.record is None and not line.is_abandoned]

    @property
    def end(self) -> LineEnd:
        """The end of the file."""
        return LineEnd(len(self.lines), self.lines[-1].checksum) if self.lines else LineEnd()

    def contains(self, end: LineEnd) -> bool:
        """Check whether the file still begins with the lines that ended at `end`, all of them intact."""
        if end.line_count == 0:
            return True
        if not 0 < end.line_count <= len(self.lines):
            return False
        lines = self.lines[: end.line_count]
        is_same_line = lines[-1].checksum == end.checksum and not lines[-1].is_abandoned
        return is_same_line and all(line.record is not None or line.is_abandoned for line in lines)


def read_lines(path: Path) -> Lines:
    """Read a file. Missing files have no lines. Raise UnsafePathError if it is a link or too large.

    Two equal lines in a row count once, since a write is repeated if it fails after the bytes have reached the disk.
    """
    try:
        content = read_bytes(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return Lines(())
    except ValueError as error:
        raise UnsafePathError(path, f"is too large: {error}") from None
    lines, unchecked_numbers = list[Line](), list[int]()
    previous_bytes, previous_checksum = b"", ""
    for number, line_bytes in enumerate(content.split(b"\n"), 1):
        match = _LINE.fullmatch(line_bytes)
        if match is None or line_bytes == previous_bytes:
            if match is None and line_bytes:
                unchecked_numbers.append(number)
            continue
        body, checksum = match.group(1) + b"}", match.group(2).decode()
        record: dict[str, Any] | None = None
        if checksum == _compute_checksum(previous_checksum, body):
            try:
                record = parse_json(body)
            except ValueError:  # another program wrote the line
                record = None
        valid_count = (record or {}).get(RESTART_KEY)
        if type(valid_count) is int and valid_count >= 0:
            lines[valid_count:] = [line._replace(is_abandoned=True) for line in lines[valid_count:]]
        lines.append(Line(number, checksum, record))
        # The next line continues the chain even if this line is damaged, so that only one line is lost.
        previous_bytes, previous_checksum = line_bytes, checksum
    return Lines(lines, unchecked_numbers)


def append_line(path: Path, record: Mapping[str, Any], end: LineEnd) -> LineEnd:
    """Append a line to the file that ends at `end`, flush it to disk, and return the new end.

    Non-finite values become null. If a crash left an unfinished line, it is ended first. If this raises, the same call
    may be repeated.
    """
    if RESTART_KEY in record:
        raise ValueError(f"`{RESTART_KEY}` is reserved: {sorted(record)}")
    return _append(path, record, end)


def abandon_lines(path: Path, valid_end: LineEnd, end: LineEnd) -> LineEnd:
    """Abandon the lines after `valid_end`, intact or not, by appending a line to the file, which ends at `end`.

    Returns the new end.
    """
    return _append(path, {RESTART_KEY: valid_end.line_count}, end)


def _append(path: Path, record: Mapping[str, Any], end: LineEnd) -> LineEnd:
    line, checksum = _make_line(record, end.checksum)
    is_new = not path.exists()
    with open_regular(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:  # otherwise, a crash could lose the folder's entry for the new file
        fsync_path(path.parent)
    return LineEnd(end.line_count + 1, checksum)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these lines atomically: a reader sees either all old or all new lines."""
    checksum = ""
    with atomic_write(path) as temp_path, open_regular(temp_path, "wb") as file:
        for record in records:
            line, checksum = _make_line(record, checksum)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


def _make_line(record: Mapping[str, Any], previous_checksum: str) -> tuple[bytes, str]:
    """Make the line of a record, and its checksum. Raise ValueError if it is empty or has the key of the checksum."""
    if not record or CHECKSUM_KEY in record:
        raise ValueError(f"a line needs at least one key, and `{CHECKSUM_KEY}` is reserved: {sorted(record)}")
    finite_record = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    body = json.dumps(finite_record, allow_nan=False).encode()
    checksum = _compute_checksum(previous_checksum, body)
    return b'%s, "%s": "%s"}\n' % (body[:-1], CHECKSUM_KEY.encode(), checksum.encode()), checksum


def _compute_checksum(previous_checksum: str, body: bytes) -> str:
    return hashlib.sha256(previous_checksum.encode() + body).hexdigest()[:CHECKSUM_DIGITS]

"""Write and change the files of lines of a run as a run would: with the checksums that belong to them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainable.files.json_lines import append_line, read_lines, write_lines


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line."""
    append_line(path, record, read_lines(path).end)


def change_records(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Replace a file by its changed lines, with new checksums: what another run would have written."""
    records = read_lines(path).records
    change(records)
    write_lines(path, records)


def chain_lines(bodies: Sequence[bytes]) -> bytes:
    """The content of a file whose lines are these JSON texts with their checksums; texts of no object have none."""
    content, checksum = b"", ""
    for body in bodies:
        if body.endswith(b"}"):
            checksum = hashlib.sha256(checksum.encode() + body).hexdigest()[:16]
            body = body[:-1] + b', "checksum": "%s"}' % checksum.encode()
        content += body + b"\n"
    return content

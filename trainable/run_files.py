"""The files that a run appends to while it trains: one line a step, one line an evaluation, on disk before the next."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS, ROOMS, STATE = "metrics.jsonl", "rooms.jsonl", "state"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and ask the disk for it; a line that a crash tore is closed off first."""
    line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
    with path.open("ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps; torn lines do not count.

    A run that went back to its rolling state writes a step again: every row from that step on is of an attempt that
    was given up.
    """
    rows: list[dict[str, Any]] = []
    for row in _lines(path) if path.exists() else ():
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The files that a run appends to while it trains: one line a step, one line an evaluation, on disk before the next."""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainable.runs.links import open_no_link

METRICS, LEVELS, GRADIENTS, PROBES = "metrics.jsonl", "levels.jsonl", "gradients.jsonl", "probes.jsonl"
STATE, LOCK = "state", ".lock"
SUMS = "checksums.json"
"""The last file of a checkpoint that is written: a folder that has it was whole."""


class BusyError(RuntimeError):
    """A run that another process still trains; it may pass."""


def hold(run_dir: Path, patience: float) -> BinaryIO:
    """Hold a run, so that no two processes ever write its files; the hold ends when the file is closed.

    It also ends with the process, whatever ended that. A process whose study was killed may live on for a moment:
    `patience` seconds are waited, then BusyError names it.
    """
    import fcntl

    deadline = time.monotonic() + patience
    handle = cast(BinaryIO, open_no_link(run_dir / LOCK, "a+b"))
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                handle.seek(0)
                holder = handle.read().decode(errors="replace").strip()
                handle.close()
                raise BusyError(f"{run_dir} is still held by another process ({holder or 'unknown'})") from None
            time.sleep(0.05)
            continue
        with suppress(OSError):  # the lock counts; who holds it is said where the disk has room for it
            handle.truncate(0)
            handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
            handle.flush()
        return handle


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and ask the disk for it; a line that a crash tore is closed off first."""
    line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
    is_new = not path.exists()
    with open_no_link(path, "ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Ask the disk for a file, or for a folder's own entries of what is new in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_rows(path: Path, first: int = 1) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps; a line counts if it is an object with a whole step.

    first: the smallest step that a row can have; 0 where weights are measured before they are trained. A run that went
    back to its rolling state writes a step again: every row from that step on is of an attempt that was given up.
    """
    rows: list[dict[str, Any]] = []
    for row in read_lines(path):
        if type(row.get("step")) is not int or not first <= row["step"] < 2**63:
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, in their order; what is torn or no object does not count."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # Torn, or brackets without end.
            continue
        if isinstance(row, dict):
            yield row


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

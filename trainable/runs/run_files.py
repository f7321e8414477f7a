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

METRICS_FILE, LEVELS_FILE, GRADIENTS_FILE, PROBES_FILE = (
    "metrics.jsonl",
    "levels.jsonl",
    "gradients.jsonl",
    "probes.jsonl",
)
STATE_FOLDER, LOCK_FILE = "state", ".lock"
CHECKSUMS_FILE = "checksums.json"
"""The last file of a checkpoint that is written: a folder that has it was whole."""


class RunLockedError(RuntimeError):
    """A run that another process still trains; it may pass."""


def acquire_lock(run_dir: Path, timeout_s: float) -> BinaryIO:
    """Hold a run, so that no two processes ever write its files; the hold ends when the file is closed.

    It also ends with the process, whatever ended that. A process whose study was killed may live on for a moment:
    `patience` seconds are waited, then BusyError names it.
    """
    import fcntl

    deadline = time.monotonic() + timeout_s
    lock_file = cast(BinaryIO, open_no_link(run_dir / LOCK_FILE, "a+b"))
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                lock_file.seek(0)
                holder = lock_file.read().decode(errors="replace").strip()
                lock_file.close()
                raise RunLockedError(f"{run_dir} is still held by another process ({holder or 'unknown'})") from None
            time.sleep(0.05)
            continue
        with suppress(OSError):  # the lock counts; who holds it is said where the disk has room for it
            lock_file.truncate(0)
            lock_file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
            lock_file.flush()
        return lock_file


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and ask the disk for it; a line that a crash tore is closed off first."""
    line = json.dumps({key: _drop_nonfinite(value) for key, value in record.items()}, allow_nan=False)
    is_new = not path.exists()
    with open_no_link(path, "ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Ask the disk for a file, or for a folder's own entries of what is new in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, first_step: int = 1) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps; a line counts if it is an object with a whole step.

    first: the smallest step that a row can have; 0 where weights are measured before they are trained. A run that went
    back to its rolling state writes a step again: every row from that step on is of an attempt that was given up.
    """
    rows: list[dict[str, Any]] = []
    for row in read_json_lines(path):
        if type(row.get("step")) is not int or not first_step <= row["step"] < 2**63:
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
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


def _drop_nonfinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Append lines to the files of a run, read them, and lock the run.

A file of a run has one JSON line per training step or per evaluation.
"""

import fcntl
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
STATE_FOLDER = "state"
"""Subfolder of a run's folder that has its rolling checkpoints."""
LOCK_FILE = ".lock"
CHECKSUMS_FILE = "checksums.json"
"""The file of a checkpoint that is written last, so a folder that contains it is known to be complete."""


class RunLockedError(RuntimeError):
    """Another process still trains the run. A retry may succeed, because that process may be about to end."""


def acquire_lock(run_dir: Path, timeout_s: float) -> BinaryIO:
    """Lock a run, so that two processes never write its files. Closing the returned file releases the lock.

    The operating system also releases the lock when the process ends, even after a SIGKILL. A process whose study was
    killed may survive for a moment, so this function waits for up to `timeout_s` seconds. After that it raises
    RunLockedError, which names the process that has the lock.
    """
    deadline = time.monotonic() + timeout_s
    # Mode "a" does not truncate: until the lock is acquired, the file has the name of the process that holds it.
    lock_file = cast(BinaryIO, open_no_link(run_dir / LOCK_FILE, "a+b"))
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                lock_file.seek(0)
                holder = lock_file.read().decode(errors="replace").strip()
                lock_file.close()
                raise RunLockedError(f"{run_dir} is still in use by another process ({holder or 'unknown'})") from None
            time.sleep(0.05)  # `flock` itself has no timeout
            continue
        # A full disk may refuse this write. The text is only for the message above; `flock` alone keeps others out.
        with suppress(OSError):
            lock_file.truncate(0)
            lock_file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
            lock_file.flush()
        return lock_file


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and flush it to disk. If a crash left a partial line, a line break is written before it.

    NaN and infinite values are written as null, because JSON has no notation for them.
    """
    line = json.dumps({key: _drop_nonfinite(value) for key, value in record.items()}, allow_nan=False)
    is_new = not path.exists()
    with open_no_link(path, "ab") as file:
        # Without the line break, the new record would become part of the partial line and be skipped with it.
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:  # otherwise a crash of the machine could lose the folder's entry for the new file
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file to disk, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, first_step: int = 1) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps; a row is a JSON object with an integer `step`.

    first_step: the smallest step that a row can have; it is 0 if weights are measured before they are trained. Rows
    with other steps are skipped. A run that went back to a rolling checkpoint repeats steps. Its first repeated row
    replaces the earlier row of that step and drops all later ones, since they belong to the abandoned attempt.
    """
    rows: list[dict[str, Any]] = []
    for row in read_json_lines(path):
        # `type`, because isinstance would accept True. Tables store steps as int64, hence the upper limit.
        if type(row.get("step")) is not int or not first_step <= row["step"] < 2**63:
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSON Lines file, in order; none if there is no file.

    Partial lines and lines with other JSON values are skipped, so a crash costs at most the line that it interrupted.
    """
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a partial line, or brackets that are nested too deeply for the parser
            continue
        if isinstance(row, dict):
            yield row


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _drop_nonfinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

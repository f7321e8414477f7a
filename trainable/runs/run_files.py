"""The files of a run: their names, their rows, damage in them, and the lock that keeps other processes out.

A file of a run has one JSON line per training step, evaluation, recorded episode or gradient analysis. The row of a
step is written last and records where the other files ended, so an intact row vouches for everything that was measured
up to its step.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainable.files.json_lines import LineEnd, Lines, read_lines
from trainable.files.paths import UnsafePathError, check_tree, lock_file, open_regular

Row = dict[str, Any]
"""A JSON object with an integer `step`."""

METRICS_FILE, LEVELS_FILE, EPISODES_FILE, GRADIENTS_FILE, PROBES_FILE = (
    "metrics.jsonl",
    "levels.jsonl",
    "episodes.jsonl",
    "gradients.jsonl",
    "probes.jsonl",
)
LINE_FILES = (METRICS_FILE, LEVELS_FILE, EPISODES_FILE, GRADIENTS_FILE)
"""Files to which a run appends while it trains. Probes write PROBES_FILE later."""
ENDS_KEY = "line_ends"
"""Key in a row for where the other files ended when it was written: [number of lines, last checksum] by file."""
MAX_LISTED_LINES = 5
"""Maximum number of damaged lines that a message names, since a file may have thousands."""
STATE_FOLDER = "state"
"""Subfolder of a run's folder with its rolling checkpoints."""
MAX_ROLLING_CHECKPOINTS = 2
"""Rolling checkpoints to keep while a run is not over: the newest, and another in case the newest is damaged."""
LOCK_FILE = ".lock"
CHECKSUMS_FILE = "checksums.json"
"""The last file of a checkpoint to be written, so a folder that contains it is complete."""


_REFUSALS = (UnsafePathError, IsADirectoryError, PermissionError)
"""Errors that do not pass: a run could not append to such a file either."""


class RunLockedError(RuntimeError):
    """Raised if another process is still training the run. That process may be about to end, so a retry may succeed."""


def acquire_lock(run_dir: Path, timeout_s: float) -> BinaryIO:
    """Lock a run, so that two processes never write its files. Closing the returned file releases the lock.

    A process may briefly outlive its killed study, so this function waits up to `timeout_s` seconds. Then it raises
    RunLockedError, which names the process that holds the lock.
    """
    # Mode "a" does not truncate the file, which names the process that holds the lock.
    file = cast(BinaryIO, open_regular(run_dir / LOCK_FILE, "a+b"))
    try:
        lock_file(file, timeout_s)
    except OSError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip()
        file.close()
        raise RunLockedError(f"{run_dir} is still in use by another process ({holder or 'unknown'})") from None
    # This write may fail on a full disk, but the text is only for the message above.
    with suppress(OSError):
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
    return file


def is_locked(folder: Path) -> bool:
    """Check whether a process holds the lock of a study or of a run. Writes nothing."""
    try:
        with open_regular(folder / LOCK_FILE, "r") as handle:
            lock_file(handle, is_shared=True)
    except BlockingIOError:
        return True
    except OSError:  # no lock file: nothing has ever been started in this folder
        return False
    return False


@dataclass(frozen=True)
class RunLines:
    """The lines of each of LINE_FILES in the folder of a run.

    refusals: the reason for each file that was not read, such as a link. Such files have no lines.
    """

    files: Mapping[str, Lines]
    refusals: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> "RunLines":
        """Read the files. Missing files have no lines."""
        files, refusals = dict.fromkeys(LINE_FILES, Lines(())), dict[str, str]()
        for name in LINE_FILES:
            try:
                files[name] = read_lines(run_dir / name)
            except _REFUSALS as error:  # so that other runs can still be read
                refusals[name] = str(error)
        return cls(files, refusals)

    def list_rows(self) -> list[Row]:
        """List the rows of the run (see `read_rows`)."""
        return select_rows(self.files[METRICS_FILE].records)

    def get_ends(self, row_end: LineEnd) -> dict[str, LineEnd]:
        """Find where all files ended when METRICS_FILE ended at `row_end`."""
        if row_end.line_count == 0:
            return dict.fromkeys(LINE_FILES, LineEnd())
        record = self.files[METRICS_FILE].lines[row_end.line_count - 1].record
        return {**dict.fromkeys(LINE_FILES, LineEnd()), **_parse_ends(record or {}), METRICS_FILE: row_end}

    def is_intact_up_to(self, row_end: LineEnd) -> bool:
        """Check whether the rows up to `row_end`, and all lines that they vouch for, are as they were written."""
        return self.files[METRICS_FILE].contains(row_end) and all(
            self.files[name].contains(end) for name, end in self.get_ends(row_end).items()
        )

    def find_damage(self) -> list[str]:
        """Describe the damage of each file with damaged or missing lines.

        Lines of other files after the last row are ignored, since they belong to an unfinished step.
        """
        problems = list(self.refusals.values())
        for name, lines in self.files.items():
            if numbers := lines.damaged_numbers:
                ellipsis = ", ..." if len(numbers) > MAX_LISTED_LINES else ""
                listing = ", ".join(map(str, numbers[:MAX_LISTED_LINES])) + ellipsis
                problems.append(f"{name} does not match its checksums at line {listing}")
        records = self.files[METRICS_FILE].records
        for name, end in _parse_ends(records[-1]).items() if records else ():
            is_named = name in self.refusals or self.files[name].damaged_numbers
            if not self.files[name].contains(end) and not is_named:
                problems.append(f"{name} lacks lines: it had {end.line_count} when the last row was written")
        return problems


_NO_SUCH_END = LineEnd(-1)
"""An end that no file contains."""


def parse_end(value: object) -> LineEnd | None:
    """Parse a LineEnd from JSON, where it is a list. Return None for anything else."""
    if isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str):
        return LineEnd(*value)
    return None


def _parse_ends(record: Mapping[str, Any]) -> dict[str, LineEnd]:
    """Parse the ends of other files in a row. An invalid end counts as not reached."""
    ends = record.get(ENDS_KEY)
    entries = ends.items() if isinstance(ends, dict) else ()
    return {name: parse_end(end) or _NO_SUCH_END for name, end in entries if name in LINE_FILES}


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a metrics file in the order of their steps. A row is a JSON object with an integer `step`.

    Damaged lines and unreadable files are left out (`RunLines.find_damage` names them). A row of step 0 describes
    untrained weights. A run that went back to a rolling checkpoint repeats steps: see `select_lines`.
    """
    try:
        records = read_lines(path).records
    except _REFUSALS:
        records = []
    return select_rows(records)


def select_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Select the rows among records, in the order of their steps, like `read_rows` from a file."""
    rows = ({name: value for name, value in record.items() if name != ENDS_KEY} for record in records)
    return select_lines(rows, lambda row: row["step"])


def select_lines(records: Iterable[Row], get_key: Callable[[Row], Any], *, drop_rolled_back: bool = True) -> list[Row]:
    """Select the last record of each key, sorted by key. Skip records without an integer step or with the key None.

    drop_rolled_back: if steps go back, the run was restored from an earlier checkpoint and repeats the later steps, so
    their previous records are dropped.
    """
    rows_by_key: dict[Any, Row] = {}
    last_step = -1  # the largest step in `rows_by_key`, so that only a step back costs a search
    for row in records:
        # `type`, since isinstance would accept True. The limit is from tables, which store steps as int64.
        step = row.get("step")
        if type(step) is not int or not 0 <= step < 2**63 or (key := get_key(row)) is None:
            continue
        if drop_rolled_back:
            if step < last_step:
                rows_by_key = {old_key: old for old_key, old in rows_by_key.items() if old["step"] <= step}
            last_step = step
        rows_by_key[key] = row
    return [rows_by_key[key] for key in sorted(rows_by_key)]


def find_best_step(rows: Iterable[Mapping[str, Any]], column: str) -> int | None:
    """Find the step of the first row with the largest value of `column`, or None if no row has a value.

    >>> find_best_step([{"step": 5, "val_success": 0.7}, {"step": 6}, {"step": 10, "val_success": 0.7}], "val_success")
    5
    """
    values = {int(row["step"]): row[column] for row in rows if isinstance(row.get(column), int | float)}
    return max(values, key=lambda step: values[step], default=None)


def list_states(run_dir: Path) -> list[str]:
    """List the names of the rolling checkpoints in the folder of a run, usable or not."""
    return sorted(path.name for path in (run_dir / STATE_FOLDER).glob("step_*"))


def copy_run_files(source: Path, target: Path, states: Iterable[str], *, links: bool) -> None:
    """Replace the lines and states of the run in `target` by the lines and the named states of the run in `source`.

    links: whether to hard-link the files of states, which never change, if both folders are on the same file system.
    Raises UnsafePathError if `source` contains a symbolic link.
    """
    check_tree(source, trees=[source])
    shutil.rmtree(target / STATE_FOLDER, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    for name in LINE_FILES:
        (target / name).unlink(missing_ok=True)
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    for name in states:
        copy = _link_or_copy if links else shutil.copyfile
        shutil.copytree(source / STATE_FOLDER / name, target / STATE_FOLDER / name, copy_function=copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

"""Follow the logs of a command while it writes them."""

import glob
import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainable.files.paths import read_bytes
from trainable.sources.csv_files import TABLE_SUFFIXES
from trainable.sources.log_files import STATE_FILE
from trainable.sources.logs import LogError
from trainable.sources.names import Name, translate_rows
from trainable.sources.reading import MAX_LOG_BYTES, parse_logs

_SHARE = 0.05
"""Largest share of the time in which logs are parsed again."""


class _Content(NamedTuple):
    """What a file contained before the command started."""

    changed_at: int
    size: int
    digest: bytes


class LogTail:
    """The rows of the logs that match a pattern, without what was in them before.

    names: measurements by our names, see `translate_rows`. counts_from_zero: whether the steps of the log begin with 0,
    if an earlier start has shown it.
    """

    def __init__(self, pattern: str, names: Sequence[Name], counts_from_zero: bool = False) -> None:
        self._pattern, self._names, self.counts_from_zero = pattern, names, counts_from_zero
        self._earlier: dict[Path, _Content] = {}
        for path in self._list_files():
            with suppress(FileNotFoundError):  # the command of an earlier start may be deleting its checkpoints
                self._earlier[path] = self._describe(path)
        self._versions: dict[Path, tuple[int, int]] = {}
        self._next_time = 0.0
        self.problem = f"no file matches {pattern}"
        """Why there is no row so far, in a sentence."""

    def read(self, *, at_once: bool = False) -> list[dict[str, Any]] | None:
        """Read the rows, by our names; None if nothing has changed or if it is too early to read again.

        at_once: read whatever has been written.
        """
        if time.monotonic() < self._next_time and not at_once:
            return None
        try:
            versions = self._list_versions()
            if versions == self._versions or not versions:
                return None
            self._versions, started_at = versions, time.monotonic()
            contents = [(path, self._read_new(path)) for path in self._choose(list(versions))]
        except FileNotFoundError:  # deleted with an old checkpoint; the next look finds the newer one
            return None
        rows: list[dict[str, Any]] = []
        try:
            (log,) = parse_logs(contents)
            rows = translate_rows(log, self._names, counts_from_zero=self.counts_from_zero)
            # The first row is that of step 0, and no validation before the row of step 1.
            self.counts_from_zero |= log.rows[0].step == 0 and rows[0]["line"] == log.rows[0].line
        except (LogError, ValueError) as error:  # of a log that has only begun, too
            self.problem = str(error)
        finished_at = time.monotonic()
        self._next_time = finished_at + (finished_at - started_at) / _SHARE
        return rows

    def _list_versions(self) -> dict[Path, tuple[int, int]]:
        """List the files that were written since the start, each with the time of its last change and its size."""
        versions = {}
        for path in self._list_files():
            status, earlier = path.stat(), self._earlier.get(path)
            version = status.st_mtime_ns, status.st_size
            if earlier is None or version != (earlier.changed_at, earlier.size):
                versions[path] = version
        return versions

    def _list_files(self) -> list[Path]:
        return sorted(path for path in map(Path, glob.glob(self._pattern, recursive=True)) if path.is_file())

    def _choose(self, paths: list[Path]) -> list[Path]:
        """Choose the last of the files of which each has all rows so far."""
        if all(path.name == STATE_FILE for path in paths):
            return [max(paths, key=lambda path: self._versions[path])]
        return paths

    def _describe(self, path: Path) -> _Content:
        content, status = read_bytes(path, MAX_LOG_BYTES), path.stat()
        return _Content(status.st_mtime_ns, len(content), hashlib.sha256(content).digest())

    def _read_new(self, path: Path) -> bytes:
        """Read what was appended to a file, or all of it if it was written anew."""
        content, earlier = read_bytes(path, MAX_LOG_BYTES), self._earlier.get(path)
        if earlier is None or hashlib.sha256(content[: earlier.size]).digest() != earlier.digest:
            return content
        header = content[: content.find(b"\n") + 1] if path.suffix in TABLE_SUFFIXES else b""
        return header + content[earlier.size :]

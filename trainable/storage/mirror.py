"""A run's folder in storage: what the run writes on its own node is copied there after every step, and fetched first.

In storage a file of lines is a folder of parts of `PART_BYTES`, since object stores cannot append: of a step only the
last part is written again. A checkpoint is a folder whose checksums are written last and removed first, so that one
without them is never taken for whole. Rows are copied before the state that follows them, as on a disk.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainable.runs.failures import StorageError
from trainable.runs.full_disk import RetryPolicy, call_with_retry
from trainable.runs.run_files import CHECKSUMS_FILE, PROBES_FILE, STATE_FOLDER, acquire_lock
from trainable.storage.remote import (
    StoragePath,
    file_exists,
    format_error,
    get_bytes,
    get_file,
    list_files,
    open_storage,
    put_bytes,
    put_file,
    remove_file,
    remove_folder,
)

T = TypeVar("T")

CHECKPOINTS_FOLDER, INTERRUPT_FILE = "kept", "interrupt"
"""In storage: a run's folder of global_step_<N>, and the file of a study whose existence asks its runs to stop."""
STUDY_FILES = ("run.json", "status.json", PROBES_FILE)
"""Files of a run's folder that the study writes, not the run."""
PART_BYTES = 2**20
_LOCK_TIMEOUT_S = 60.0
_CHECKSUMS_PATH = re.compile(
    rf"((?:{STATE_FOLDER}|{CHECKPOINTS_FOLDER})/(?:global_)?step_(\d+))/{re.escape(CHECKSUMS_FILE)}"
)
_FATAL_ERROR_CODES = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")

STORAGE_RETRY = RetryPolicy(
    lambda error: (
        not isinstance(error, FileNotFoundError | PermissionError)
        and not any(word in str(error) for word in _FATAL_ERROR_CODES)
    ),
    "for the storage to answer",
    "the storage answers again",
    "It did not answer well within {patience:g} s (trainer.disk_patience).",
)


def call_storage(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """The result of `work` in a storage, tried again while that may pass; then StorageError (see `until_written`)."""
    try:
        return call_with_retry(operation, patience, notify, should_stop, STORAGE_RETRY)
    except OSError as error:
        raise StorageError(" ".join([format_error(error), *getattr(error, "__notes__", [])])) from error


def push_lines(storage_path: StoragePath, path: Path, pushed_bytes: int) -> int:
    """Copy what `path`, which only ever grows, has beyond its first `pushed` bytes; its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for part_index in range(pushed_bytes // PART_BYTES, -(-size // PART_BYTES)) if size > pushed_bytes else ():
            file.seek(part_index * PART_BYTES)
            put_bytes(
                storage_path.joinpath(f"{part_index:06}"), file.read(min(PART_BYTES, size - part_index * PART_BYTES))
            )
    return size


def compute_line_file_sizes(files: Mapping[str, int]) -> dict[str, int]:
    """Size of each file of lines, by its path, among the files of a folder of runs and their sizes in bytes."""
    sizes: dict[str, int] = {}
    for name, size in files.items():
        folder, _, part_name = name.rpartition("/")
        if folder.endswith(".jsonl") and part_name.isdecimal():
            sizes[folder] = sizes.get(folder, 0) + size
    return sizes


def fetch_lines(storage_path: StoragePath, size: int, path: Path) -> None:
    """Make `path` the `size` bytes that the parts at `place` hold; `path` may hold the first of them already."""
    local_size = path.stat().st_size if path.exists() else 0
    if local_size == size:
        return
    first_part = local_size // PART_BYTES if local_size < size else 0
    content = path.read_bytes()[: first_part * PART_BYTES] if first_part else b""
    for index in range(first_part, -(-size // PART_BYTES)):
        content += get_bytes(storage_path.joinpath(f"{index:06}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    temp_path = path.with_name(f".{path.name}.fetching")
    temp_path.write_bytes(content)
    temp_path.replace(path)


def find_complete_checkpoints(files: Iterable[str]) -> list[tuple[int, str]]:
    """(step, path) of every whole checkpoint among the files of a run, the latest first; of two, the rolling one."""
    checkpoints = [(int(match[2]), match[1]) for name in files if (match := _CHECKSUMS_PATH.fullmatch(name))]
    return sorted(checkpoints, key=lambda pair: (pair[0], pair[1].startswith(STATE_FOLDER)), reverse=True)


def upload_checkpoint(storage_path: StoragePath, folder: Path) -> None:
    """Copy the checkpoint in `folder`, its checksums last; another at `place` is not whole from the first moment."""
    with suppress(FileNotFoundError):
        if get_bytes(storage_path.joinpath(CHECKSUMS_FILE)) == (folder / CHECKSUMS_FILE).read_bytes():
            return
    remove_file(storage_path.joinpath(CHECKSUMS_FILE))
    for path in sorted(folder.iterdir()):
        if path.name != CHECKSUMS_FILE:
            put_file(storage_path.joinpath(path.name), path)
    put_file(storage_path.joinpath(CHECKSUMS_FILE), folder / CHECKSUMS_FILE)


def remove_checkpoint(storage_path: StoragePath) -> None:
    """Delete a checkpoint, its checksums first."""
    remove_file(storage_path.joinpath(CHECKSUMS_FILE))
    remove_folder(storage_path)


def download_checkpoint(storage_path: StoragePath, folder: Path) -> bool:
    """Copy the checkpoint at `place` to `folder`, unless it is there and whole; whether it is whole then."""
    checksums = get_bytes(storage_path.joinpath(CHECKSUMS_FILE))
    if (
        (folder / CHECKSUMS_FILE).exists()
        and (folder / CHECKSUMS_FILE).read_bytes() == checksums
        and is_checkpoint_intact(folder)
    ):
        return True
    staging_folder = folder.with_name(f".{folder.name}.fetching")
    shutil.rmtree(staging_folder, ignore_errors=True)
    staging_folder.mkdir(parents=True)
    for name in list_files(storage_path):
        get_file(storage_path.joinpath(name), staging_folder / name)
    shutil.rmtree(folder, ignore_errors=True)
    staging_folder.rename(folder)
    return is_checkpoint_intact(folder)


def is_checkpoint_intact(folder: Path) -> bool:
    """Whether every file that a checkpoint's checksums name is there and has its sum."""
    try:
        checksums = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for name, expected_sum in checksums.items():
            if _compute_sha256(folder / name) != expected_sum:
                return False
    except (OSError, ValueError, AttributeError):
        return False
    return bool(checksums)


class Mirror:
    """Keeps a run's folder on its node and its folder in storage the same.

    place: the run's folder in storage. run_dir: where the run writes rows and rolling states. kept_dir: where it
    writes global_step_<N> folders, which are removed once they are in storage. patience: seconds that the storage is
    waited for, after which a StorageError says so. notes: what the study should be told. is_over: whether to stop
    waiting.
    """

    def __init__(
        self,
        storage_path: StoragePath,
        run_dir: Path,
        checkpoint_dir: Path,
        patience: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.storage_path, self.run_dir, self.checkpoint_dir = storage_path, run_dir, checkpoint_dir
        self.notes: list[str] = []
        self._patience = patience
        self._should_stop = should_stop
        self._pushed_bytes: dict[str, int] = {}
        self._file_checksums: dict[str, str] = {}
        self._checkpoint_checksums: dict[str, bytes] = {}

    def fetch(self, with_checkpoint: bool) -> None:
        """Make the node's folder what storage holds: all rows, and with `with_state` the newest whole checkpoint.

        What the node has from an earlier attempt and storage has not is removed: the run goes back to what is safe.
        """
        files = self._call_storage(partial(list_files, self.storage_path))
        self._clear_local()
        for name, size in compute_line_file_sizes({name: info.size for name, info in files.items()}).items():
            self._call_storage(partial(fetch_lines, self.storage_path.joinpath(name), size, self.run_dir / name))
            self._pushed_bytes[name] = size
        for name in files:
            if "/" not in name and name not in STUDY_FILES:
                self._call_storage(partial(get_file, self.storage_path.joinpath(name), self.run_dir / name))
                self._file_checksums[name] = _compute_sha256(self.run_dir / name)
        if with_checkpoint:
            self._fetch_newest_checkpoint(find_complete_checkpoints(files))
        else:  # what is here would be pushed as if it were newer
            shutil.rmtree(self.run_dir / STATE_FOLDER, ignore_errors=True)

    def _clear_local(self) -> None:
        """Remove what may differ from storage: all but rolling states, whose checksums tell."""
        shutil.rmtree(self.checkpoint_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for path in self.run_dir.iterdir():
            if path.is_file():
                path.unlink()

    def _fetch_newest_checkpoint(self, checkpoints: list[tuple[int, str]]) -> None:
        """Fetch the newest checkpoint that is whole; every other one on the node goes."""
        chosen_folder = None
        for _, name in checkpoints:
            parent, _, folder_name = name.rpartition("/")
            folder = (self.run_dir / STATE_FOLDER if parent == STATE_FOLDER else self.checkpoint_dir) / folder_name
            if self._call_storage(partial(download_checkpoint, self.storage_path.joinpath(name), folder)):
                chosen_folder = folder
                break
            self.notes.append(f"{name} in storage is damaged and is not used")
        for folder in (self.run_dir / STATE_FOLDER, self.checkpoint_dir):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path != chosen_folder:
                    shutil.rmtree(path, ignore_errors=True)
        if chosen_folder is not None and chosen_folder.parent.name == STATE_FOLDER:
            self._checkpoint_checksums[chosen_folder.name] = (chosen_folder / CHECKSUMS_FILE).read_bytes()

    def push(self) -> None:
        """Copy what the run has written since: lines, then other files, then checkpoints; old rolling states go."""
        files = [path for path in sorted(self.run_dir.glob("[!.]*")) if path.is_file()]
        for path in files:
            if path.suffix == ".jsonl":
                pushed_bytes = self._pushed_bytes.get(path.name, 0)
                self._pushed_bytes[path.name] = self._call_storage(
                    partial(push_lines, self.storage_path.joinpath(path.name), path, pushed_bytes)
                )
        for path in (path for path in files if path.suffix != ".jsonl"):
            checksum = _compute_sha256(path)
            if self._file_checksums.get(path.name) != checksum:
                self._call_storage(partial(put_file, self.storage_path.joinpath(path.name), path))
                self._file_checksums[path.name] = checksum
        self._push_rolling_checkpoints()
        for folder in sorted(self.checkpoint_dir.glob("[!.]*")):
            self._call_storage(
                partial(upload_checkpoint, self.storage_path.joinpath(f"{CHECKPOINTS_FOLDER}/{folder.name}"), folder)
            )
            shutil.rmtree(folder)

    def _push_rolling_checkpoints(self) -> None:
        """Copy the rolling states that storage has not, then remove those that the run has no more."""
        storage_path, folder = self.storage_path.joinpath(STATE_FOLDER), self.run_dir / STATE_FOLDER
        local_checksums = {
            path.parent.name: path.read_bytes() for path in sorted(folder.glob(f"[!.]*/{CHECKSUMS_FILE}"))
        }
        changed_names = [name for name, sums in local_checksums.items() if self._checkpoint_checksums.get(name) != sums]
        for name in changed_names:
            self._call_storage(partial(upload_checkpoint, storage_path.joinpath(name), folder / name))
            self._checkpoint_checksums[name] = local_checksums[name]
        if changed_names:
            stored_names = {name.split("/")[0] for name in self._call_storage(partial(list_files, storage_path))}
            for name in stored_names - local_checksums.keys():
                self._call_storage(partial(remove_checkpoint, storage_path.joinpath(name)))

    def _call_storage(self, operation: Callable[[], T]) -> T:
        return call_storage(operation, self._patience, self.notes.append, self._should_stop)


def _compute_sha256(path: Path) -> str:
    """What tells a file from another: a file's time does not, where it is written twice within one tick."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_scratch_path(uri: str, environ: Mapping[str, str]) -> Path:
    """The folder of a node in which runs of the study at `uri` write: below TUNE_STUDY_SCRATCH, else the temporary one.

    Each user has their own, and each study.
    """
    base_folder = environ.get("TUNE_STUDY_SCRATCH") or Path(tempfile.gettempdir()) / f"tune_study_{os.getuid()}"
    return Path(base_folder) / hashlib.sha256(uri.encode()).hexdigest()[:16]


class MirroredRun:
    """One run on a node of its own, for as long as its process carries it: held, fetched, and copied after each step.

    config: what a trial of one run is given, with `storage`, the URI of the study. `config` of this object is the same
    with folders of this node. Raises BusyError where another process of the node carries the run, and StorageError.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        study_path = open_storage(config["storage"])
        self.folder = make_scratch_path(config["storage"], os.environ) / config["run_id"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = acquire_lock(self.folder, _LOCK_TIMEOUT_S)
        self._stored_interrupt, self._interrupt_path = study_path.joinpath(INTERRUPT_FILE), self.folder / INTERRUPT_FILE
        run_dir, checkpoint_dir = self.folder / "run", self.folder / CHECKPOINTS_FOLDER
        (run_entry,) = config["runs"]
        run_entry = {**run_entry, "run_dir": str(run_dir), "checkpoint_dir": str(checkpoint_dir)}
        self.config = {**config, "runs": [run_entry], "interrupt": str(self._interrupt_path)}
        patience = config["storage_patience"]
        storage_path = study_path.joinpath(f"runs/{config['run_id']}")
        self.mirror = Mirror(storage_path, run_dir, checkpoint_dir, patience, self._interrupt_path.exists)
        self._interrupt_path.unlink(missing_ok=True)
        try:
            self.mirror.fetch(with_checkpoint=not config["finished"])
        except BaseException:
            self._lock_file.close()
            raise

    def poll_interrupt(self) -> None:
        """Hand on the study's request to stop, if there is one: the run sees it as a file of its node."""
        with suppress(OSError):  # asked again before the next step
            if file_exists(self._stored_interrupt):
                self._interrupt_path.touch()

    def push_step(self) -> str:
        """Copy what the step has written; what the study should be told."""
        self.mirror.push()
        notes, self.mirror.notes[:] = "; ".join(self.mirror.notes), []
        return notes

    def close(self) -> None:
        """Give the node its room back: all that counts is in storage."""
        for folder in (self.mirror.run_dir, self.mirror.checkpoint_dir):
            shutil.rmtree(folder, ignore_errors=True)
        self._lock_file.close()  # its file stays: another process may be waiting for it

"""Mirror a run's folder in storage: fetch it before the run starts, and push the run's files after every step.

In storage, a JSON Lines file is a folder of parts of `PART_BYTES`. Object stores cannot append, and with parts a step
rewrites only the last one. The checksums of a checkpoint are written last and removed first, so a checkpoint without
them is known to be incomplete. Rows are pushed before the checkpoint that follows them, as on a local disk.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainable.files.json_values import parse_json
from trainable.files.paths import UnsafePathError, atomic_write, compute_sha256, make_folder, open_regular, read_bytes
from trainable.runs.failures import StorageError
from trainable.runs.retry import RetryPolicy, call_with_retry
from trainable.runs.run_files import (
    CHECKSUMS_FILE,
    MAX_ROLLING_CHECKPOINTS,
    METRICS_FILE,
    PROBES_FILE,
    STATE_FOLDER,
    acquire_lock,
    find_best_step,
    read_rows,
)
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
"""Names in storage: a run's folder of global_step_<N> checkpoints, and a study's file that asks its runs to stop."""
STUDY_FILES = ("run.json", "status.json", PROBES_FILE)
"""Files in a run's folder that are written by the driver, not by the run."""
PART_BYTES = 2**20
"""Size of a full part of a JSON Lines file: at most this much is uploaded again when a row is added."""
_LOCK_TIMEOUT_S = 60.0
"""Seconds to wait for an earlier process of this node that still has the run, as in `trainable.runs.run`."""
_CHECKSUMS_PATH = re.compile(
    rf"((?:{STATE_FOLDER}|{CHECKPOINTS_FOLDER})/(?:global_)?step_(\d+))/{re.escape(CHECKSUMS_FILE)}"
)
_STEP_FOLDER = re.compile(r"step_\d+")
_FATAL_ERROR_CODES = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")
"""S3 errors that waiting does not cure. pyarrow raises them as an OSError whose text contains the code."""

STORAGE_RETRY = RetryPolicy(
    lambda error: (
        not isinstance(error, FileNotFoundError | PermissionError | UnsafePathError)
        and not any(word in str(error) for word in _FATAL_ERROR_CODES)
    ),
    "for the storage to respond",
    "the storage responds again",
    "The storage did not respond without an error within {patience:g} s (trainer.disk_patience).",
)


def call_storage(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """The result of `operation` on a storage, retried as in `call_with_retry`. Raises StorageError if it fails."""
    try:
        return call_with_retry(operation, patience, notify, should_stop, STORAGE_RETRY)
    except OSError as error:
        raise StorageError(" ".join([format_error(error), *getattr(error, "__notes__", [])])) from error


def push_lines(storage_path: StoragePath, path: Path, pushed_bytes: int) -> int:
    """Copy the bytes of `path`, an append-only file, after the first `pushed_bytes`; return its size in bytes.

    storage_path: the folder in storage that has the parts of the file.
    """
    size = path.stat().st_size
    with open_regular(path, "rb") as file:
        # From the part with the first new byte, which is replaced as a whole, to the last part (rounded up).
        for part_index in range(pushed_bytes // PART_BYTES, -(-size // PART_BYTES)) if size > pushed_bytes else ():
            file.seek(part_index * PART_BYTES)
            put_bytes(
                storage_path.joinpath(f"{part_index:06}"), file.read(min(PART_BYTES, size - part_index * PART_BYTES))
            )
    return size


def compute_line_file_sizes(files: Mapping[str, int]) -> dict[str, int]:
    """The size in bytes of each JSON Lines file, by path: the sum of its parts. files: sizes of all files, by path."""
    sizes: dict[str, int] = {}
    for name, size in files.items():
        folder, _, part_name = name.rpartition("/")
        if folder.endswith(".jsonl") and part_name.isdecimal():
            sizes[folder] = sizes.get(folder, 0) + size
    return sizes


def fetch_lines(storage_path: StoragePath, size: int, path: Path) -> None:
    """Make the file at `path` equal to the `size` bytes in the parts at `storage_path`."""
    local_size = path.stat().st_size if path.exists() else 0
    if local_size == size:
        return
    # Complete local parts are not fetched again. A local file that is longer than the one in storage has rows of an
    # abandoned attempt, so all of it is fetched.
    first_part = local_size // PART_BYTES if local_size < size else 0
    content = read_bytes(path)[: first_part * PART_BYTES] if first_part else b""
    for index in range(first_part, -(-size // PART_BYTES)):
        content += get_bytes(storage_path.joinpath(f"{index:06}"))
    # Renamed when complete, so that a reader of the driver's copy never sees a part of the rows.
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        temp_path.write_bytes(content)


def find_complete_checkpoints(files: Iterable[str]) -> list[tuple[int, str]]:
    """(step, path) of every complete checkpoint among the files of a run, latest first.

    At the same step, the rolling checkpoint comes before the saved one.
    """
    checkpoints = [(int(match[2]), match[1]) for name in files if (match := _CHECKSUMS_PATH.fullmatch(name))]
    return sorted(checkpoints, key=lambda pair: (pair[0], pair[1].startswith(STATE_FOLDER)), reverse=True)


def upload_checkpoint(storage_path: StoragePath, folder: Path) -> None:
    """Copy the checkpoint in `folder`, its checksums last. An earlier one at `storage_path` is invalidated first."""
    with suppress(FileNotFoundError):  # there are no checksums if the upload is new, or if an earlier one was cut off
        if get_bytes(storage_path.joinpath(CHECKSUMS_FILE)) == read_bytes(folder / CHECKSUMS_FILE):
            return
    remove_file(storage_path.joinpath(CHECKSUMS_FILE))
    for path in sorted(folder.iterdir()):
        if path.name != CHECKSUMS_FILE:
            put_file(storage_path.joinpath(path.name), path)
    put_file(storage_path.joinpath(CHECKSUMS_FILE), folder / CHECKSUMS_FILE)


def remove_checkpoint(storage_path: StoragePath) -> None:
    """Delete a checkpoint, its checksums first: a deletion that is cut off leaves an incomplete checkpoint."""
    remove_file(storage_path.joinpath(CHECKSUMS_FILE))
    remove_folder(storage_path)


def download_checkpoint(storage_path: StoragePath, folder: Path) -> bool:
    """Copy the checkpoint at `storage_path` to `folder`, and return whether the copy is intact.

    Nothing is copied if `folder` already has an intact copy, as on the node that wrote the checkpoint.
    """
    checksums = get_bytes(storage_path.joinpath(CHECKSUMS_FILE))
    if (
        (folder / CHECKSUMS_FILE).exists()
        and read_bytes(folder / CHECKSUMS_FILE) == checksums
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
    """Whether every file that the checksums name exists and matches."""
    try:
        checksums = parse_json(read_bytes(folder / CHECKSUMS_FILE))
        for name, expected_sum in checksums.items():
            if compute_sha256(folder / name) != expected_sum:
                return False
    except (OSError, ValueError, AttributeError):  # AttributeError: the JSON is not an object
        return False
    return bool(checksums)


class Mirror:
    """Keeps the folder of a run on its node equal to the folder of the run in storage.

    storage_path: the run's folder in storage. run_dir: where the run writes rows and rolling checkpoints.
    checkpoint_dir: where the run writes global_step_<N> folders, which are removed once they are in storage. patience:
    seconds to wait for the storage before StorageError is raised. should_stop: whether to stop waiting. best_column:
    see `Run`. The attribute `notes` collects messages for the driver.
    """

    def __init__(
        self,
        storage_path: StoragePath,
        run_dir: Path,
        checkpoint_dir: Path,
        patience: float,
        should_stop: Callable[[], bool],
        best_column: str = "",
    ) -> None:
        self.storage_path, self.run_dir, self.checkpoint_dir = storage_path, run_dir, checkpoint_dir
        self.notes: list[str] = []
        self._patience = patience
        self._should_stop = should_stop
        self._pushed_bytes: dict[str, int] = {}
        self._file_checksums: dict[str, str] = {}
        self._checkpoint_checksums: dict[str, bytes] = {}
        self._may_be_stale = False
        self._best_column = best_column

    def fetch(self, max_checkpoints: int = 1) -> None:
        """Make the node's folder equal to storage: all rows, and the newest intact checkpoints.

        max_checkpoints: how many of them; 0 for a run that is not continued.
        Local files that storage does not have are removed. Their rows were never reported, and the run repeats them.
        """
        files = self._call_storage(partial(list_files, self.storage_path))
        self._clear_local()
        self._checkpoint_checksums.clear()  # a checkpoint that is not fetched was not removed by the run
        for name, size in compute_line_file_sizes({name: file.size for name, file in files.items()}).items():
            self._call_storage(partial(fetch_lines, self.storage_path.joinpath(name), size, self.run_dir / name))
            self._pushed_bytes[name] = size
        for name in files:
            if "/" not in name and name not in STUDY_FILES:
                self._call_storage(partial(get_file, self.storage_path.joinpath(name), self.run_dir / name))
                self._file_checksums[name] = compute_sha256(self.run_dir / name)
        if max_checkpoints:
            self._fetch_newest_checkpoints(find_complete_checkpoints(files), max_checkpoints)
        else:  # a local checkpoint of an earlier attempt would be pushed as if it were newer
            shutil.rmtree(self.run_dir / STATE_FOLDER, ignore_errors=True)

    def _clear_local(self) -> None:
        """Remove local files that may differ from storage.

        Rolling checkpoints stay, because they are large and are compared with those in storage by their checksums.
        """
        shutil.rmtree(self.checkpoint_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for path in self.run_dir.iterdir():
            if path.is_file():
                path.unlink()

    def _fetch_newest_checkpoints(self, checkpoints: list[tuple[int, str]], max_checkpoints: int) -> None:
        """Fetch the newest intact checkpoints and that of the best row, and remove all others from the node."""
        chosen_folders: list[Path] = []
        rows = read_rows(self.run_dir / METRICS_FILE, first_step=0) if self._best_column else []
        best_step, num_newest = find_best_step(rows, self._best_column), 0
        for step, name in checkpoints:
            if num_newest == max_checkpoints and step != best_step:
                continue
            parent, _, folder_name = name.rpartition("/")
            folder = (self.run_dir / STATE_FOLDER if parent == STATE_FOLDER else self.checkpoint_dir) / folder_name
            if self._call_storage(partial(download_checkpoint, self.storage_path.joinpath(name), folder)):
                chosen_folders.append(folder)
                num_newest = min(num_newest + 1, max_checkpoints)
            else:
                self.notes.append(f"{name} in storage is damaged and is not used")
        # The run must not find a checkpoint for which storage lacks the rows, or one that is damaged.
        for folder in (self.run_dir / STATE_FOLDER, self.checkpoint_dir):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path not in chosen_folders:
                    shutil.rmtree(path, ignore_errors=True)
        for folder in chosen_folders:
            if folder.parent.name == STATE_FOLDER:  # so that it is not pushed again
                self._checkpoint_checksums[folder.name] = read_bytes(folder / CHECKSUMS_FILE)

    def push(self) -> None:
        """Copy what the run has written since the last push, and remove the rolling checkpoints that it has removed."""
        self.push_new()
        self.remove_stale()

    def push_new(self) -> None:
        """Copy what the run has written since the last push: lines, then other files, then checkpoints."""
        # Names with a dot are locks and files that are still being written.
        files = [path for path in sorted(self.run_dir.glob("[!.]*")) if path.is_file()]
        for path in files:
            if path.suffix == ".jsonl":
                pushed_bytes = self._pushed_bytes.get(path.name, 0)
                self._pushed_bytes[path.name] = self._call_storage(
                    partial(push_lines, self.storage_path.joinpath(path.name), path, pushed_bytes)
                )
        for path in (path for path in files if path.suffix != ".jsonl"):
            # Size and modification time can stay the same if a file is written twice within one tick of the clock.
            checksum = compute_sha256(path)
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
        """Copy the rolling checkpoints that storage lacks."""
        storage_path, folder = self.storage_path.joinpath(STATE_FOLDER), self.run_dir / STATE_FOLDER
        local_checksums = self._read_rolling_checksums()
        changed_names = [name for name, sums in local_checksums.items() if self._checkpoint_checksums.get(name) != sums]
        for name in changed_names:
            self._call_storage(partial(upload_checkpoint, storage_path.joinpath(name), folder / name))
            self._checkpoint_checksums[name] = local_checksums[name]
        # A run that has ended may have removed checkpoints without writing another one.
        removed_names = self._checkpoint_checksums.keys() - local_checksums.keys()
        for name in removed_names:
            del self._checkpoint_checksums[name]
        self._may_be_stale = self._may_be_stale or bool(changed_names or removed_names)

    def _read_rolling_checksums(self) -> dict[str, bytes]:
        """The checksums of each complete rolling checkpoint on the node, by the name of its folder."""
        paths = sorted((self.run_dir / STATE_FOLDER).glob(f"[!.]*/{CHECKSUMS_FILE}"))
        return {path.parent.name: read_bytes(path) for path in paths}

    def remove_stale(self) -> None:
        """Remove the rolling checkpoints that the run has removed; after a push, so that storage always has one.

        Anything else in that folder stays: the storage may be a folder that others use as well.
        """
        # Listing a folder costs a request, and there is nothing to remove unless checkpoints were written or removed.
        if not self._may_be_stale:
            return
        storage_path = self.storage_path.joinpath(STATE_FOLDER)
        stored_names = {name.split("/")[0] for name in self._call_storage(partial(list_files, storage_path))}
        for name in filter(_STEP_FOLDER.fullmatch, stored_names - self._read_rolling_checksums().keys()):
            self._call_storage(partial(remove_checkpoint, storage_path.joinpath(name)))
        self._may_be_stale = False

    def _call_storage(self, operation: Callable[[], T]) -> T:
        return call_storage(operation, self._patience, self.notes.append, self._should_stop)


def make_scratch_path(uri: str, environ: Mapping[str, str]) -> Path:
    """The scratch folder of this node for the runs of the study at `uri`.

    The scratch folder is below the folder that the variable TUNE_STUDY_SCRATCH in `environ` names. If there is no such
    variable, the scratch folder is below a folder of this user in the temporary folder. Two studies never share a
    scratch folder, because its name is a hash of the URI.
    """
    base_folder = environ.get("TUNE_STUDY_SCRATCH") or Path(tempfile.gettempdir()) / f"tune_study_{os.getuid()}"
    return Path(base_folder) / hashlib.sha256(uri.encode()).hexdigest()[:16]


def make_scratch_folder(uri: str, environ: Mapping[str, str]) -> Path:
    """Create and return the folder of `make_scratch_path`.

    Raises StorageError if the folder in the temporary folder belongs to another user, who could change the rows.
    """
    folder = make_scratch_path(uri, environ)
    if not environ.get("TUNE_STUDY_SCRATCH"):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = folder.parent.lstat()
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid():
            raise StorageError(
                f"{folder.parent} is a link or belongs to another user: set TUNE_STUDY_SCRATCH to a folder of your own."
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class MirroredTrial:
    """The runs of a trial, which write to their node's scratch folder.

    The runs are locked and fetched when this object is made, and pushed after each step. config: the configuration of
    a trial, in which `storage` is the URI of the study. The attribute `config` is the same with folders of this node.
    Raises StorageError, and RunLockedError if another process of this node has the runs.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        study_path = open_storage(config["storage"])
        scratch_path = make_scratch_folder(config["storage"], os.environ)
        self.folder = make_folder(scratch_path, config["run_id"])
        self._lock_file = acquire_lock(self.folder, _LOCK_TIMEOUT_S)
        self._stored_interrupt, self._interrupt_path = study_path.joinpath(INTERRUPT_FILE), self.folder / INTERRUPT_FILE
        self.mirrors = {
            run["run_id"]: Mirror(
                study_path.joinpath(f"runs/{run['run_id']}"),
                scratch_path / run["run_id"] / "run",
                scratch_path / run["run_id"] / CHECKPOINTS_FOLDER,
                config["storage_patience"],
                self._interrupt_path.exists,
                config.get("best_column", ""),
            )
            for run in config["runs"]
        }
        run_entries = [
            {
                **run,
                "run_dir": str(self.mirrors[run["run_id"]].run_dir),
                "checkpoint_dir": str(self.mirrors[run["run_id"]].checkpoint_dir),
            }
            for run in config["runs"]
        ]
        self.config = {**config, "runs": run_entries, "interrupts": [str(self._interrupt_path)]}
        self._interrupt_path.unlink(missing_ok=True)  # a request to stop that was meant for an earlier start
        # Several runs continue from a step for which all of them have a checkpoint. If the node died while it pushed
        # them one after another, some have new checkpoints beside the old ones, and each may also be a saved one.
        max_checkpoints = 1 if len(self.mirrors) == 1 else 4 * MAX_ROLLING_CHECKPOINTS
        try:
            for mirror in self.mirrors.values():
                mirror.fetch(max_checkpoints=0 if config["finished"] else max_checkpoints)
        except BaseException:
            self._lock_file.close()
            raise

    def poll_interrupt(self) -> None:
        """Pass on the driver's request to stop, if there is one. The runs see it as a file on their node."""
        with suppress(OSError):  # if the storage does not answer, the next step asks again
            if file_exists(self._stored_interrupt):
                self._interrupt_path.touch()

    def push_step(self) -> str:
        """Push the files that the step has written; return the notes for the driver."""
        notes: list[str] = []
        for mirror in self.mirrors.values():
            mirror.push_new()
        # Only now: until then, storage has a step for which all runs have a checkpoint.
        for mirror in self.mirrors.values():
            mirror.remove_stale()
            notes += mirror.notes
            mirror.notes.clear()
        return "; ".join(notes)

    def close(self) -> None:
        """Free the disk space of the node, since all results are in storage, and release the lock of the runs."""
        for mirror in self.mirrors.values():
            for folder in (mirror.run_dir, mirror.checkpoint_dir):
                shutil.rmtree(folder, ignore_errors=True)
        self._lock_file.close()  # the file itself stays: another process may be waiting for the lock

"""Upload the checkpoints of a trial to the storage of its study, beside the training.

<storage>/<trial>/start_<k>_<random>/checkpoint_<n>/<seed>/ has the lines and the newest state of each run.
COMPLETE_FILE is written last, so a checkpoint that contains it is complete. Each start of a trial has a folder of its
own. So the process of an earlier start, which a network partition may keep alive, cannot write into the files of a
later one, and the checkpoints of a later start count as newer.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from trainable.files.json_values import parse_json
from trainable.files.paths import check_tree
from trainable.runs.run_files import CHECKSUMS_FILE, MAX_ROLLING_CHECKPOINTS, STATE_FOLDER

OBJECT_STORES = ("s3", "gcs", "abfs")
"""pyarrow's names of filesystems without folders, where a file appears only when its upload is complete."""
STORED_CHECKPOINT = r"start_(?P<start>\d+)_[0-9a-f]{8}/checkpoint_(?P<number>\d+)"
"""Pattern of the folder of a checkpoint, relative to that of its trial."""
COMPLETE_FILE, POINTER_FILE, POINTER_KEY = "complete", "runs.json", "folder"
"""POINTER_FILE, in a checkpoint of Tune, has the names of its runs by seed, or under POINTER_KEY the folder of an
uploaded checkpoint."""
_STORED_FILE = re.compile(rf"(?P<folder>{STORED_CHECKPOINT})/(?:{COMPLETE_FILE}|(?P<seed>\d+)/(?P<name>.+))")
_STATE = re.compile(rf"{STATE_FOLDER}/step_(\d+)/{re.escape(CHECKSUMS_FILE)}")
_N_THREADS = 8
"""Files of a checkpoint that are uploaded in parallel, because one connection does not fill a node's network."""
_CHUNK_BYTES = 2**24


class StoredCheckpoint(NamedTuple):
    """A checkpoint of a trial in a storage.

    folder: relative to the folder of the trial. steps: the steps of the states by seed, empty for a run without one.
    """

    start: int
    number: int
    folder: str
    steps: Mapping[int, frozenset[int]]
    is_complete: bool

    @property
    def newest_step(self) -> int:
        """The step of the newest state of all runs, or 0."""
        return max((step for steps in self.steps.values() for step in steps), default=0)


def list_stored_checkpoints(filesystem: FileSystem, trial: str) -> list[StoredCheckpoint]:
    """List the checkpoints of a trial in a storage, oldest first. trial: the path of its folder."""
    if isinstance(filesystem, LocalFileSystem):  # a shared folder, in which pyarrow would follow links
        check_tree(Path(trial).parent, trees=[Path(trial)])
    steps: dict[tuple[int, int, str], dict[int, frozenset[int]]] = {}
    complete_keys = set()
    for entry in filesystem.get_file_info(FileSelector(trial, recursive=True, allow_not_found=True)):
        match = _STORED_FILE.fullmatch(entry.path[len(trial) + 1 :])
        if entry.type != FileType.File or match is None:
            continue
        key = int(match["start"]), int(match["number"]), match["folder"]
        if match["seed"] is None:
            complete_keys.add(key)
            continue
        by_seed, seed, state = steps.setdefault(key, {}), int(match["seed"]), _STATE.fullmatch(match["name"])
        by_seed[seed] = by_seed.get(seed, frozenset()) | ({int(state[1])} if state else frozenset())
    return [StoredCheckpoint(*key, steps[key], key in complete_keys) for key in sorted(steps)]


def read_pointer(filesystem: FileSystem, checkpoint: str) -> str:
    """Find the path of the uploaded checkpoint that a checkpoint of Tune names; "" if none, and itself if it is one."""
    if re.search(rf"/{STORED_CHECKPOINT}$", checkpoint):
        return checkpoint
    with filesystem.open_input_stream(f"{checkpoint}/{POINTER_FILE}") as pointer:
        folder = str(parse_json(pointer.read()).get(POINTER_KEY))
    # Only a folder of the same trial, since a checkpoint is data that others may have written.
    return f"{checkpoint.rpartition('/')[0]}/{folder}" if re.fullmatch(STORED_CHECKPOINT, folder) else ""


def upload_folder(filesystem: FileSystem, source: Path, target: str) -> None:
    """Upload the files of a folder in parallel, and its CHECKSUMS_FILE last, if it has one."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    if filesystem.type_name not in OBJECT_STORES:
        for folder in {path.parent for path in paths} | {source}:
            filesystem.create_dir(f"{target}/{folder.relative_to(source).as_posix()}", recursive=True)

    def upload(path: Path) -> None:
        name = path.relative_to(source).as_posix()
        with path.open("rb") as content, filesystem.open_output_stream(f"{target}/{name}") as stored_file:
            shutil.copyfileobj(content, stored_file, _CHUNK_BYTES)

    last_path = source / CHECKSUMS_FILE
    # Threads of our own: those of `copy_files` can make uploads to S3 hang
    # (https://github.com/apache/arrow/issues/32372).
    with ThreadPoolExecutor(_N_THREADS) as executor:
        list(executor.map(upload, (path for path in paths if path != last_path)))
    if last_path in paths:
        upload(last_path)


class Uploads:
    """The uploads of one start of a trial, one after the other in a thread.

    uri: folder of the study in the storage. trial_name: name of the folder of the trial in it. retry: calls an upload,
    and repeats it while the storage does not answer. Raises OSError if the storage cannot be listed.
    """

    def __init__(self, uri: str, trial_name: str, retry: Callable[[Callable[[], None]], None]) -> None:
        self.filesystem, self._root = FileSystem.from_uri(uri)
        self._trial_name, self._retry = trial_name, retry
        checkpoints = list_stored_checkpoints(self.filesystem, f"{self._root}/{trial_name}")
        self.earlier_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
        """The complete checkpoints of earlier starts, oldest first."""
        start = 1 + max((checkpoint.start for checkpoint in checkpoints), default=0)
        self._start_folder = f"start_{start}_{uuid4().hex[:8]}"
        self._executor = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._count = 0

    @property
    def folder(self) -> str:
        """The folder of the newest checkpoint, relative to that of the trial; empty before the first."""
        return f"{self._start_folder}/checkpoint_{self._count:06}" if self._count else ""

    def get_path(self, folder: str) -> str:
        """Return the path of a folder that is relative to that of the trial."""
        return f"{self._root}/{self._trial_name}/{folder}"

    def begin(self, snapshot: Path | None, saved_folders: Mapping[Path, str]) -> None:
        """Begin to upload a checkpoint, and then to move folders of saved checkpoints to the storage.

        snapshot: folder with the content of the checkpoint, which nobody changes and which is deleted after the upload;
        None if there is no new one. saved_folders: by local path, the path relative to the folder of the study.
        """
        self._count += snapshot is not None
        upload = partial(self._upload, snapshot, self.get_path(self.folder), saved_folders)
        self._pending = self._executor.submit(self._retry, upload)

    @property
    def is_pending(self) -> bool:
        """Whether an upload has begun whose end `finish` has not yet told."""
        return self._pending is not None

    def finish(self, *, waits: bool) -> bool:
        """Check whether the pending upload has ended, and raise its error if it failed. waits: whether to wait."""
        if self._pending is None or not (waits or self._pending.done()):
            return False
        pending, self._pending = self._pending, None
        pending.result()
        return True

    def close(self) -> None:
        """Wait for the pending upload. Its error is ignored, since the previous checkpoint is still there."""
        self._executor.shutdown()

    def _upload(self, snapshot: Path | None, target: str, saved_folders: Mapping[Path, str]) -> None:
        if snapshot is not None and snapshot.is_dir():  # not uploaded by an earlier attempt
            upload_folder(self.filesystem, snapshot, target)
            with self.filesystem.open_output_stream(f"{target}/{COMPLETE_FILE}") as complete_file:
                complete_file.write(b"complete\n")
            self._remove_superseded({int(path.name) for path in snapshot.iterdir()})
            shutil.rmtree(snapshot)
        for source, name in saved_folders.items():
            if source.is_dir():
                upload_folder(self.filesystem, source, f"{self._root}/{name}")
                shutil.rmtree(source)

    def _remove_superseded(self, seeds: set[int]) -> None:
        """Remove what is older than the two newest checkpoints: the driver may not know the newest yet.

        Of runs that are over and keep no state, only the newest is left. Checkpoints with a run of a seed that is not
        among `seeds`, which ended in an earlier start, stay.
        """
        with suppress(OSError):  # old checkpoints only take space
            checkpoints = list_stored_checkpoints(self.filesystem, self.get_path("").rstrip("/"))
            complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
            oldest_wanted = complete[-MAX_ROLLING_CHECKPOINTS if complete[-1].newest_step else -1 :][0]
            for checkpoint in checkpoints[: checkpoints.index(oldest_wanted)]:
                if checkpoint.steps.keys() <= seeds:
                    self.filesystem.delete_dir(self.get_path(checkpoint.folder))

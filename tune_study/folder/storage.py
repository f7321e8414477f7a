"""Keep a study in a storage: a bucket or a shared folder.

Ray Tune keeps the experiment there, and the runs upload their checkpoints to the folders of its trials (see
`trainable.uploads`). The driver adds the files of results/<run>: study.json, runs/<run_id>/, tables, report, and logs/.
It copies the rows of the newest checkpoints to its own folder, and makes all other files from them.
"""

import getpass
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import psutil
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem, copy_files

from trainable.config.command_lines import format_command
from trainable.files.json_values import format_object, parse_json
from trainable.files.paths import atomic_write, check_tree, read_bytes
from trainable.runs.run_files import CHECKSUMS_FILE, LINE_FILES, PROBES_FILE, STATE_FOLDER
from trainable.runs.study_record import RUN_FILE, STATUS_FILE, STUDY_FILE
from trainable.uploads import OBJECT_STORES, list_stored_checkpoints, read_pointer
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import RunSpec, StudyPlan, find_output

DRIVER_FILE = "driver.json"
RESULT_NAMES = rf"{STUDY_FILE}|runs/[^/]+/[^/]+|logs/.+"
"""Pattern of what the driver stores. Tables and report are left out, since they are made from the rows."""
PLAN_NAMES = rf"{STUDY_FILE}|runs/[^/]+/{RUN_FILE}"
"""Pattern of what a plan needs."""
SYNC_SECONDS = 20.0
"""Seconds between copies of rows and statuses."""
GONE_SECONDS = 90.0
"""A driver that has copied nothing for this many seconds counts as gone."""
_PROBE_NAME = "tune_study-was-here"
"""Name of the test file of `check_storage`. Users may see it if it cannot be removed."""
_SAVED_CHECKPOINT = re.compile(rf"(?P<folder>runs/[^/]+/global_step_(?P<step>\d+))/{re.escape(CHECKSUMS_FILE)}")


class StoredFolder:
    """A folder in a storage, by its URI. Raises PlanError if pyarrow has no filesystem for it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        try:
            self.filesystem, self.path = FileSystem.from_uri(uri)
        except (OSError, ValueError, TypeError, ImportError) as error:  # pyarrow raises each of these for some bad URI
            raise PlanError(f"{uri} cannot be used as a storage: {format_error(error)}") from None
        if not self.path.strip("/"):
            raise PlanError(f"{uri} names no folder: type it like s3://bucket/folder, gs://bucket/folder or /shared.")

    def list_files(self, *names: str) -> dict[str, FileInfo]:
        """List every file below folders, by its path relative to this one, without hidden files.

        names: paths of the folders, or of single files; without them, everything is listed.
        """
        root = self.path.rstrip("/")
        paths = [f"{root}/{name}" for name in names] or [root]
        if isinstance(self.filesystem, LocalFileSystem):  # a shared folder, in which pyarrow would follow links
            check_tree(Path(self.path), trees=map(Path, paths))
        entries = self.filesystem.get_file_info(paths)
        for path in (entry.path for entry in tuple(entries) if entry.type != FileType.File):
            entries += self.filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        files = {entry.path[len(root) + 1 :]: entry for entry in entries if entry.type == FileType.File}
        # Our hidden files are incomplete, because `put` writes to a hidden name first.
        return {path: entry for path, entry in files.items() if not re.search(r"(^|/)\.", path)}

    def read(self, name: str) -> bytes:
        """Read a file. Raises FileNotFoundError if there is none."""
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as source:
            return bytes(source.readall())

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to `path`, which always has either the previous content or all of the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temp_path:
            temp_path.write_bytes(self.read(name))

    def put(self, name: str, content: bytes) -> None:
        """Write a file, which always has either the previous content or all of the new one."""
        target = f"{self.path}/{name}"
        folder, _, file_name = target.rpartition("/")
        is_object_store = self.filesystem.type_name in OBJECT_STORES
        if not is_object_store:
            self.filesystem.create_dir(folder, recursive=True)
        written = target if is_object_store else f"{folder}/.{file_name}.{uuid4().hex[:8]}.part"
        with self.filesystem.open_output_stream(written) as out:
            out.write(content)
        if not is_object_store:
            self.filesystem.move(written, target)

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")


def format_error(error: BaseException) -> str:
    """Return the first line of an error message (pyarrow's may have many), or the error's type if it is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _explain_errors(uri: str) -> Iterator[None]:
    """Turn an error of the storage into a PlanError."""
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"{uri} cannot be used: {format_error(error)}. Check that the bucket or folder exists, that this machine "
            f"can reach it, and that the credentials in the environment are valid."
        ) from None


def check_storage(uri: str) -> None:
    """Raise PlanError unless a file can be written, read and removed below `uri`."""
    folder = StoredFolder(uri)
    with _explain_errors(f"--storage {uri}"):
        folder.put(_PROBE_NAME, b"tune_study")
        folder.read(_PROBE_NAME)
        folder.remove(_PROBE_NAME)


def fetch_study(uri: str, target: Path, names: str = RESULT_NAMES) -> None:
    """Copy files of the study at `uri` whose names match to `target`, results/<run>, and its logs to logs/.

    Raises PlanError if the storage cannot be read.
    """
    folder = StoredFolder(uri)
    with _explain_errors(uri):
        for name, info in folder.list_files(STUDY_FILE, "runs", "logs").items():
            path = target / name
            if name.startswith("logs/"):
                path = find_output(target, PurePosixPath(folder.path).name) / name
            # If the driver ran here and its last copy failed, the files here are newer.
            is_newer = path.exists() and path.stat().st_mtime_ns >= (info.mtime_ns or 0)
            if re.fullmatch(names, name) and not is_newer:
                folder.fetch(name, path)


def find_driver(uri: str) -> str:
    """Describe who runs the study at `uri`, as far as the machines' clocks agree.

    Empty if nobody does, or if the storage cannot be read.
    """
    # Errors are ignored, because `status` shows the rows that it has read even if the storage no longer answers.
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = parse_json(StoredFolder(uri).read(DRIVER_FILE))
        age, host, pid = time.time() - float(content["time"]), str(content["host"]), int(content["pid"])
        is_gone = age > GONE_SECONDS or (host == socket.gethostname() and not psutil.pid_exists(pid))
        return "" if is_gone else f"{content['user']} on {host} (pid {pid}), last heard of {max(age, 0):.0f} s ago"
    return ""


def list_checkpoints(uri: str, spec: RunSpec, trial_name: str) -> dict[int, str]:
    """List the checkpoints of a run of the study at `uri`: by step, the folder relative to the study's.

    Raises PlanError if the storage cannot be read.
    """
    folder, checkpoints = StoredFolder(uri), dict[int, str]()
    with _explain_errors(uri):
        for stored in list_stored_checkpoints(folder.filesystem, f"{folder.path}/{trial_name}"):
            for step in stored.steps.get(spec.seed, ()) if stored.is_complete else ():
                checkpoints[step] = f"{trial_name}/{stored.folder}/{spec.seed}/{STATE_FOLDER}/step_{step}"
        for name in folder.list_files(f"runs/{spec.run_id}"):
            if match := _SAVED_CHECKPOINT.fullmatch(name):
                checkpoints[int(match["step"])] = match["folder"]
    return checkpoints


def fetch_checkpoint(uri: str, name: str, target: Path) -> None:
    """Copy the folder of a checkpoint to `target`. Raises PlanError if it cannot be read."""
    folder = StoredFolder(uri)
    with _explain_errors(uri):
        folder.list_files(name)  # UnsafePathError for links
        target.mkdir(parents=True, exist_ok=True)
        copy_files(f"{folder.path}/{name}", str(target), source_filesystem=folder.filesystem)


class StoredStudy:
    """A study in its storage, synced while a driver runs it. Raises PlanError if the storage cannot be opened.

    plan: the study, which may be replaced by the same study with more runs.
    """

    def __init__(self, plan: StudyPlan) -> None:
        assert plan.study_uri is not None
        self.uri, self.plan = plan.study_uri, plan
        self._folder = StoredFolder(self.uri)
        # By name in the storage: inode, size and modification time of the local file when it was last copied.
        self._pushed_stats: dict[str, tuple[int, int, int]] = {}
        self._new_checkpoints: dict[str, tuple[str, int]] = {}  # by run_id: the newest checkpoint, and the run's seed
        # The sync thread and Tune's callbacks both copy. Two locks, since an upload must not keep callbacks waiting.
        self._pull_lock, self._push_lock = threading.Lock(), threading.Lock()

    @contextmanager
    def keep_synced(self) -> Iterator[None]:
        """Fetch what is in the storage, and keep both sides in sync during the body.

        Raises PlanError if that fails, or if another driver runs the study.
        """
        stop_event = threading.Event()
        thread = threading.Thread(target=self._run_sync_loop, args=(stop_event,), name="storage", daemon=True)
        if driver := find_driver(self.uri):
            raise PlanError(
                f"The study in {self.uri} is being run by {driver}: wait for it, or end it. If it was killed, the "
                f"study can be continued {GONE_SECONDS:.0f} s after it was last heard of."
            )
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        fetch_study(self.uri, self.plan.folder)
        with _explain_errors(self.uri):
            self._put_driver_file()
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()
            with suppress(OSError):  # a leftover file is ignored after GONE_SECONDS
                self._folder.remove(DRIVER_FILE)

    def _put_driver_file(self) -> None:
        content = {"user": getpass.getuser(), "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        self._folder.put(DRIVER_FILE, format_object(content).encode())

    def _run_sync_loop(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(SYNC_SECONDS):
            with suppress(Exception):  # if the storage does not answer, the next round tries again
                self._put_driver_file()
                self.pull()
                self.push()

    def follow(self, runs: Iterable[Mapping[str, Any]], path: str) -> None:
        """Take the rows of a trial from a checkpoint at the next `pull`.

        runs: the entry `runs` of the trial's config. path: of the folder of a checkpoint, relative to the study's, or
        of a checkpoint of Tune, which names one.
        """
        for run in runs:
            self._new_checkpoints[run["run_id"]] = path.removeprefix(f"{self._folder.path}/"), run["seed"]

    def pull(self) -> None:
        """Copy the lines of the newest followed checkpoints. Raises OSError if the storage cannot be read."""
        with self._pull_lock:
            for run_id in list(self._new_checkpoints):
                path, seed = self._new_checkpoints.pop(run_id)
                run_dir = self.plan.get_run_dir(run_id)
                try:
                    target = read_pointer(self._folder.filesystem, f"{self._folder.path}/{path}")
                    folder = target.removeprefix(f"{self._folder.path}/")
                    for name in LINE_FILES if folder else ():
                        with suppress(FileNotFoundError):
                            self._folder.fetch(f"{folder}/{seed}/{name}", run_dir / name)
                except OSError:
                    self._new_checkpoints.setdefault(run_id, (path, seed))  # unless a newer one came meanwhile
                    raise

    def push(self) -> str:
        """Copy study.json, statuses, rows, logs, tables and report; return an error text, or ""."""
        plan, names = self.plan, (RUN_FILE, STATUS_FILE, *LINE_FILES)
        paths = [plan.get_run_dir(spec.run_id) / name for spec in plan.runs for name in names]
        try:
            with self._push_lock:
                files = {
                    **_name_files(
                        plan.output, [plan.summary_log, *(plan.output / spec.log_path for spec in plan.runs)]
                    ),
                    **list_result_files(plan.folder),
                    # study.json comes last, so that the other files exist when it appears.
                    **_name_files(plan.folder, [*paths, plan.folder / STUDY_FILE]),
                }
                for name, path in files.items():
                    # A file that is just being replaced is copied next time.
                    with suppress(FileNotFoundError):
                        stat = path.stat()
                        # Replacing a file changes its inode, and appending changes its size and time.
                        fingerprint = stat.st_ino, stat.st_size, stat.st_mtime_ns
                        if self._pushed_stats.get(name) != fingerprint:
                            self._folder.put(name, read_bytes(path))
                            self._pushed_stats[name] = fingerprint
        except OSError as error:
            return (
                f"Statuses, tables and report could not be copied to {self.uri}: {format_error(error)}. They are in "
                f"{self.plan.folder}: `{format_command('resume', self.plan.folder)}` copies them."
            )
        return ""


def _name_files(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """List the files among `paths`, by their path relative to `root`."""
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}


def list_result_files(folder: Path) -> dict[str, Path]:
    """List the tables, the report and the probes of a study, by name in the storage."""
    paths = [path for pattern in ("*.parquet", "report.html", "figures/**/*") for path in folder.glob(pattern)]
    return _name_files(folder, [*paths, *folder.glob(f"runs/*/{PROBES_FILE}")])


def push_results(folder: Path, uri: str) -> str:
    """Copy what was made from the rows in `folder` to the study at `uri`; return an error text, or "".

    Statuses are left out, since fetched ones may be older than the storage's.
    """
    try:
        stored_folder = StoredFolder(uri)
        for name, path in list_result_files(folder).items():
            stored_folder.put(name, read_bytes(path))
    except (OSError, PlanError) as error:
        return f"Tables and report could not be copied to {uri}: {format_error(error)}. They are in {folder}."
    return ""

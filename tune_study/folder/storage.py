"""Keep a study's folder in storage in sync with its driver: fetch rows; push statuses, tables and report.

Data flow: a run writes rows and checkpoints on its node and copies them to storage (`trainable.storage.mirror`). The
driver has a local folder, results/<run>, with copies of the rows (never of checkpoints), from which it makes all other
files.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trainable.config.command_lines import format_command
from trainable.files.paths import is_file, read_bytes, write_text
from trainable.runs.failures import StorageError
from trainable.runs.run_files import PROBES_FILE
from trainable.storage.mirror import (
    INTERRUPT_FILE,
    STUDY_FILES,
    call_storage,
    compute_line_file_sizes,
    download_checkpoint,
    fetch_lines,
    find_complete_checkpoints,
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
)
from trainable.storage.uris import join_uri
from tune_study.folder.lease import REFRESH_S, Lease, read_holder
from tune_study.host.interrupt import Interrupt, make_interrupt
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, find_output

STUDY_FILE, LAST_DRIVER = "study.json", "last-driver"
"""LAST_DRIVER: name of the file with the lease id of the newest driver.

One copy is in storage and one, as a hidden file, in the local folder of that driver. Equal copies mean that no other
folder has newer statuses.
"""
_POLL_S = 1.0
"""Seconds between checks for a request to stop, which runs on other nodes see only through storage."""
_PROBE_NAME = "tune_study-was-here"
"""Name of the file with which `check_storage` tries the storage. A user may see it there if it cannot be removed."""


def open_uri(uri: str) -> StoragePath:
    """Open the folder that a URI names. Raise PlanError if that fails."""
    try:
        return open_storage(uri)
    except StorageError as error:
        raise PlanError(str(error)) from None


def _make_read_error(uri: str, error: OSError) -> PlanError:
    return PlanError(f"{uri} cannot be read: {format_error(error)}. Check the name and the credentials.")


def check_storage(uri: str) -> None:
    """Raise PlanError unless a file can be written, read and removed below `uri`."""
    marker = open_uri(uri).joinpath(_PROBE_NAME)
    try:
        put_bytes(marker, b"tune_study")
        if get_bytes(marker) != b"tune_study":
            raise OSError("a file was read back with other content than was written")
        remove_file(marker)
    except OSError as error:
        raise PlanError(
            f"--storage {uri} cannot be used: {format_error(error)}. Check that the bucket or folder exists, that this "
            f"machine can reach it, and that the credentials in the environment are valid."
        ) from None


def fetch_study(uri: str, folder: Path) -> bool:
    """Copy study.json and every run.json of the study at `uri` into `folder`. Returns whether there is a study.

    A plan needs no other file. Raises PlanError if the storage cannot be read.
    """
    storage_path = open_uri(uri)
    try:
        files = list_files(storage_path)
        for name in [name for name in files if name == STUDY_FILE or name.endswith("/run.json")]:
            get_file(storage_path.joinpath(name), folder / name)
    except OSError as error:
        raise _make_read_error(uri, error) from None
    return STUDY_FILE in files


def fetch_results(uri: str, folder: Path) -> None:
    """Copy the study at `uri` without checkpoints into `folder`, results/<run>, and its logs into logs/.

    If the newest driver ran in `folder`, copy only rows: the files that drivers write are newer there. Raise PlanError
    if the storage cannot be read.
    """
    try:
        _fetch_results(open_uri(uri), folder)
    except OSError as error:
        raise _make_read_error(uri, error) from None


def is_running(uri: str) -> bool:
    """Whether a driver is running the study at `uri`; False if the storage cannot be read."""
    with suppress(OSError):  # `status` shows the rows that it has read, whether or not the storage still answers
        holder = read_holder(open_uri(uri))
        return holder is not None and not holder.is_gone
    return False


def is_newest_folder(uri: str, folder: Path) -> bool:
    """Whether the newest driver of the study at `uri` ran in `folder`, so that its statuses are the newest.

    Also True if nobody has run the study yet. Raise PlanError if the storage cannot be read.
    """
    try:
        return _is_newest_folder(open_uri(uri), folder)
    except OSError as error:
        raise _make_read_error(uri, error) from None


def _is_newest_folder(storage_path: StoragePath, folder: Path) -> bool:
    """`is_newest_folder` for an open storage; raises OSError if it cannot be read."""
    if not file_exists(storage_path.joinpath(LAST_DRIVER)):
        return True
    marker = folder / f".{LAST_DRIVER}"
    return is_file(marker) and read_bytes(marker) == get_bytes(storage_path.joinpath(LAST_DRIVER))


def _fetch_results(storage_path: StoragePath, folder: Path) -> None:
    """`fetch_results` for an open storage; raises OSError if it cannot be read."""
    files = list_files(storage_path)
    if not _is_newest_folder(storage_path, folder):
        _fetch_driver_files(storage_path, files, folder)
    _fetch_rows(storage_path, files, folder)


def _fetch_driver_files(storage_path: StoragePath, files: Mapping[str, Any], folder: Path) -> None:
    """Copy the files that drivers write: study.json, statuses and logs. Tables and report are made from the rows."""
    for name in files:
        top_folder, file_name = name.split("/")[0], name.split("/")[-1]
        if name == STUDY_FILE or (top_folder == "runs" and file_name in STUDY_FILES):
            get_file(storage_path.joinpath(name), folder / name)
        elif top_folder == "logs":
            get_file(storage_path.joinpath(name), find_output(folder, PurePosixPath(storage_path.path).name) / name)


def _fetch_rows(storage_path: StoragePath, files: Mapping[str, Any], folder: Path, prefix: str = "runs/") -> None:
    """Copy the new lines of the files that runs append to, such as metrics.jsonl.

    files: the files in storage. prefix: the names of the files to copy begin with it.
    """
    for name, size in compute_line_file_sizes({name: info.size for name, info in files.items()}).items():
        if name.startswith(prefix):
            fetch_lines(storage_path.joinpath(name), size, folder / name)


def list_checkpoints(uri: str, run_id: str) -> dict[int, str]:
    """Complete checkpoints of a run of the study at `uri`: for each step, the path below the run's folder."""
    try:
        # If a step has a rolling and a saved checkpoint, the first one in the list is preferred. Reversed, it comes
        # last and stays in the dict.
        return dict(reversed(find_complete_checkpoints(list_files(open_uri(uri).joinpath(f"runs/{run_id}")))))
    except OSError as error:
        raise _make_read_error(uri, error) from None


def fetch_checkpoint(uri: str, run_id: str, name: str, folder: Path) -> None:
    """Copy the checkpoint `name` of a run to `folder`. Raise PlanError if it is damaged or cannot be read."""
    try:
        is_complete = download_checkpoint(open_uri(uri).joinpath(f"runs/{run_id}/{name}"), folder)
    except OSError as error:
        raise PlanError(f"{name} of {run_id} cannot be copied from {uri}: {format_error(error)}.") from None
    if not is_complete:
        raise PlanError(f"{name} of {run_id} is damaged in {uri}: type another --checkpoint-step.")


class StoredStudy:
    """The study's folder in storage, kept in sync while a driver runs the study.

    Args:
        plan: the study.
        interrupt: the request to stop. It is passed on to the runs through storage, since they may run on any machine.
        log: called with a message, for example when another driver has taken over the study.

    Raises PlanError if the storage cannot be opened.
    """

    def __init__(self, plan: StudyPlan, interrupt: Interrupt, log: Callable[[str], None]) -> None:
        assert plan.storage is not None
        self.uri = join_uri(plan.storage, plan.run)
        self._plan = plan
        self._interrupt = interrupt
        self._log = log
        self._storage_path = open_uri(self.uri)
        self._lease = Lease(self._storage_path)
        # By name in storage: inode, size and modification time of the local file when it was last copied.
        self._pushed_stats: dict[str, tuple[int, int, int]] = {}
        # The sync thread and Tune's callbacks both fetch rows, and must not append the same lines to one file.
        self._lock = threading.Lock()

    @contextmanager
    def keep_synced(self) -> Iterator[None]:
        """Acquire the study, fetch newer files, and keep both sides in sync during the body.

        Raise PlanError if another driver runs the study, or if the storage cannot be used.
        """
        stop_event = threading.Event()
        thread = threading.Thread(target=self._run_sync_loop, args=(stop_event,), name="storage", daemon=True)
        try:
            self._acquire()
            thread.start()
            yield
        finally:
            stop_event.set()
            if thread.ident is not None:  # it was started; a thread that was not cannot be joined
                thread.join()
            with suppress(OSError):  # a lease that stays is ignored: its process has ended, or STALE_S pass
                self._lease.release()

    def _acquire(self) -> None:
        """Acquire the lease and fetch newer files. Raise PlanError if that fails."""
        try:
            self._lease.acquire(self.uri)
            # A request to stop that was made to an earlier driver must not stop the new runs.
            remove_file(self._storage_path.joinpath(INTERRUPT_FILE))
            self._fetch()
        except OSError as error:
            raise PlanError(f"{self.uri} cannot be used: {format_error(error)}.") from None

    def _fetch(self) -> None:
        """Fetch what is newer in storage, and mark the local folder as the one with the newest statuses."""
        folder = self._plan.folder
        folder.mkdir(parents=True, exist_ok=True)
        _fetch_results(self._storage_path, folder)
        # Only now: if the fetch had failed after the mark, older statuses here would pass for the newest.
        write_text(folder / f".{LAST_DRIVER}", self._lease.id)
        put_bytes(self._storage_path.joinpath(LAST_DRIVER), self._lease.id.encode())

    def _run_sync_loop(self, stop_event: threading.Event) -> None:
        """Body of the thread: pass on a request to stop at once, and sync everything else every REFRESH_S seconds."""
        elapsed_s, is_interrupt_sent = 0.0, False
        while not stop_event.wait(_POLL_S):
            elapsed_s += _POLL_S
            with suppress(OSError, StorageError):  # a storage that does not answer is tried again in the next round
                if self._interrupt.is_requested and not is_interrupt_sent:
                    put_bytes(self._storage_path.joinpath(INTERRUPT_FILE), b"")
                    is_interrupt_sent = True
                if elapsed_s >= REFRESH_S:
                    elapsed_s = 0.0
                    self._refresh_lease()
                    # Without patience: a wait of minutes for a copy would let the lease become stale.
                    self.pull(patience=0.0)
                    self._push_files(patience=0.0)

    def _refresh_lease(self) -> None:
        """Refresh the lease. If another driver has taken over the study, stop it here: both would write its files."""
        new_holder = self._lease.find_new_holder()
        if new_holder is None:
            self._lease.refresh()
        elif not self._interrupt.is_requested:
            self._log(f"{new_holder} has taken over this study: stopping.")
            self._interrupt.request()

    def pull(self, run_id: str | None = None, patience: float | None = None) -> None:
        """Fetch the rows of a run, or of all runs if `run_id` is None.

        patience: seconds to wait for a storage that does not answer; None for trainer.disk_patience. After that the
        error is ignored, since the rows stay in storage and are fetched later.
        """
        prefix = "runs/" if run_id is None else f"runs/{run_id}/"

        def fetch_rows() -> None:
            with self._lock:
                _fetch_rows(self._storage_path, list_files(self._storage_path), self._plan.folder, prefix)

        with suppress(StorageError):
            self._retry(fetch_rows, patience)

    def add_runs(self, plan: StudyPlan) -> None:
        """Copy the files of the runs of `plan` from now on: a plan of the same study with more runs."""
        self._plan = plan

    def push(self, is_driver: bool = True) -> str:
        """Copy study.json, statuses, logs, tables and report to storage; return an error text, empty without an error.

        is_driver: False for a process that did not run the study and copies only tables, report and probes.
        """
        try:
            self._push_files(patience=None, is_driver=is_driver)
        except StorageError as error:
            return (
                f"Statuses, tables and report could not be copied to {self.uri}: {error} They are in "
                f"{self._plan.folder}: copy them with `{format_command('report', self._plan.folder)}`."
            )
        return ""

    def _push_files(self, patience: float | None, is_driver: bool = True) -> None:
        for name, path in list_driver_files(self._plan, is_driver).items():
            self._retry(partial(self._push_file, name, path), patience)

    def _push_file(self, name: str, path: Path) -> None:
        """Copy a file if it has changed since the last copy. A file that is just being replaced is copied next time."""
        with self._lock, suppress(FileNotFoundError):
            stat = path.stat()
            # A replaced file has another inode; one that was appended to has another size and time.
            fingerprint = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._pushed_stats.get(name) != fingerprint:
                put_file(self._storage_path.joinpath(name), path)
                self._pushed_stats[name] = fingerprint

    def _retry(self, action: Callable[[], None], patience: float | None) -> None:
        """Call `action`, and again for `patience` seconds (None: trainer.disk_patience) while the storage fails."""
        patience_s = self._plan.base_config.trainer.disk_patience if patience is None else patience
        call_storage(action, patience_s, self._log if patience_s else _discard, lambda: self._interrupt.is_requested)


def _discard(text: str) -> None:
    """Drop a message of an operation that is repeated every few seconds, since these would fill the log."""


def list_driver_files(plan: StudyPlan, is_driver: bool = True) -> dict[str, Path]:
    """The local paths of the files that the driver writes, by name in storage.

    study.json comes last, so that the other files exist when it appears. is_driver: False for tables, report and probes
    only.
    """
    folder = plan.folder
    result_paths = [*folder.glob("*.parquet"), folder / "report.html", *folder.glob("figures/**/*")]
    # Statuses that another process has fetched may be older than those in storage, and must not be copied back.
    file_names = STUDY_FILES if is_driver else (PROBES_FILE,)
    result_paths += [plan.get_run_dir(spec.run_id) / name for spec in plan.runs for name in file_names]
    if not is_driver:
        return {path.relative_to(folder).as_posix(): path for path in result_paths if path.is_file()}
    log_paths = [plan.summary_log, *(plan.output / spec.log_path for spec in plan.runs)]
    named_paths = {path.relative_to(plan.output).as_posix(): path for path in log_paths}
    named_paths |= {path.relative_to(folder).as_posix(): path for path in [*result_paths, folder / STUDY_FILE]}
    return {name: path for name, path in named_paths.items() if path.is_file()}


def push_results(plan: StudyPlan) -> str:
    """Copy the files of a report or a probe to the study's storage; return an error text, empty without an error.

    If the newest driver ran in this folder, all of its files are copied. Fetched statuses are never copied back, since
    they may be outdated.
    """
    if plan.study_uri is None:
        return ""
    stored_study = StoredStudy(plan, make_interrupt(plan.folder), _discard)
    try:
        return stored_study.push(is_newest_folder(plan.study_uri, plan.folder))
    except PlanError as error:
        return str(error)

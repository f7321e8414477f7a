"""A study's folder in storage, as its driver keeps it: rows come from there, statuses, tables and report go there.

Data flow: a run writes rows and states on its node and copies them to storage (`trainable.storage.mirror`). The driver
has a folder of its own, results/<run>, with copies of the rows (never of states), from which everything else is made.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainable.runs.failures import StorageError
from trainable.runs.run_files import PROBES
from trainable.storage.mirror import INTERRUPT, STUDYS, fetch_lines, fetch_sealed, line_files, patiently, sealed
from trainable.storage.remote import (
    Place,
    exists,
    get_bytes,
    get_file,
    listing,
    open_place,
    plain,
    put_bytes,
    put_file,
    remove_file,
)
from trainable.storage.uris import below
from tune_study.folder.lease import REFRESH_S, Hold, read_holder
from tune_study.host.interrupt import Interrupt, interrupt_of
from tune_study.plan.study_plan import PlanError, StudyPlan

STUDY, LAST = "study.json", "last-driver"
"""LAST: the id of the newest driver, in storage and, hidden, in the folder that it ran in."""
_LOOK_S = 1.0
_CHECK = "tune_study-was-here"


def opened(uri: str) -> Place:
    """The folder that a URI names; PlanError where it cannot be used."""
    try:
        return open_place(uri)
    except StorageError as error:
        raise PlanError(str(error)) from None


def _unreadable(uri: str, error: OSError) -> PlanError:
    return PlanError(f"{uri} cannot be read: {plain(error)}. Check the name, and the credentials.")


def check_storage(uri: str) -> None:
    """PlanError unless a file can be written, read and removed below `uri`."""
    marker = opened(uri).at(_CHECK)
    try:
        put_bytes(marker, b"tune_study")
        if get_bytes(marker) != b"tune_study":
            raise OSError("what was written is not what is read")
        remove_file(marker)
    except OSError as error:
        raise PlanError(
            f"--storage {uri} cannot be used: {plain(error)}. Check that the bucket or folder is there, that this "
            f"machine reaches it, and the credentials in the environment."
        ) from None


def fetch_study(uri: str, folder: Path) -> bool:
    """Copy study.json and every run.json of the study at `uri` into `folder`; whether there is a study."""
    place = opened(uri)
    try:
        files = listing(place)
        for name in [name for name in files if name == STUDY or name.endswith("/run.json")]:
            get_file(place.at(name), folder / name)
    except OSError as error:
        raise _unreadable(uri, error) from None
    return STUDY in files


def fetch_whole(uri: str, folder: Path) -> None:
    """Copy all that the study at `uri` has but states into `folder`, results/<run>, and its logs beside; PlanError.

    Where the newest driver ran in `folder`, only rows: what drivers write is newer there.
    """
    try:
        _fetch_all(opened(uri), folder)
    except OSError as error:
        raise _unreadable(uri, error) from None


def is_run(uri: str) -> bool:
    """Whether a driver runs the study at `uri` now."""
    with suppress(OSError):
        holder = read_holder(opened(uri))
        return holder is not None and not holder.is_gone
    return False


def is_newest(uri: str, folder: Path) -> bool:
    """Whether the newest driver of the study at `uri` ran in `folder`, whose statuses are then the newest too.

    Also where nobody has run it yet. PlanError where it cannot be read.
    """
    try:
        return _is_newest(opened(uri), folder)
    except OSError as error:
        raise _unreadable(uri, error) from None


def _is_newest(place: Place, folder: Path) -> bool:
    if not exists(place.at(LAST)):
        return True
    own = folder / f".{LAST}"
    return own.exists() and own.read_bytes() == get_bytes(place.at(LAST))


def _fetch_all(place: Place, folder: Path) -> None:
    files = listing(place)
    if not _is_newest(place, folder):
        _fetch_own(place, files, folder)
    _fetch_rows(place, files, folder)


def _fetch_own(place: Place, files: Mapping[str, Any], folder: Path) -> None:
    """Copy what drivers wrote."""
    for name in files:
        first, last = name.split("/")[0], name.split("/")[-1]
        if name == STUDY or (first == "runs" and last in STUDYS):
            get_file(place.at(name), folder / name)
        elif first == "logs":
            get_file(place.at(name), folder.parent.parent / name)


def _fetch_rows(place: Place, files: Mapping[str, Any], folder: Path, below_only: str = "runs/") -> None:
    """Copy what runs wrote since: their files of lines."""
    for name, size in line_files({name: info.size for name, info in files.items()}).items():
        if name.startswith(below_only):
            fetch_lines(place.at(name), size, folder / name)


def checkpoints(uri: str, run_id: str) -> dict[int, str]:
    """Whole checkpoints of a run of the study at `uri`: step -> path below the run's folder; PlanError."""
    try:
        return dict(reversed(sealed(listing(opened(uri).at(f"runs/{run_id}")))))
    except OSError as error:
        raise _unreadable(uri, error) from None


def fetch_checkpoint(uri: str, run_id: str, name: str, folder: Path) -> None:
    """Copy the checkpoint `name` of a run to `folder`; PlanError where it cannot be had whole."""
    try:
        is_whole = fetch_sealed(opened(uri).at(f"runs/{run_id}/{name}"), folder)
    except OSError as error:
        raise PlanError(f"{name} of {run_id} cannot be copied from {uri}: {plain(error)}.") from None
    if not is_whole:
        raise PlanError(f"{name} of {run_id} is damaged in {uri}: type another --checkpoint-step.")


class StoredStudy:
    """The study's folder in storage, kept up to date while a driver runs it.

    say: told when another driver has taken the study over. interrupt: handed on to the runs, which may be anywhere.
    """

    def __init__(self, plan: StudyPlan, interrupt: Interrupt, say: Callable[[str], None]) -> None:
        assert plan.storage is not None
        self.uri = below(plan.storage, plan.run)
        self._plan = plan
        self._interrupt = interrupt
        self._say = say
        self._place = opened(self.uri)
        self._hold = Hold(self._place)
        self._pushed: dict[str, tuple[int, int, int]] = {}
        self._turn = threading.Lock()  # one at a time reads or writes the driver's copies

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Hold the study, fetch what is newer there, and keep both sides up to date during the body; PlanError."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._keep_up, args=(is_over,), name="storage", daemon=True)
        try:
            self._begin()
            thread.start()
            yield
        finally:
            is_over.set()
            if thread.ident is not None:
                thread.join()
            with suppress(OSError):
                self._hold.release()

    def _begin(self) -> None:
        """Hold the study and fetch what is newer there; PlanError."""
        try:
            self._hold.take(self.uri)
            remove_file(self._place.at(INTERRUPT))
            self._fetch()
        except OSError as error:
            raise PlanError(f"{self.uri} cannot be used: {plain(error)}.") from None

    def _fetch(self) -> None:
        folder = self._plan.folder
        folder.mkdir(parents=True, exist_ok=True)
        _fetch_all(self._place, folder)
        (folder / f".{LAST}").write_text(self._hold.id, encoding="utf-8")
        put_bytes(self._place.at(LAST), self._hold.id.encode())

    def _keep_up(self, is_over: threading.Event) -> None:
        seconds, is_asked = 0.0, False
        while not is_over.wait(_LOOK_S):
            seconds += _LOOK_S
            with suppress(OSError, StorageError):  # a storage that does not answer now is asked again
                if self._interrupt.is_requested and not is_asked:
                    put_bytes(self._place.at(INTERRUPT), b"")
                    is_asked = True
                if seconds >= REFRESH_S:
                    seconds = 0.0
                    self._refresh()
                    self.pull(patience=0.0)
                    self._push(patience=0.0)

    def _refresh(self) -> None:
        """Refresh the hold, or stop the study where another driver has taken it: both would write its files."""
        other = self._hold.taken_by()
        if other is None:
            self._hold.refresh()
        elif not self._interrupt.is_requested:
            self._say(f"{other} runs this study now: stopping.")
            self._interrupt.request()

    def pull(self, run_id: str | None = None, patience: float | None = None) -> None:
        """Have the rows of a run, or of all, here; nothing is raised: rows that cannot be had now are had later."""
        only = "runs/" if run_id is None else f"runs/{run_id}/"

        def work() -> None:
            with self._turn:
                _fetch_rows(self._place, listing(self._place), self._plan.folder, only)

        with suppress(StorageError):
            self._patiently(work, patience)

    def push(self, is_driver: bool = True) -> str:
        """Copy study.json, statuses, logs, tables and report to storage; what went wrong, or nothing.

        is_driver: False for whoever made tables, report and probes of a study that was run elsewhere: these only.
        """
        try:
            self._push(None, is_driver)
        except StorageError as error:
            return (
                f"Statuses, tables and report could not be copied to {self.uri}: {error} They are in "
                f"{self._plan.folder}: copy them with `python -m tune_study report {self._plan.folder}`."
            )
        return ""

    def _push(self, patience: float | None, is_driver: bool = True) -> None:
        for name, path in own_files(self._plan, is_driver).items():
            self._patiently(partial(self._push_file, name, path), patience)

    def _push_file(self, name: str, path: Path) -> None:
        """Copy a file that has changed since it was copied; one that is being written anew comes next time."""
        with self._turn, suppress(FileNotFoundError):
            stat = path.stat()
            found = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._pushed.get(name) != found:
                put_file(self._place.at(name), path)
                self._pushed[name] = found

    def _patiently(self, work: Callable[[], None], patience: float | None) -> None:
        wait = self._plan.base.trainer.disk_patience if patience is None else patience
        patiently(work, wait, self._say if wait else _to_nobody, lambda: self._interrupt.is_requested)


def _to_nobody(text: str) -> None:
    """What is tried again every few seconds need not be told."""


def own_files(plan: StudyPlan, is_driver: bool = True) -> dict[str, Path]:
    """What the driver writes, by its name in storage; study.json, which tells that there is more, last.

    is_driver: False for tables, report and probes alone.
    """
    folder = plan.folder
    found = [*folder.glob("*.parquet"), folder / "report.html", *folder.glob("figures/**/*")]
    names = STUDYS if is_driver else (PROBES,)
    found += [plan.run_dir(spec.run_id) / name for spec in plan.runs for name in names]
    if not is_driver:
        return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    logs = [plan.summary_log, *(plan.output / spec.log for spec in plan.runs)]
    named = {path.relative_to(plan.output).as_posix(): path for path in logs}
    named |= {path.relative_to(folder).as_posix(): path for path in [*found, folder / STUDY]}
    return {name: path for name, path in named.items() if path.is_file()}


def copy_up(plan: StudyPlan) -> str:
    """Copy what a report or a probe made to the study's storage, and all else if this folder's driver was its last.

    What went wrong, or nothing. Statuses that were fetched are never copied back: they may be old by now.
    """
    if plan.stored is None:
        return ""
    stored = StoredStudy(plan, interrupt_of(plan.folder), _to_nobody)
    try:
        return stored.push(is_newest(plan.stored, plan.folder))
    except PlanError as error:
        return str(error)

"""What the driver looks at between two events: are Ray's own processes alive, is there room on the disks it writes."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ray import tune

from tune_study.host.interrupt import Interrupt

DAEMON_NAMES = ("raylet", "gcs_server")
MIN_FREE_BYTES = 8_000_000
"""Bytes on a disk below which the driver waits: Ray Tune's own writers raise on a full disk, and end the study."""

_CHECK_INTERVAL_S = 2.0
_WAIT_INTERVAL_S = 0.5


class Daemon(NamedTuple):
    """One of Ray's processes."""

    name: str
    process: psutil.Process


def find_ray_daemons() -> tuple[Daemon, ...]:
    """Ray's processes that this one has started."""
    children = psutil.Process().children()
    return tuple(Daemon(name, child) for child in children for name in DAEMON_NAMES if name in _read_command(child))


def _read_command(process: psutil.Process) -> str:
    try:
        return Path((process.cmdline() or [""])[0]).name
    except psutil.Error:
        return ""


def has_exited(daemon: Daemon) -> bool:
    """Whether the process has ended."""
    try:
        return not daemon.process.is_running() or daemon.process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_children() -> None:
    """End every process that this one has started, and what those have started, by their ids."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


@contextmanager
def watch_daemons(daemons: Sequence[Daemon], on_daemon_lost: Callable[[str], None]) -> Iterator[None]:
    """While the body runs, a thread sees whether all of `daemons` live, and calls `last_will` once one does not.

    A thread, since without them Ray's own calls, in which this process is then stuck, do not come back. last_will is
    told what is gone, and is to end this process.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_CHECK_INTERVAL_S):
            lost_messages = [
                f"Ray's process {daemon.name} ({daemon.process.pid}) is gone"
                for daemon in daemons
                if has_exited(daemon)
            ]
            if lost_messages:
                on_daemon_lost(lost_messages[0])
                return

    thread = threading.Thread(target=watch, name="ray-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class DiskSpaceGuard(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Called by Tune at each turn of its loop, which it holds while a disk is full.

    folders: where the driver and Ray write. patience: seconds to wait for room (trainer.disk_patience), during which
    Tune handles nothing, so that nothing of it fails; the runs wait by themselves. say: told when that begins and ends.
    """

    def __init__(
        self, folders: Sequence[Path], patience: float, interrupt: Interrupt, notify: Callable[[str], None]
    ) -> None:
        self._folders = tuple(folders)
        self._patience = patience
        self._interrupt = interrupt
        self._notify = notify
        self._next_check = 0.0
        self._has_given_up = False  # once patience is over, what fails may fail; until there has been room again

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Look, every few seconds."""
        if time.monotonic() < self._next_check:
            return
        self._wait_for_space()
        self._next_check = time.monotonic() + _CHECK_INTERVAL_S

    def _wait_for_space(self) -> None:
        full_folders = self._find_full_folders()
        if not full_folders or self._has_given_up:
            self._has_given_up = bool(full_folders)
            return
        self._notify(f"The disk of {full_folders[0]} is full: waiting up to {self._patience:g} s for room.")
        deadline = time.monotonic() + self._patience
        while self._find_full_folders() and time.monotonic() < deadline and not self._interrupt.is_requested:
            time.sleep(_WAIT_INTERVAL_S)
        self._has_given_up = bool(self._find_full_folders())
        self._notify("There is still no room." if self._has_given_up else "There is room again.")

    def _find_full_folders(self) -> list[Path]:
        return [
            folder for folder in self._folders if folder.exists() and shutil.disk_usage(folder).free < MIN_FREE_BYTES
        ]

"""Watch Ray's own processes and the free disk space while a study runs."""

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
"""Executables of Ray's agent on a machine and of its control server. If one exits, calls to Ray never return."""

MIN_FREE_BYTES = 8_000_000
"""With fewer free bytes on a disk the driver waits, because Ray Tune ends the study if it cannot write its files."""

_CHECK_INTERVAL_S = 2.0
"""Seconds between two checks of daemons or disks."""
_WAIT_INTERVAL_S = 0.5
"""Seconds between two checks of a full disk, and the maximum delay until the waiting driver sees a Ctrl-C."""


class Daemon(NamedTuple):
    """One of Ray's processes."""

    name: str
    process: psutil.Process


def find_ray_daemons() -> tuple[Daemon, ...]:
    """Find the processes called DAEMON_NAMES that this process has started, which excludes another study's Ray."""
    daemons = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has exited
            command = Path((child.cmdline() or [""])[0]).name
            daemons += [Daemon(name, child) for name in DAEMON_NAMES if name in command]
    return tuple(daemons)


def has_exited(daemon: Daemon) -> bool:
    """Check whether the process has exited. psutil still finds zombies, which have exited and wait to be reaped."""
    try:
        return not daemon.process.is_running() or daemon.process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_children() -> None:
    """Kill all child processes of this process, and their children, by their ids.

    Without Ray's daemons, nothing else ends the workers, and a worker that keeps training holds its run's lock.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    # SIGKILL takes effect at once, except during a system call, such as a write to a slow disk.
    psutil.wait_procs(children, timeout=5)


@contextmanager
def watch_daemons(daemons: Sequence[Daemon], on_daemon_lost: Callable[[str], None]) -> Iterator[None]:
    """During the body, check in a thread that all `daemons` are alive; call `on_daemon_lost` if one has exited.

    The main thread is then stuck in a call to Ray. on_daemon_lost: called with a message; must end this process.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_CHECK_INTERVAL_S):
            for daemon in filter(has_exited, daemons):
                on_daemon_lost(f"Ray's process {daemon.name} ({daemon.process.pid}) has exited")
                return  # the other daemon follows, and one message is enough

    thread = threading.Thread(target=watch, name="ray-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class StatelessCallback(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """A callback whose pickle is empty, since Tune pickles its callbacks into the results.

    The state of our callbacks is already on disk, or cannot be pickled, such as a thread.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return no state."""
        return {}


class DiskSpaceGuard(StatelessCallback):
    """A callback that blocks Tune's event loop while a disk is full.

    While the loop is blocked, Tune processes no result and writes no file, so no failed write can end the study. Runs
    are separate processes and wait for disk space by themselves.

    folders: where the driver and Ray write. patience: seconds to wait (trainer.disk_patience). notify: called with a
    message when the wait begins and when it ends.
    """

    def __init__(
        self, folders: Sequence[Path], patience: float, interrupt: Interrupt, notify: Callable[[str], None]
    ) -> None:
        self._folders, self._patience, self._interrupt, self._notify = tuple(folders), patience, interrupt, notify
        self._next_check = 0.0
        # True after `patience`, when the study continues and writes may fail. It stays true while the disk is full, or
        # every iteration of Tune's loop would wait again.
        self._has_given_up = False

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Check the disks every few seconds; Tune calls this in every iteration of its loop."""
        if time.monotonic() < self._next_check:  # the loop has many iterations per second
            return
        full_folders = self._find_full_folders()
        if full_folders and not self._has_given_up:
            self._notify(f"The disk of {full_folders[0]} is full: waiting up to {self._patience:g} s for disk space.")
            # Ctrl-C ends the wait, because runs can end only in Tune's loop, which is blocked here.
            deadline = time.monotonic() + self._patience
            while self._find_full_folders() and time.monotonic() < deadline and not self._interrupt.is_requested:
                time.sleep(_WAIT_INTERVAL_S)
            full_folders = self._find_full_folders()
            self._notify("The disk is still full." if full_folders else "Disk space is available again.")
        self._has_given_up = bool(full_folders)
        self._next_check = time.monotonic() + _CHECK_INTERVAL_S

    def _find_full_folders(self) -> list[Path]:
        # The disk of a folder that does not exist yet cannot be measured.
        return [
            folder for folder in self._folders if folder.exists() and shutil.disk_usage(folder).free < MIN_FREE_BYTES
        ]

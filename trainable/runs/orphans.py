"""Find and terminate orphan processes: a run started them, and they outlived it.

An orphan is found by a mark in its environment and terminated by its process id.
"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from trainable.files.run_marks import DIGESTS_ENV, MARK_ENV, compute_digest

_DRIVER_PREFIX = "driver "
_TERMINATE_TIMEOUT_S = 5.0
"""Seconds that an orphan has to exit after SIGTERM, and again after SIGKILL."""


def make_ray_mark(folders: Iterable[Path]) -> str:
    """The value of MARK_ENV for the processes that Ray starts: the folders of all studies, and this driver's identity.

    One Ray serves a suite of studies, and another driver may start one of these studies at the same time. Such a driver
    must not terminate processes that still serve this one, so they are orphans only once this driver has exited.
    """
    current_process = psutil.Process()
    # The creation time is a part of the identity, because the system reuses process ids.
    return "\n".join([*map(str, folders), f"{_DRIVER_PREFIX}{current_process.pid} {current_process.create_time()}"])


def terminate_orphans(folder: Path) -> list[str]:
    """Terminate the orphan processes of the runs in `folder`; return a description of each, "<pid> (<name>)".

    Orphan processes are the processes of this user whose mark names `folder` or a folder below it, or has its digest.
    Call this function only if none of those runs is under way. Ray kills the process group of a killed trial, but a
    child in a session of its own (an engine, a server) survives and may occupy a GPU. A process that was forked without
    exec shows the environment with which its parent was started, so it has no mark and is not found.
    """
    orphans = find_orphans(folder)
    # The names are read first, because a process that has exited has none.
    descriptions = [f"{process.pid} ({_read_process_name(process)})" for process in orphans]
    for process in orphans:
        _send_signal(process, signal.SIGTERM)
    _, survivors = psutil.wait_procs(orphans, timeout=_TERMINATE_TIMEOUT_S)
    for process in survivors:
        _send_signal(process, signal.SIGKILL)
    psutil.wait_procs(survivors, timeout=_TERMINATE_TIMEOUT_S)
    return descriptions


def find_orphans(folder: Path) -> list[psutil.Process]:
    """The processes that `terminate_orphans` would terminate."""
    return [process for process in psutil.process_iter() if _belongs_to(process, folder)]


def _belongs_to(process: psutil.Process, folder: Path) -> bool:
    """Whether the mark of `process` names `folder` or a folder below it, and no driver in the mark is alive."""
    if process.pid == os.getpid():  # a trial has the mark of its own run
        return False
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False  # the process belongs to another user, or has exited
    if compute_digest(folder) in environment.get(DIGESTS_ENV, "").split():
        return True
    mark_lines = environment.get(MARK_ENV, "").split("\n")
    drivers = [line.removeprefix(_DRIVER_PREFIX) for line in mark_lines if line.startswith(_DRIVER_PREFIX)]
    folders = [Path(line) for line in mark_lines if line.startswith("/")]
    is_marked = any(folder in (marked_folder, *marked_folder.parents) for marked_folder in folders)
    return is_marked and not any(map(_is_driver_alive, drivers))


def _is_driver_alive(driver: str) -> bool:
    """Whether the driver "<pid> <creation time>" is alive. The id alone is not enough, because the system reuses it."""
    pid, _, creation_time = driver.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == creation_time
    except psutil.NoSuchProcess:
        return False


def _send_signal(process: psutil.Process, signal_number: signal.Signals) -> None:
    with suppress(psutil.Error):  # the process has exited, or belongs to another user
        process.send_signal(signal_number)


def _read_process_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"  # the process has exited since it was listed

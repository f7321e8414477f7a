"""Processes that a run started and that outlived it: found by a mark in their environment, and ended by their id."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK_ENV = "TUNE_STUDY_RUN_DIR"
"""Set in the process of a run to the run's folder, and in what Ray starts to what `make_ray_mark` says; whatever such a
process starts inherits it."""

_DRIVER_PREFIX = "driver "
_TERMINATE_TIMEOUT_S = 5.0


def make_ray_mark(folders: Iterable[Path]) -> str:
    """The value of MARK for what Ray starts for this process: the folders of all studies, and whose it is.

    Ray serves a suite of studies, of which another process may run one meanwhile: it is left over once this process is
    gone, and not before.
    """
    current_process = psutil.Process()
    return "\n".join([*map(str, folders), f"{_DRIVER_PREFIX}{current_process.pid} {current_process.create_time()}"])


def terminate_orphans(folder: Path) -> list[str]:
    """End every process of this user whose mark names `folder` or a folder below it; what they were, as text.

    Only for a folder whose runs are known not to be under way. A process that dies hard takes along what is in its
    process group; a child with a session of its own (an engine, a server) is what stays behind, and may hold a GPU.
    A process that was forked without being started anew shows the environment of its parent's start and is not found.
    """
    orphans = find_orphans(folder)
    descriptions = [f"{process.pid} ({_read_process_name(process)})" for process in orphans]
    for process in orphans:
        _send_signal(process, signal.SIGTERM)
    _, survivors = psutil.wait_procs(orphans, timeout=_TERMINATE_TIMEOUT_S)
    for process in survivors:
        _send_signal(process, signal.SIGKILL)
    psutil.wait_procs(survivors, timeout=_TERMINATE_TIMEOUT_S)
    return descriptions


def find_orphans(folder: Path) -> list[psutil.Process]:
    """The processes that `end_leftovers` would end."""
    return [process for process in psutil.process_iter() if _belongs_to(process, folder)]


def _belongs_to(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        mark_lines = process.environ().get(MARK_ENV, "").split("\n")
    except (psutil.Error, OSError):
        return False  # of another user, or gone
    drivers = [line.removeprefix(_DRIVER_PREFIX) for line in mark_lines if line.startswith(_DRIVER_PREFIX)]
    folders = [Path(line) for line in mark_lines if line.startswith("/")]
    return any(folder in (one, *one.parents) for one in folders) and not any(map(_is_driver_alive, drivers))


def _is_driver_alive(driver: str) -> bool:
    """Whether the process with that id and time of creation is there."""
    pid, _, creation_time = driver.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == creation_time
    except psutil.NoSuchProcess:
        return False


def _send_signal(process: psutil.Process, signal_number: signal.Signals) -> None:
    with suppress(psutil.Error):  # gone by itself, or not ours to end
        process.send_signal(signal_number)


def _read_process_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"

"""Processes that a run started and that outlived it: found by a mark in their environment, and ended by their id."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "TUNE_STUDY_RUN_DIR"
"""Set in the process of a run to the run's folder, and in what Ray starts to what `ray_mark` says; whatever such a
process starts inherits it."""

_DRIVER = "driver "
_PATIENCE_S = 5.0


def ray_mark(folders: Iterable[Path]) -> str:
    """The value of MARK for what Ray starts for this process: the folders of all studies, and whose it is.

    Ray serves a suite of studies, of which another process may run one meanwhile: it is left over once this process is
    gone, and not before.
    """
    me = psutil.Process()
    return "\n".join([*map(str, folders), f"{_DRIVER}{me.pid} {me.create_time()}"])


def end_leftovers(folder: Path) -> list[str]:
    """End every process of this user whose mark names `folder` or a folder below it; what they were, as text.

    Only for a folder whose runs are known not to be under way. A process that dies hard takes along what is in its
    process group; a child with a session of its own (an engine, a server) is what stays behind, and may hold a GPU.
    A process that was forked without being started anew shows the environment of its parent's start and is not found.
    """
    found = leftovers(folder)
    named = [f"{process.pid} ({_name(process)})" for process in found]
    for process in found:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(found, timeout=_PATIENCE_S)
    for process in alive:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_PATIENCE_S)
    return named


def leftovers(folder: Path) -> list[psutil.Process]:
    """The processes that `end_leftovers` would end."""
    return [process for process in psutil.process_iter() if _is_of(process, folder)]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        marked = process.environ().get(MARK, "").split("\n")
    except (psutil.Error, OSError):
        return False  # of another user, or gone
    drivers = [line.removeprefix(_DRIVER) for line in marked if line.startswith(_DRIVER)]
    folders = [Path(line) for line in marked if line.startswith("/")]
    return any(folder in (one, *one.parents) for one in folders) and not any(map(_is_alive, drivers))


def _is_alive(driver: str) -> bool:
    """Whether the process with that id and time of creation is there."""
    pid, _, created = driver.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == created
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.Error):  # gone by itself, or not ours to end
        process.send_signal(number)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"

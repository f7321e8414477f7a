"""Find orphan processes, which a run started and which outlived it, and terminate them.

They are found by a mark in their environment and terminated by their process id.
"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK_ENV = "TUNE_STUDY_RUN_DIR"
"""Environment variable with the mark, which child processes inherit.

It is the run's folder in the process of a run, and the value of `make_ray_mark` in the processes that Ray starts.
"""

_DRIVER_PREFIX = "driver "
_TERMINATE_TIMEOUT_S = 5.0


def make_ray_mark(folders: Iterable[Path]) -> str:
    """The value of MARK_ENV for the processes that Ray starts: the folders of all studies, and this driver's identity.

    One Ray serves a suite of studies, and another driver may run one of them in the meantime. Ray's processes are
    therefore orphans only once this driver has exited.
    """
    current_process = psutil.Process()
    return "\n".join([*map(str, folders), f"{_DRIVER_PREFIX}{current_process.pid} {current_process.create_time()}"])


def terminate_orphans(folder: Path) -> list[str]:
    """Terminate every process of this user whose mark names `folder` or a folder below it; return descriptions.

    Call it only for a folder whose runs are known not to be running. When a process is killed, its process group dies
    with it, but a child in its own session (an engine, a server) survives and may occupy a GPU. A process that was
    forked without exec shows the environment in which its parent was started, so it is not found.
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
    """The processes that `terminate_orphans` would terminate."""
    return [process for process in psutil.process_iter() if _belongs_to(process, folder)]


def _belongs_to(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        mark_lines = process.environ().get(MARK_ENV, "").split("\n")
    except (psutil.Error, OSError):
        return False  # it belongs to another user, or has exited
    drivers = [line.removeprefix(_DRIVER_PREFIX) for line in mark_lines if line.startswith(_DRIVER_PREFIX)]
    folders = [Path(line) for line in mark_lines if line.startswith("/")]
    is_marked = any(folder in (marked_folder, *marked_folder.parents) for marked_folder in folders)
    return is_marked and not any(map(_is_driver_alive, drivers))


def _is_driver_alive(driver: str) -> bool:
    """Whether the driver still runs: the id alone does not tell, because the system reuses it."""
    pid, _, creation_time = driver.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == creation_time
    except psutil.NoSuchProcess:
        return False


def _send_signal(process: psutil.Process, signal_number: signal.Signals) -> None:
    with suppress(psutil.Error):  # it has exited, or belongs to another user
        process.send_signal(signal_number)


def _read_process_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"

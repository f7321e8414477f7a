"""Find and terminate orphans: processes that a run started and that outlived it.

Orphans are found by a mark in their environment, and terminated by process id.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK_ENV = "TUNE_STUDY_RUN_DIR"
"""Environment variable with the mark, which child processes inherit.

In the process of a run, the mark is the run's folder; in processes that Ray starts, it is from `make_ray_mark`.
"""
_DRIVER_PREFIX = "driver "
_TERMINATE_TIMEOUT_S = 5.0
"""Seconds that an orphan has to exit after SIGTERM, and again after SIGKILL."""


def make_ray_mark(folders: Iterable[Path]) -> str:
    """Make the value of MARK_ENV for Ray's processes: the folders of all studies, and the identity of this driver.

    One Ray serves a suite of studies, and another driver may start one of them at the same time. It must not terminate
    processes that still serve this driver, so they are orphans only after this driver has exited.
    """
    current_process = psutil.Process()
    # With the creation time, because the system reuses process ids.
    return "\n".join([*map(str, folders), f"{_DRIVER_PREFIX}{current_process.pid} {current_process.create_time()}"])


def terminate_orphans(folder: Path) -> list[str]:
    """Terminate the orphans of the runs in `folder`. Return a description of each, "<pid> (<name>)".

    Orphans are this user's processes whose mark names `folder` or a folder below it. Call this only if none of these
    runs is training. Ray kills the process group of a killed trial, but a child in a separate session (an engine, a
    server) survives and may occupy a GPU. Processes forked without exec have the environment of their parent's start,
    so they have no mark and are not found.
    """
    orphans, descriptions = find_orphans(folder), list[str]()
    for process in orphans:
        with suppress(psutil.Error):  # it has exited since it was listed
            descriptions.append(f"{process.pid} ({process.name()})")
            process.terminate()
    _, survivors = psutil.wait_procs(orphans, timeout=_TERMINATE_TIMEOUT_S)
    for process in survivors:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(survivors, timeout=_TERMINATE_TIMEOUT_S)
    return descriptions


def find_orphans(folder: Path) -> list[psutil.Process]:
    """Find the processes that `terminate_orphans` would terminate."""
    return [process for process in psutil.process_iter() if _belongs_to(process, folder)]


def _belongs_to(process: psutil.Process, folder: Path) -> bool:
    """Check whether the mark of `process` names `folder` or a folder below it, and no driver in the mark is alive."""
    if process.pid == os.getpid():  # this process may be a trial, with the mark of its run
        return False
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False  # the process belongs to another user, or has exited
    mark_lines = environment.get(MARK_ENV, "").split("\n")
    drivers = [line.removeprefix(_DRIVER_PREFIX) for line in mark_lines if line.startswith(_DRIVER_PREFIX)]
    folders = [Path(line) for line in mark_lines if line.startswith("/")]
    is_marked = any(folder in (marked_folder, *marked_folder.parents) for marked_folder in folders)
    return is_marked and not any(map(_is_driver_alive, drivers))


def _is_driver_alive(driver: str) -> bool:
    """Check whether the driver "<pid> <creation time>" is alive. The system reuses ids, so the time must match."""
    pid, _, creation_time = driver.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == creation_time
    except psutil.NoSuchProcess:
        return False

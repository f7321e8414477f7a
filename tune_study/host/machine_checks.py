"""Measure what this machine has free for runs, and give Ray a private folder for its session files.

Ray 2.60 creates its session folders with mode 0777 in a folder `ray` that all users share. Its logs have mode 0644 and
quote the environment variables of workers, including credentials. In a folder of mode 0700, nobody else can read the
logs or reach Ray's sockets.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from trainable.files.paths import lock_file
from tune_study.host.gpus import query_nvidia_smi

FOLDER_PREFIX = "ts-"
"""Prefix of the folder's name, to which eight characters are added. Short, since socket paths must be short."""

RAY_SUBFOLDER = "r"
"""Name of the folder for Ray inside the session folder."""

_LOCK_FILE = ".lock"
_MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""A socket address has at most 108 bytes (104 on a Mac), including the terminating null byte."""
_LONGEST_SOCKET_NAME = (
    f"/{FOLDER_PREFIX}abcdefgh/{RAY_SUBFOLDER}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""Ray's longest name, with Linux' highest process id, 4194304."""


class GpuMemory(NamedTuple):
    """Memory of one GPU in MiB; None if the driver does not report it."""

    uuid: str
    free_mib: int | None
    total_mib: int | None


class GpuProcess(NamedTuple):
    """A process that uses memory of the GPU `uuid`, in MiB; None if the driver does not report how much."""

    uuid: str
    pid: int
    used_mib: int | None


def measure_available_memory() -> int:
    """Measure the bytes that new processes can allocate, limited by the machine and this process's control groups.

    In a container, psutil reports the machine's memory; the container's limit is in its control group.
    """
    cgroup_free = read_cgroup_free(Path("/sys/fs/cgroup"), _read_text(Path("/proc/self/cgroup")))
    machine_free = int(psutil.virtual_memory().available)
    return machine_free if cgroup_free is None else min(machine_free, cgroup_free)


def read_cgroup_free(root: Path, membership: str) -> int | None:
    """Read how many bytes the control groups of a process still allow it to allocate; None without a limit.

    root: where control groups are mounted. membership: the text of /proc/<pid>/cgroup, of version 1 or 2.
    """
    # A line is `hierarchy:controllers:path`. In version 2 the controllers are empty and all groups share one mount.
    free_bytes = []
    for line in membership.split("\n"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue  # a version 1 hierarchy that limits something else
        mount = root / "memory" if controllers else root
        file_names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        cgroup_folder = mount / path.strip("/")
        # Every group above the process limits it too, and the smallest limit counts.
        for folder in (cgroup_folder, *cgroup_folder.parents):
            limit, usage = (_read_text(folder / name).strip() for name in file_names)
            # A limit may be the word `max`, and the parents of the mount are ordinary folders. The usage includes
            # cached files, and may exceed a limit that has just been lowered.
            if limit.isdecimal() and usage.isdecimal() and folder.is_relative_to(mount):
                # The kernel reclaims cached files when memory is needed. In version 1, only the keys with total_
                # include child groups.
                lines = _read_text(folder / "memory.stat").splitlines()
                memory_stat = dict(line.split(" ", 1) for line in lines if " " in line)
                reclaimable = int(memory_stat.get("total_inactive_file", memory_stat.get("inactive_file", 0)))
                free_bytes.append(max(int(limit) - int(usage) + reclaimable, 0))
    return min(free_bytes, default=None)


def _read_text(path: Path) -> str:
    """Read a text file; return "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def find_ray_folder(environ: Mapping[str, str]) -> Path:
    """Find the folder for Ray's session folder: the one that Ray 2.60 would choose."""
    # Ray reads TMPDIR only on Linux.
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    return Path(os.path.abspath(next((environ[name] for name in names if name in environ), "/tmp")))


def explain_long_path(ray: Path) -> str:
    """Explain that the paths of Ray's sockets below `ray` are too long for the kernel, in bytes; empty if not."""
    length, max_length = len(os.fsencode(ray)), _MAX_SOCKET_PATH_BYTES - len(os.fsencode(_LONGEST_SOCKET_NAME))
    if length <= max_length:
        return ""
    return (
        f"the path {ray} has {length} bytes; at most {max_length} are possible. Type `export RAY_TMPDIR=/tmp`, or "
        "another folder with a short path."
    )


def measure_scratch_space() -> int:
    """Measure the free bytes where trials of a study with a storage write: in Ray's and the temporary folder."""
    folders = find_ray_folder(os.environ), Path(tempfile.gettempdir())
    existing = (next(path for path in (folder, *folder.parents) if path.exists()) for folder in folders)
    return min(shutil.disk_usage(path).free for path in existing)


def query_gpu_memory() -> tuple[GpuMemory, ...]:
    """Ask nvidia-smi for the memory of every GPU of this machine; empty if it reports nothing."""
    rows = query_nvidia_smi("--query-gpu=index,uuid,memory.free,memory.total", 4, number=0) or []
    return tuple(GpuMemory(uuid, _parse_mib(free), _parse_mib(total)) for _, uuid, free, total in rows)


def query_gpu_processes() -> tuple[GpuProcess, ...]:
    """Ask nvidia-smi for the visible processes that use GPU memory."""
    rows = query_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory", 3, number=1) or []
    return tuple(GpuProcess(uuid, int(pid), _parse_mib(used)) for uuid, pid, used in rows)


def _parse_mib(text: str) -> int | None:
    """Parse a number of MiB; None for values like [N/A]."""
    return int(text) if text.isdecimal() else None


def format_processes(processes: Sequence[GpuProcess]) -> str:
    """Format the processes that use a GPU's memory, each with its amount if that is known."""
    sizes = [f" ({process.used_mib / 1024:.1f} GiB)" if process.used_mib else "" for process in processes]
    descriptions = [f"{process.pid}{size}" for process, size in zip(processes, sizes, strict=True)]
    return f"used by PID {', '.join(descriptions)}" if descriptions else "used by processes that are not visible here"


@contextmanager
def make_session_folder(base: Path) -> Iterator[Path]:
    """Yield a folder for Ray inside a new folder of mode 0700 in `base`, and remove both after the body.

    The outer folder is needed because Ray changes the mode of the folder that it gets to 0777. Folders that killed
    drivers left behind are removed first. After an error in the body the folder is kept for its logs until this user
    starts the next study. Raises OSError if no folder can be created.
    """
    remove_abandoned_folders(base)
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))  # of mode 0700
    with (folder / "lock").open("w") as lock:
        lock_file(lock)
        # Locked before it gets its name, so that no other driver considers the folder abandoned.
        Path(lock.name).rename(folder / _LOCK_FILE)
        yield folder / RAY_SUBFOLDER
        # Not in a `finally`: after an error the logs are needed.
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(base: Path) -> None:
    """Remove the folders in `base` whose driver has exited, except links and other users' folders."""
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # removed in the meantime, locked by a live driver, or not readable
            folder_stat = folder.lstat()
            if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
                continue
            lock_descriptor = os.open(folder / _LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                lock_file(lock_descriptor)  # fails while the driver lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_descriptor)

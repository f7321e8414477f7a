"""Detect what this machine has and measure what is free for runs; give Ray a private folder for its session files.

Ray 2.60 creates its session folders with mode 0777 in a folder `ray` that all users share. Its logs have mode 0644 and
quote the environment variables of workers, including credentials. In a folder of mode 0700, nobody else can read the
logs or reach Ray's sockets.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from trainable.files.paths import lock_file

FOLDER_PREFIX, RAY_SUBFOLDER = "ts-", "r"
"""Prefix of the session folder's name, and name of Ray's folder in it. Short, since paths of sockets must be short."""
_LOCK_FILE = ".lock"
_MAX_SOCKET_PATH_BYTES = 107
"""A socket address has at most 108 bytes, including the terminating null byte."""
_LONGEST_SOCKET_NAME = (
    f"/{FOLDER_PREFIX}abcdefgh/{RAY_SUBFOLDER}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""Ray's longest name, with Linux' highest process id, 4194304."""


class Gpu(NamedTuple):
    """One visible GPU."""

    id: str
    """As in CUDA_VISIBLE_DEVICES, an index or a UUID."""
    uuid: str
    """Empty if unknown."""
    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""


def detect_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Detect the GPUs that a process with this environment would see; empty without nvidia-smi.

    CUDA is not loaded, since it would create a context on a GPU and torch takes seconds to import.
    """
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.strip() in ("", "-1"):
        return ()
    rows = query_nvidia_smi("index,uuid,name")
    return select_visible(tuple(Gpu(*row) for row in rows), visible_devices)


def select_visible(gpus: tuple[Gpu, ...], visible_devices: str | None) -> tuple[Gpu, ...]:
    """Select the GPUs that CUDA_VISIBLE_DEVICES names, in its order and, as in CUDA, up to the first unknown entry."""
    if visible_devices is None:
        return gpus
    selected_gpus: list[Gpu] = []
    for entry in (field.strip() for field in visible_devices.split(",")):
        # CUDA accepts an index, or the beginning of a UUID.
        matching_gpus = [gpu for gpu in gpus if entry and (gpu.id == entry or gpu.uuid.startswith(entry))]
        # nvidia-smi does not list MIG devices, so entries MIG-... are accepted unchecked.
        if not matching_gpus and not (gpus and entry.startswith("MIG-")):
            break
        selected_gpus.append(matching_gpus[0]._replace(id=entry) if matching_gpus else Gpu(entry, entry, gpus[0].name))
    return tuple(selected_gpus)


def query_nvidia_smi(fields: str) -> list[list[str]]:
    """Ask nvidia-smi for `fields` of each GPU, of which the first is its index; empty if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",", fields.count(","))] for line in text.splitlines()]
    # Other lines are complaints.
    return [row for row in rows if len(row) > fields.count(",") and row[0].isdecimal()]


def count_cpus() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class GpuMemory(NamedTuple):
    """Memory of one GPU in MiB."""

    free_mib: int
    total_mib: int


def measure_available_memory() -> int:
    """Measure the bytes that new processes can allocate, limited by the machine and this process's control groups.

    In a container, psutil reports the machine's memory; the container's limit is in its control group.
    """
    membership = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    limits = read_cgroup_limits(Path("/sys/fs/cgroup"), membership)
    return min([int(psutil.virtual_memory().available), *limits])


def read_cgroup_limits(root: Path, membership: str) -> list[int]:
    """Read how many bytes each control group of a process still allows it to allocate, of groups with a limit.

    root: where control groups of version 2 are mounted. membership: the text of /proc/<pid>/cgroup.
    """
    free_bytes = []
    for name in (line.removeprefix("0::") for line in membership.splitlines() if line.startswith("0::")):
        group = root / name.strip("/")
        for folder in (group, *group.parents):  # every group above the process limits it, too
            with suppress(OSError, ValueError):  # a group without a limit has the word `max`, and the mount no file
                limit, usage = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
                # The kernel reclaims cached files when memory is needed. The usage includes them, and may exceed a
                # limit that has just been lowered.
                memory_stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
                free_bytes.append(max(limit - usage + int(memory_stat.get("inactive_file", 0)), 0))
    return free_bytes


def find_ray_folder(environ: Mapping[str, str]) -> Path:
    """Find the folder for Ray's session folder: the one that Ray 2.60 would choose."""
    return Path(os.path.abspath(environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp"))))


def explain_long_path(ray: Path) -> str:
    """Explain that the paths of Ray's sockets below `ray` are too long for the kernel, in bytes; empty if not."""
    length, max_length = len(os.fsencode(ray)), _MAX_SOCKET_PATH_BYTES - len(_LONGEST_SOCKET_NAME)
    return f"the path {ray} has {length} bytes; at most {max_length} are possible" if length > max_length else ""


def measure_scratch_space() -> int:
    """Measure the free bytes where trials of a study with a storage write: in Ray's and the temporary folder."""
    folders = find_ray_folder(os.environ), Path(tempfile.gettempdir())
    existing = (next(path for path in (folder, *folder.parents) if path.exists()) for folder in folders)
    return min(shutil.disk_usage(path).free for path in existing)


def query_gpu_memory() -> dict[str, GpuMemory]:
    """Ask nvidia-smi for the memory of the GPUs of this machine, by UUID, without those that it does not report."""
    rows = query_nvidia_smi("index,uuid,memory.free,memory.total")
    return {
        uuid: GpuMemory(int(free), int(total))
        for _, uuid, free, total in rows
        if free.isdecimal() and total.isdecimal()
    }


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

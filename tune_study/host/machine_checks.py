"""Check by trying whether this machine can run a study: memory, files, locks, disk, ports and GPU memory."""

import contextlib
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.files.paths import lock_file
from tune_study.host.gpus import Gpu, count_cpus, run_nvidia_smi
from tune_study.host.session_folder import FOLDER_PREFIX, RAY_SUBFOLDER

_GB = 10**9
# Measured with the laptop preset: the driver and Ray together take 0.9 GB, and a trial takes 0.6 GB.
_DRIVER_MEMORY_BYTES, _TRIAL_MEMORY_BYTES = 1.0 * _GB, 0.6 * _GB
# A laptop study writes about 30 MB, and so do Ray's logs. With less free space than this, both may fail.
_MIN_DISK_BYTES = 0.1 * _GB
_OUTPUT_DISK_BYTES = 1 * _GB
# On GPUs: a checkpoint of a 3B policy and critic with AdamW's moments in float32 takes 74 GB, and a new one is written
# before the last one is removed. Smaller models need less, so it is only a remark if less space is free.
_GPU_OUTPUT_DISK_BYTES = 150 * _GB
# Ray does not spill objects to a disk that is more than 95 % full.
_RAY_DISK_BYTES, _RAY_DISK_FRACTION = 1 * _GB, 0.05
# Ray 2.60's object store gets 30 % of the memory, on disk if /dev/shm has less than that and less than 10 GB.
_OBJECT_STORE_FRACTION, _MAX_OBJECT_STORE_BYTES = 0.3, 10**10
# Ray 2.60 warns below this limit, because connections may fail.
_MIN_OPEN_FILES = 4096
# Ray's control server, raylet, agent and driver listen on about five ports.
_PORT_COUNT = 16
# A socket address has at most 108 bytes (104 on a Mac), including the terminating null byte. This is Ray's longest
# name, with Linux' highest process id, 4194304.
_MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_LONGEST_SOCKET_NAME = (
    f"/{FOLDER_PREFIX}4194304/{RAY_SUBFOLDER}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
# The NVIDIA driver takes far less than this fraction of an idle GPU's memory, so a GPU with more is in use.
_IDLE_MEMORY_FRACTION = 0.1
_LOCK_SCRIPT = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


class CheckResult(NamedTuple):
    """The result of one check."""

    name: str
    """The name of the check in the report."""
    severity: Literal["ok", "remark", "problem"]
    """`problem` if a run cannot start or may lose work, `remark` if it may be slower or needs a choice."""
    detail: str
    """The finding."""
    advice: str = ""
    """The remedy, as a sentence; empty for `ok`."""


class GpuMemory(NamedTuple):
    """Memory of one GPU in MiB; None if the driver does not report it."""

    uuid: str
    free_mib: int | None
    total_mib: int | None


class GpuProcess(NamedTuple):
    """A process that uses memory of the GPU `uuid`. used_mib: in MiB; None if the driver does not report it."""

    uuid: str
    pid: int
    used_mib: int | None


def check_resources(uses_gpus: bool, gpus: Sequence[Gpu]) -> list[CheckResult]:
    """Check the cores, the memory for concurrent trials, and the limit on open files."""
    cores = count_cpus()
    # By default, a study on GPUs runs one trial per GPU. Others run at most `ray_num_cpus` trials concurrently.
    trials = len(gpus) if uses_gpus and gpus else min(cores, RunConfig().trainer.ray_num_cpus)
    return [
        CheckResult("cores", "ok", str(cores)),
        check_memory(measure_available_memory(), trials),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def check_memory(available: int, trials: int) -> CheckResult:
    """Compare the `available` bytes with the needs of Ray and `trials` laptop trials; a problem if none fits."""
    detail = f"{_format_size(available)} available"
    fitting_trials = int((available - _DRIVER_MEMORY_BYTES) // _TRIAL_MEMORY_BYTES)
    if fitting_trials < 1:
        needed = _format_size(_DRIVER_MEMORY_BYTES + _TRIAL_MEMORY_BYTES)
        advice = f"Free some memory: Ray, the driver and one trial need {needed}."
        return CheckResult("memory", "problem", detail, advice)
    if fitting_trials < trials:
        advice = f"Type --max-concurrent {fitting_trials}, or free some memory: {trials} trials would run concurrently."
        return CheckResult("memory", "remark", detail, advice)
    return CheckResult("memory", "ok", detail)


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


def check_open_files(soft: int, hard: int) -> CheckResult:
    """Compare the soft and hard limits on open files with Ray's needs. RLIM_INFINITY means no limit."""
    soft_limit, hard_limit = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft_limit >= _MIN_OPEN_FILES:
        return CheckResult("open files", "ok", f"at most {soft_limit}")
    advice = f"Type `ulimit -n {_MIN_OPEN_FILES}` in the shell before a run."
    if hard_limit < _MIN_OPEN_FILES:  # a user can raise the soft limit only up to the hard one
        advice = f"Have the hard limit of {hard_limit} raised (limits.conf, or `docker run --ulimit nofile=65536`)."
    return CheckResult("open files", "remark", f"at most {soft_limit}; Ray needs {_MIN_OPEN_FILES}", advice)


def find_nearest_existing(folder: Path) -> Path:
    """Find `folder` or its nearest existing parent, which may be a file or a dangling link."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    return next(candidate for candidate in candidates if os.path.lexists(candidate))


def find_ray_folder(environ: Mapping[str, str]) -> Path:
    """Find the folder for Ray's session folder: the one that Ray 2.60 would choose."""
    # Ray reads TMPDIR only on Linux.
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    return Path(os.path.abspath(next((environ[name] for name in names if name in environ), "/tmp")))


def check_disks(output: Path, ray: Path, uses_gpus: bool) -> list[CheckResult]:
    """Check the free space in the output folder, in Ray's folder, and in shared memory for Ray's object store."""
    output_usage, ray_usage = (shutil.disk_usage(find_nearest_existing(folder)) for folder in (output, ray))
    output_bytes = _GPU_OUTPUT_DISK_BYTES if uses_gpus else _OUTPUT_DISK_BYTES
    ray_bytes = max(_RAY_DISK_BYTES, _RAY_DISK_FRACTION * ray_usage.total)
    output_advice = "Free some space, or type another --output."
    ray_advice = "Free some space, or set RAY_TMPDIR to another folder."
    results = [
        check_space("disk: output", output, output_usage.free, output_bytes, output_advice),
        check_space("disk: Ray", ray, ray_usage.free, ray_bytes, ray_advice),
    ]
    shm_folder = Path("/dev/shm")
    if shm_folder.is_dir():  # only Linux has it
        results.append(check_shared_memory(shutil.disk_usage(shm_folder).free, measure_available_memory()))
    return results


def check_space(name: str, folder: Path, free: int, recommended: float, advice: str) -> CheckResult:
    """Compare the `free` bytes of a disk with the `recommended` ones; a problem below _MIN_DISK_BYTES."""
    detail = f"{_format_size(free)} free at {folder}"
    if free < _MIN_DISK_BYTES:
        return CheckResult(name, "problem", detail, advice)
    if free < recommended:
        return CheckResult(name, "remark", f"{detail}; {_format_size(recommended)} recommended", advice)
    return CheckResult(name, "ok", detail)


def check_shared_memory(free: int, memory: int) -> CheckResult:
    """Compare the free bytes of /dev/shm with Ray's object store on a machine with `memory` bytes available."""
    object_store_bytes = min(_OBJECT_STORE_FRACTION * memory, _MAX_OBJECT_STORE_BYTES)
    detail = f"{_format_size(free)} free in /dev/shm"
    if free >= object_store_bytes:
        return CheckResult("shared memory", "ok", detail)
    size, docker_option = _format_size(object_store_bytes), f"--shm-size={object_store_bytes / 2**30:.0f}g"
    advice = f"Ray will keep its objects on disk, which is slower. Docker: `{docker_option}`."
    return CheckResult("shared memory", "remark", f"{detail}, less than Ray's object store of {size}", advice)


def check_output(output: Path) -> list[CheckResult]:
    """Try to write, sync, rename, lock and delete files where the output would go. Nothing is left behind."""
    folder = find_nearest_existing(output)
    if not folder.is_dir():
        return [CheckResult("write access", "problem", f"{folder} is not a folder", "Type --output with a folder.")]
    try:
        # In the folder itself, since another one may be on another disk. These are the operations that write a
        # checkpoint.
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as temp_folder:
            content = os.urandom(2**16)
            temp_path, final_path = Path(temp_folder) / "part", Path(temp_folder) / "whole"
            with temp_path.open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temp_path, final_path)
            if final_path.read_bytes() != content:
                raise OSError("a file was read back with other contents than were written")
            final_path.unlink()
            lock_result = check_locks(Path(temp_folder))
    except OSError as error:
        detail = f"{folder}: {error.strerror or error}"
        advice = f"Make {folder} writable, or type another --output."
        return [CheckResult("write access", "problem", detail, advice)]
    return [CheckResult("write access", "ok", f"{folder}: write, sync, rename and delete work"), lock_result]


def check_locks(folder: Path) -> CheckResult:
    """Check that a lock in `folder` keeps other processes out, since it protects a study from a second driver."""
    advice = "Type --output with a folder on a local disk, or have the network disk mounted with locks."
    with (folder / "lock").open("w") as handle:
        try:
            lock_file(handle)
        except OSError as error:
            return CheckResult("file locks", "problem", f"files cannot be locked there: {error.strerror}", advice)
        # Another process must try, since a network disk grants this process the same lock twice.
        command = [sys.executable, "-I", "-S", "-c", _LOCK_SCRIPT, handle.name]
        lock_attempt = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if lock_attempt.returncode == 0:
        return CheckResult("file locks", "problem", "a lock there does not keep other processes out", advice)
    return CheckResult("file locks", "ok", "a lock keeps other processes out")


def check_ports() -> CheckResult:
    """Check that ports of the loopback address, which Ray's processes use, can be bound and connected to."""
    try:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(_PORT_COUNT)]
            address = servers[-1].getsockname()
            stack.enter_context(socket.create_connection(address, timeout=10)).sendall(b"!")
            connection = stack.enter_context(servers[-1].accept()[0])
            connection.settimeout(10)
            connection.recv(1)
    except OSError as error:
        detail = f"127.0.0.1: {error.strerror or error}"
        advice = "Ray's processes communicate over 127.0.0.1: check the firewall, `ip addr show lo` and `ulimit -n`."
        return CheckResult("ports", "problem", detail, advice)
    return CheckResult("ports", "ok", f"{_PORT_COUNT} ports of 127.0.0.1 can be bound, and one accepts a connection")


def check_host_name(name: str) -> CheckResult:
    """Check that this host's name has an address; only a remark, because a single machine works without one."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        advice = f"Add `127.0.1.1 {name}` to /etc/hosts; programs that look up the name wait or fail."
        return CheckResult("host name", "remark", f"{name} has no address", advice)
    return CheckResult("host name", "ok", f"{name} has an address")


def check_socket_path(ray: Path) -> CheckResult:
    """Check that the paths of Ray's sockets below `ray` are short enough for the kernel, in bytes."""
    max_length = _MAX_SOCKET_PATH_BYTES - len(os.fsencode(_LONGEST_SOCKET_NAME))
    length = len(os.fsencode(ray))
    if length <= max_length:
        return CheckResult("Ray's sockets", "ok", f"the path {ray} is short enough")
    detail = f"the path {ray} has {length} bytes; at most {max_length} are possible"
    advice = "Type `export RAY_TMPDIR=/tmp`, or another folder with a short path."
    return CheckResult("Ray's sockets", "problem", detail, advice)


def check_gpus(gpus: Sequence[Gpu], machine_gpu_count: int) -> list[CheckResult]:
    """Check the memory and the users of each visible GPU; a remark if there is none.

    machine_gpu_count: all GPUs of the machine, including those hidden by CUDA_VISIBLE_DEVICES.
    """
    if not gpus and machine_gpu_count:
        detail = f"CUDA_VISIBLE_DEVICES hides the {machine_gpu_count} GPUs of this machine"
        return [CheckResult("GPU", "remark", detail, "Type `unset CUDA_VISIBLE_DEVICES` to use them.")]
    if not gpus:
        advice = "--preset laptop needs none. For --preset paper, check the output of `nvidia-smi`."
        return [CheckResult("GPU", "remark", "no NVIDIA GPU is visible", advice)]
    memory, processes = query_gpu_memory(), query_gpu_processes()
    return [
        check_gpu(
            gpu,
            next((entry for entry in memory if gpu.uuid and entry.uuid == gpu.uuid), None),
            [holder for holder in processes if holder.uuid == gpu.uuid],
        )
        for gpu in gpus
    ]


def query_gpu_memory() -> tuple[GpuMemory, ...]:
    """Ask nvidia-smi for the memory of every GPU of this machine; empty if it reports nothing."""
    return parse_gpu_memory(run_nvidia_smi("--query-gpu=index,uuid,memory.free,memory.total") or "")


def query_gpu_processes() -> tuple[GpuProcess, ...]:
    """Ask nvidia-smi for the visible processes that use GPU memory."""
    return parse_gpu_processes(run_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory") or "")


def parse_gpu_memory(text: str) -> tuple[GpuMemory, ...]:
    """Parse lines `index, uuid, free, total`; values like [N/A] become None, other lines are skipped."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return tuple(
        GpuMemory(row[1], _parse_mib(row[2]), _parse_mib(row[3]))
        for row in rows
        if len(row) == 4 and row[0].isdecimal()
    )


def parse_gpu_processes(text: str) -> tuple[GpuProcess, ...]:
    """Parse lines `uuid, pid, used`; values like [N/A] become None, other lines are skipped."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return tuple(
        GpuProcess(row[0], int(row[1]), _parse_mib(row[2])) for row in rows if len(row) == 3 and row[1].isdecimal()
    )


def _parse_mib(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def check_gpu(gpu: Gpu, memory: GpuMemory | None, processes: Sequence[GpuProcess]) -> CheckResult:
    """Check that a GPU is idle; if not, a remark names the processes that use its memory."""
    name = f"GPU {gpu.id}"
    if memory is None or memory.free_mib is None or memory.total_mib is None:
        detail, is_memory_used = f"{gpu.name}, free memory unknown", False
    else:
        detail = f"{gpu.name}, {memory.free_mib / 1024:.1f} of {memory.total_mib / 1024:.1f} GiB free"
        is_memory_used = memory.total_mib - memory.free_mib > _IDLE_MEMORY_FRACTION * memory.total_mib
    # Either sign is enough: a process that has just started uses little memory, and memory may be used by a process
    # that is invisible here, for example in another container.
    if not processes and not is_memory_used:
        return CheckResult(name, "ok", detail)
    advice = "Wait until they end, or choose other GPUs with --gpus."
    return CheckResult(name, "remark", f"{detail}, {format_processes(processes)}", advice)


def format_processes(processes: Sequence[GpuProcess]) -> str:
    """Format the processes that use a GPU's memory, each with its amount if that is known."""
    sizes = [f" ({process.used_mib / 1024:.1f} GiB)" if process.used_mib else "" for process in processes]
    descriptions = [f"{process.pid}{size}" for process, size in zip(processes, sizes, strict=True)]
    return f"used by PID {', '.join(descriptions)}" if descriptions else "used by processes that are not visible here"


def _format_size(byte_count: float) -> str:
    return decimal(int(byte_count))

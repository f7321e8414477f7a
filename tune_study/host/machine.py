"""What this machine gives a run, each by trying it: memory, files, locks, disk, ports, and the memory of its GPUs."""

import contextlib
import fcntl
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
from tune_study.host.gpus import Gpu, count_cpus
from tune_study.host.session_folder import FOLDER_PREFIX, RAY_SUBFOLDER

_GB = 10**9
# Measured on the laptop preset: driver and Ray hold 0.9 GB together, a trial 0.6 GB.
_DRIVER_MEMORY_BYTES, _TRIAL_MEMORY_BYTES = 1.0 * _GB, 0.6 * _GB
# A laptop study writes some 30 MB, and Ray's logs are as small; below this neither is safe.
_MIN_DISK_BYTES = 0.1 * _GB
# paper: actor and critic of a 3B model with Adam's moments in float32 are 74 GB, and a new state is written beside the
# last one. Smaller models need less, so less than this is a remark.
_OUTPUT_DISK_BYTES = {"laptop": 1 * _GB, "paper": 150 * _GB}
# Ray moves objects to no disk that is fuller than 95 %.
_RAY_DISK_BYTES, _RAY_DISK_FRACTION = 1 * _GB, 0.05
# Ray 2.60 gives its object store 30 % of the memory, on the disk where /dev/shm has less than that and less than 10 GB.
_OBJECT_STORE_FRACTION, _MAX_OBJECT_STORE_BYTES = 0.3, 10**10
_MIN_OPEN_FILES = 4096
_PORT_COUNT = 16
# The address of a socket holds 108 bytes, 104 on a Mac, one of them for its end; below, the longest that Ray makes.
_MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_LONGEST_SOCKET_NAME = (
    f"/{FOLDER_PREFIX}4194304/{RAY_SUBFOLDER}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
# What the driver keeps of an idle GPU is far less than this share.
_IDLE_MEMORY_FRACTION = 0.1
_LOCK_SCRIPT = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


class CheckResult(NamedTuple):
    """What one check found. `problem`: a run cannot start or may lose work. advice: what to do, empty for `ok`."""

    name: str
    severity: Literal["ok", "remark", "problem"]
    detail: str
    advice: str = ""


class GpuMemory(NamedTuple):
    """MiB of one GPU; None where the driver does not say."""

    uuid: str
    free_mib: int | None
    total_mib: int | None


class GpuProcess(NamedTuple):
    """A process that holds memory of the GPU `uuid`, in MiB; None where the driver does not say."""

    uuid: str
    pid: int
    used_mib: int | None


def check_resources(preset: str, gpus: Sequence[Gpu]) -> list[CheckResult]:
    """Cores, memory for the trials that run at once, and the limit on open files."""
    cores = count_cpus()
    trials = len(gpus) if preset == "paper" and gpus else min(cores, RunConfig().trainer.ray_num_cpus)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        CheckResult("cores", "ok", str(cores)),
        check_memory(measure_available_memory(), trials),
        check_open_files(*limits),
    ]


def check_memory(available: int, trials: int) -> CheckResult:
    """`available` bytes against what Ray and `trials` laptop trials hold; a problem where not even one trial fits."""
    detail = f"{_format_size(available)} available"
    fitting_trials = int((available - _DRIVER_MEMORY_BYTES) // _TRIAL_MEMORY_BYTES)
    if fitting_trials < 1:
        advice = f"Free memory: Ray, the driver and one trial hold {_format_size(_DRIVER_MEMORY_BYTES + _TRIAL_MEMORY_BYTES)}."
        return CheckResult("memory", "problem", detail, advice)
    if fitting_trials < trials:
        advice = f"Type --max-concurrent {fitting_trials}, or free memory: {trials} trials would run at once."
        return CheckResult("memory", "remark", detail, advice)
    return CheckResult("memory", "ok", detail)


def measure_available_memory() -> int:
    """Bytes that new processes can take, by the machine and by the control groups of this process."""
    membership_file = Path("/proc/self/cgroup")
    cgroup_free = read_cgroup_free(
        Path("/sys/fs/cgroup"), membership_file.read_text(encoding="utf-8") if membership_file.exists() else ""
    )
    machine_free = int(psutil.virtual_memory().available)
    return machine_free if cgroup_free is None else min(machine_free, cgroup_free)


def read_cgroup_free(root: Path, membership: str) -> int | None:
    """Bytes that the control groups above a process leave it; None without a limit.

    root: where control groups are mounted. membership: the text of /proc/<pid>/cgroup, of version 1 or 2.
    """
    free_bytes = []
    for line in membership.split("\n"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "memory" if controllers else root
        file_names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        cgroup_folder = mount / path.strip("/")
        for folder in (cgroup_folder, *cgroup_folder.parents):
            limit, usage = (_read_number(folder / name) for name in file_names)
            if limit is not None and usage is not None and folder.is_relative_to(mount):
                free_bytes.append(max(limit - usage + _read_reclaimable(folder), 0))
    return min(free_bytes, default=None)


def _read_number(path: Path) -> int | None:
    """The whole number in a file; None for a word such as `max`, and where there is no file."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_reclaimable(folder: Path) -> int:
    """Bytes of cached files that the kernel gives back where memory is asked for."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    memory_stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(memory_stat.get("total_inactive_file", memory_stat.get("inactive_file", 0)))


def check_open_files(soft: int, hard: int) -> CheckResult:
    """The limits on open files against what Ray wants; RLIM_INFINITY is none."""
    soft_limit, hard_limit = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft_limit >= _MIN_OPEN_FILES:
        return CheckResult("open files", "ok", f"{soft_limit} at once")
    advice = f"Type `ulimit -n {_MIN_OPEN_FILES}` in the shell before a run."
    if hard_limit < _MIN_OPEN_FILES:
        advice = f"Have the hard limit of {hard_limit} raised (limits.conf, or `docker run --ulimit nofile=65536`)."
    return CheckResult("open files", "remark", f"{soft_limit} at once; Ray wants {_MIN_OPEN_FILES}", advice)


def find_nearest_existing(folder: Path) -> Path:
    """`folder`, or what is nearest above it of what exists; it may be a file."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))


def find_ray_folder(environ: Mapping[str, str]) -> Path:
    """The folder in which the folder of Ray's files is made: where Ray 2.60 would make its own."""
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    return Path(os.path.abspath(next((environ[name] for name in names if name in environ), "/tmp")))


def check_disks(output: Path, ray: Path, preset: str) -> list[CheckResult]:
    """Free space below the output folder, in Ray's own, and in the shared memory of its object store."""
    output_usage, ray_usage = (shutil.disk_usage(find_nearest_existing(folder)) for folder in (output, ray))
    ray_disk_bytes = max(_RAY_DISK_BYTES, _RAY_DISK_FRACTION * ray_usage.total)
    results = [
        check_space(
            "disk: output",
            output,
            output_usage.free,
            _OUTPUT_DISK_BYTES[preset],
            "Free some, or type another --output.",
        ),
        check_space(
            "disk: Ray", ray, ray_usage.free, ray_disk_bytes, "Free some, or set RAY_TMPDIR to another folder."
        ),
    ]
    shm_folder = Path("/dev/shm")
    if shm_folder.is_dir():
        results.append(check_shared_memory(shutil.disk_usage(shm_folder).free, measure_available_memory()))
    return results


def check_space(name: str, folder: Path, free: int, recommended: float, advice: str) -> CheckResult:
    """`free` bytes against those wanted; a problem where there is next to nothing."""
    detail = f"{_format_size(free)} free at {folder}"
    if free < _MIN_DISK_BYTES:
        return CheckResult(name, "problem", detail, advice)
    if free < recommended:
        return CheckResult(name, "remark", f"{detail}; {_format_size(recommended)} are good to have", advice)
    return CheckResult(name, "ok", detail)


def check_shared_memory(free: int, memory: int) -> CheckResult:
    """Free bytes of /dev/shm against the object store that Ray makes on a machine with `memory` bytes available."""
    object_store_bytes = min(_OBJECT_STORE_FRACTION * memory, _MAX_OBJECT_STORE_BYTES)
    detail = f"{_format_size(free)} free in /dev/shm"
    if free >= object_store_bytes:
        return CheckResult("shared memory", "ok", detail)
    advice = f"Ray keeps its objects on the disk then, which is slower. Docker: `--shm-size={object_store_bytes / 2**30:.0f}g`."
    return CheckResult(
        "shared memory", "remark", f"{detail}, less than Ray's {_format_size(object_store_bytes)}", advice
    )


def check_output(output: Path) -> list[CheckResult]:
    """Write, sync, rename, lock and delete where the output would go. Nothing stays behind, nor does a new folder."""
    folder = find_nearest_existing(output)
    if not folder.is_dir():
        return [CheckResult("write access", "problem", f"{folder} is no folder", "Type --output with a folder.")]
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as temp_folder:
            _write_and_rename(Path(temp_folder))
            lock_result = check_locks(Path(temp_folder))
    except OSError as error:
        detail = f"{folder}: {error.strerror or error}"
        advice = f"Make {folder} writable, or type another --output."
        return [CheckResult("write access", "problem", detail, advice)]
    return [CheckResult("write access", "ok", f"{folder}: write, sync, rename and delete work"), lock_result]


def _write_and_rename(folder: Path) -> None:
    """What a checkpoint needs of a file system. OSError where it fails, or where another text is read back."""
    content = os.urandom(2**16)
    temp_path, final_path = folder / "part", folder / "whole"
    with temp_path.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temp_path, final_path)
    if final_path.read_bytes() != content:
        raise OSError("what was written is not what is read back")
    final_path.unlink()


def check_locks(folder: Path) -> CheckResult:
    """Whether a lock on a file in `folder` keeps another process out, which is what saves a study from two drivers."""
    advice = "Type --output with a folder on a local disk, or have the network disk mounted with locks."
    with (folder / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return CheckResult("file locks", "problem", f"files cannot be locked there: {error.strerror}", advice)
        # In this process a network disk would grant it twice.
        command = [sys.executable, "-I", "-S", "-c", _LOCK_SCRIPT, handle.name]
        lock_attempt = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if lock_attempt.returncode == 0:
        return CheckResult("file locks", "problem", "a lock there keeps no other process out", advice)
    return CheckResult("file locks", "ok", "a lock keeps other processes out")


def check_ports() -> CheckResult:
    """Ports on the loopback address, as Ray's processes use them to talk: bound, and one of them connected to."""
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
        advice = "Ray's processes talk over 127.0.0.1: see the firewall, `ip addr show lo` and `ulimit -n`."
        return CheckResult("ports", "problem", detail, advice)
    return CheckResult("ports", "ok", f"{_PORT_COUNT} ports of 127.0.0.1 can be bound, and connected to")


def check_host_name(name: str) -> CheckResult:
    """Whether this host's name leads to an address; a remark where not, because one machine manages without."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        advice = f"Add `127.0.1.1 {name}` to /etc/hosts; what looks the name up waits or fails."
        return CheckResult("host name", "remark", f"{name} has no address", advice)
    return CheckResult("host name", "ok", f"{name} has an address")


def check_socket_path(ray: Path) -> CheckResult:
    """Whether the names of Ray's sockets below `ray` are short enough for the kernel; bytes, not letters, count."""
    max_length = _MAX_SOCKET_PATH_BYTES - len(os.fsencode(_LONGEST_SOCKET_NAME))
    length = len(os.fsencode(ray))
    if length <= max_length:
        return CheckResult("Ray's sockets", "ok", f"the path {ray} is short enough")
    advice = "Type `export RAY_TMPDIR=/tmp`, or another folder with a short path."
    return CheckResult(
        "Ray's sockets", "problem", f"the path {ray} has {length} bytes; {max_length} are possible", advice
    )


def check_gpus(gpus: Sequence[Gpu], machine_gpu_count: int) -> list[CheckResult]:
    """Each visible GPU with its memory and who holds it; a remark for none. on_machine: GPUs, hidden ones too."""
    if not gpus and machine_gpu_count:
        detail = f"CUDA_VISIBLE_DEVICES hides the {machine_gpu_count} of this machine"
        return [CheckResult("GPU", "remark", detail, "Type `unset CUDA_VISIBLE_DEVICES` to use them.")]
    if not gpus:
        advice = "--preset laptop needs none. For --preset paper see what `nvidia-smi` says."
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
    """The memory of every GPU of this machine, as nvidia-smi says; none where it says nothing."""
    return parse_gpu_memory(_run_nvidia_smi("--query-gpu=index,uuid,memory.free,memory.total"))


def query_gpu_processes() -> tuple[GpuProcess, ...]:
    """The processes that hold memory of a GPU and are visible here, as nvidia-smi says."""
    return parse_gpu_processes(_run_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory"))


def _run_nvidia_smi(query: str) -> str:
    """What nvidia-smi prints; nothing where it is not there or does not end well."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpu_memory(text: str) -> tuple[GpuMemory, ...]:
    """GPUs in lines `index, uuid, free, total`; numbers that are none, like [N/A], are None; other lines are none."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(
        GpuMemory(row[1], _parse_mib(row[2]), _parse_mib(row[3]))
        for row in rows
        if len(row) == 4 and row[0].isdecimal()
    )


def parse_gpu_processes(text: str) -> tuple[GpuProcess, ...]:
    """Processes in lines `uuid, pid, used`; a number that is none, like [N/A], is None; other lines are none."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(
        GpuProcess(row[0], int(row[1]), _parse_mib(row[2])) for row in rows if len(row) == 3 and row[1].isdecimal()
    )


def _parse_mib(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def check_gpu(gpu: Gpu, memory: GpuMemory | None, processes: Sequence[GpuProcess]) -> CheckResult:
    """A GPU that nobody uses, or a remark that names who holds its memory."""
    name = f"GPU {gpu.id}"
    if memory is None or memory.free_mib is None or memory.total_mib is None:
        detail, is_memory_used = f"{gpu.name}, free memory not known", False
    else:
        detail = f"{gpu.name}, {memory.free_mib / 1024:.1f} of {memory.total_mib / 1024:.1f} GiB free"
        is_memory_used = memory.total_mib - memory.free_mib > _IDLE_MEMORY_FRACTION * memory.total_mib
    if not processes and not is_memory_used:
        return CheckResult(name, "ok", detail)
    return CheckResult(
        name, "remark", f"{detail}, {format_processes(processes)}", "Wait until they end, or choose others with --gpus."
    )


def format_processes(processes: Sequence[GpuProcess]) -> str:
    """Who holds a GPU's memory, each process with its share where that is known."""
    descriptions = [
        f"{each.pid}" + (f" ({each.used_mib / 1024:.1f} GiB)" if each.used_mib else "") for each in processes
    ]
    return f"held by PID {', '.join(descriptions)}" if descriptions else "held by processes that are not visible here"


def _format_size(byte_count: float) -> str:
    return decimal(int(byte_count))

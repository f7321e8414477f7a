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
from tune_study.host.gpus import Gpu, cpu_count
from tune_study.host.session_folder import PREFIX, RAY

_GB = 10**9
# Measured on the laptop preset: driver and Ray hold 0.9 GB together, a trial 0.6 GB.
_DRIVER_MEMORY, _TRIAL_MEMORY = 1.0 * _GB, 0.6 * _GB
# A laptop study writes some 30 MB, and Ray's logs are as small; below this neither is safe.
_LEAST_DISK = 0.1 * _GB
# paper: actor and critic of a 3B model with Adam's moments in float32 are 74 GB, and a new state is written beside the
# last one. Smaller models need less, so less than this is a remark.
_OUTPUT_DISK = {"laptop": 1 * _GB, "paper": 150 * _GB}
# Ray moves objects to no disk that is fuller than 95 %.
_RAY_DISK, _RAY_DISK_SHARE = 1 * _GB, 0.05
# Ray 2.60 gives its object store 30 % of the memory, on the disk where /dev/shm has less than that and less than 10 GB.
_STORE_SHARE, _STORE_MOST = 0.3, 10**10
_OPEN_FILES = 4096
_PORTS = 16
# The address of a socket holds 108 bytes, 104 on a Mac, one of them for its end; below, the longest that Ray makes.
_SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
_SOCKET = f"/{PREFIX}4194304/{RAY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# What the driver keeps of an idle GPU is far less than this share.
_HELD_SHARE = 0.1
_LOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


class Finding(NamedTuple):
    """What one check found. `problem`: a run cannot start or may lose work. advice: what to do, empty for `ok`."""

    name: str
    level: Literal["ok", "remark", "problem"]
    found: str
    advice: str = ""


class GpuMemory(NamedTuple):
    """MiB of one GPU; None where the driver does not say."""

    uuid: str
    free: int | None
    total: int | None


class GpuProcess(NamedTuple):
    """A process that holds memory of the GPU `uuid`, in MiB; None where the driver does not say."""

    uuid: str
    pid: int
    used: int | None


def check_processor(preset: str, gpus: Sequence[Gpu]) -> list[Finding]:
    """Cores, memory for the trials that run at once, and the limit on open files."""
    cores = cpu_count()
    trials = len(gpus) if preset == "paper" and gpus else min(cores, RunConfig().trainer.ray_num_cpus)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        Finding("cores", "ok", str(cores)),
        check_memory(available_memory(), trials),
        check_open_files(*limits),
    ]


def check_memory(available: int, trials: int) -> Finding:
    """`available` bytes against what Ray and `trials` laptop trials hold; a problem where not even one trial fits."""
    found = f"{_size(available)} available"
    fit = int((available - _DRIVER_MEMORY) // _TRIAL_MEMORY)
    if fit < 1:
        advice = f"Free memory: Ray, the driver and one trial hold {_size(_DRIVER_MEMORY + _TRIAL_MEMORY)}."
        return Finding("memory", "problem", found, advice)
    if fit < trials:
        advice = f"Type --max-concurrent {fit}, or free memory: {trials} trials would run at once."
        return Finding("memory", "remark", found, advice)
    return Finding("memory", "ok", found)


def available_memory() -> int:
    """Bytes that new processes can take, by the machine and by the control groups of this process."""
    own = Path("/proc/self/cgroup")
    room = cgroup_room(Path("/sys/fs/cgroup"), own.read_text(encoding="utf-8") if own.exists() else "")
    free = int(psutil.virtual_memory().available)
    return free if room is None else min(free, room)


def cgroup_room(root: Path, membership: str) -> int | None:
    """Bytes that the control groups above a process leave it; None without a limit.

    root: where control groups are mounted. membership: the text of /proc/<pid>/cgroup, of version 1 or 2.
    """
    rooms = []
    for line in membership.split("\n"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        place = base / path.strip("/")
        for folder in (place, *place.parents):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and folder.is_relative_to(base):
                rooms.append(max(limit - used + _reclaimable(folder), 0))
    return min(rooms, default=None)


def _number(path: Path) -> int | None:
    """The whole number in a file; None for a word such as `max`, and where there is no file."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path) -> int:
    """Bytes of cached files that the kernel gives back where memory is asked for."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def check_open_files(soft: int, hard: int) -> Finding:
    """The limits on open files against what Ray wants; RLIM_INFINITY is none."""
    now, most = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if now >= _OPEN_FILES:
        return Finding("open files", "ok", f"{now} at once")
    advice = f"Type `ulimit -n {_OPEN_FILES}` in the shell before a run."
    if most < _OPEN_FILES:
        advice = f"Have the hard limit of {most} raised (limits.conf, or `docker run --ulimit nofile=65536`)."
    return Finding("open files", "remark", f"{now} at once; Ray wants {_OPEN_FILES}", advice)


def nearest(folder: Path) -> Path:
    """`folder`, or what is nearest above it of what exists; it may be a file."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))


def ray_folder(environ: Mapping[str, str]) -> Path:
    """The folder in which the folder of Ray's files is made: where Ray 2.60 would make its own."""
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    return Path(os.path.abspath(next((environ[name] for name in names if name in environ), "/tmp")))


def check_disks(output: Path, ray: Path, preset: str) -> list[Finding]:
    """Free space below the output folder, in Ray's own, and in the shared memory of its object store."""
    there, used_by_ray = (shutil.disk_usage(nearest(folder)) for folder in (output, ray))
    ray_wants = max(_RAY_DISK, _RAY_DISK_SHARE * used_by_ray.total)
    findings = [
        check_space("disk: output", output, there.free, _OUTPUT_DISK[preset], "Free some, or type another --output."),
        check_space("disk: Ray", ray, used_by_ray.free, ray_wants, "Free some, or set RAY_TMPDIR to another folder."),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        findings.append(check_shared_memory(shutil.disk_usage(shared).free, available_memory()))
    return findings


def check_space(name: str, folder: Path, free: int, wanted: float, advice: str) -> Finding:
    """`free` bytes against those wanted; a problem where there is next to nothing."""
    found = f"{_size(free)} free at {folder}"
    if free < _LEAST_DISK:
        return Finding(name, "problem", found, advice)
    if free < wanted:
        return Finding(name, "remark", f"{found}; {_size(wanted)} are good to have", advice)
    return Finding(name, "ok", found)


def check_shared_memory(free: int, memory: int) -> Finding:
    """Free bytes of /dev/shm against the object store that Ray makes on a machine with `memory` bytes available."""
    store = min(_STORE_SHARE * memory, _STORE_MOST)
    found = f"{_size(free)} free in /dev/shm"
    if free >= store:
        return Finding("shared memory", "ok", found)
    advice = f"Ray keeps its objects on the disk then, which is slower. Docker: `--shm-size={store / 2**30:.0f}g`."
    return Finding("shared memory", "remark", f"{found}, less than Ray's {_size(store)}", advice)


def check_output(output: Path) -> list[Finding]:
    """Write, sync, rename, lock and delete where the output would go. Nothing stays behind, nor does a new folder."""
    folder = nearest(output)
    if not folder.is_dir():
        return [Finding("write access", "problem", f"{folder} is no folder", "Type --output with a folder.")]
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
            _write_and_rename(Path(place))
            locks = check_locks(Path(place))
    except OSError as error:
        found = f"{folder}: {error.strerror or error}"
        advice = f"Make {folder} writable, or type another --output."
        return [Finding("write access", "problem", found, advice)]
    return [Finding("write access", "ok", f"{folder}: write, sync, rename and delete work"), locks]


def _write_and_rename(folder: Path) -> None:
    """What a checkpoint needs of a file system. OSError where it fails, or where another text is read back."""
    data = os.urandom(2**16)
    part, whole = folder / "part", folder / "whole"
    with part.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(part, whole)
    if whole.read_bytes() != data:
        raise OSError("what was written is not what is read back")
    whole.unlink()


def check_locks(folder: Path) -> Finding:
    """Whether a lock on a file in `folder` keeps another process out, which is what saves a study from two drivers."""
    advice = "Type --output with a folder on a local disk, or have the network disk mounted with locks."
    with (folder / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Finding("file locks", "problem", f"files cannot be locked there: {error.strerror}", advice)
        # In this process a network disk would grant it twice.
        command = [sys.executable, "-I", "-S", "-c", _LOCK, handle.name]
        second = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if second.returncode == 0:
        return Finding("file locks", "problem", "a lock there keeps no other process out", advice)
    return Finding("file locks", "ok", "a lock keeps other processes out")


def check_ports() -> Finding:
    """Ports on the loopback address, as Ray's processes use them to talk: bound, and one of them connected to."""
    try:
        with contextlib.ExitStack() as held:
            doors = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(_PORTS)]
            address = doors[-1].getsockname()
            held.enter_context(socket.create_connection(address, timeout=10)).sendall(b"!")
            visitor = held.enter_context(doors[-1].accept()[0])
            visitor.settimeout(10)
            visitor.recv(1)
    except OSError as error:
        found = f"127.0.0.1: {error.strerror or error}"
        advice = "Ray's processes talk over 127.0.0.1: see the firewall, `ip addr show lo` and `ulimit -n`."
        return Finding("ports", "problem", found, advice)
    return Finding("ports", "ok", f"{_PORTS} ports of 127.0.0.1 can be bound, and connected to")


def check_host_name(name: str) -> Finding:
    """Whether this host's name leads to an address; a remark where not, because one machine manages without."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        advice = f"Add `127.0.1.1 {name}` to /etc/hosts; what looks the name up waits or fails."
        return Finding("host name", "remark", f"{name} has no address", advice)
    return Finding("host name", "ok", f"{name} has an address")


def check_socket_path(ray: Path) -> Finding:
    """Whether the names of Ray's sockets below `ray` are short enough for the kernel; bytes, not letters, count."""
    room = _SOCKET_BYTES - len(os.fsencode(_SOCKET))
    length = len(os.fsencode(ray))
    if length <= room:
        return Finding("Ray's sockets", "ok", f"the path {ray} is short enough")
    advice = "Type `export RAY_TMPDIR=/tmp`, or another folder with a short path."
    return Finding("Ray's sockets", "problem", f"the path {ray} has {length} bytes; {room} are possible", advice)


def check_gpus(gpus: Sequence[Gpu], on_machine: int) -> list[Finding]:
    """Each visible GPU with its memory and who holds it; a remark for none. on_machine: GPUs, hidden ones too."""
    if not gpus and on_machine:
        found = f"CUDA_VISIBLE_DEVICES hides the {on_machine} of this machine"
        return [Finding("GPU", "remark", found, "Type `unset CUDA_VISIBLE_DEVICES` to use them.")]
    if not gpus:
        advice = "--preset laptop needs none. For --preset paper see what `nvidia-smi` says."
        return [Finding("GPU", "remark", "no NVIDIA GPU is visible", advice)]
    memory, holders = gpu_memory(), gpu_processes()
    return [
        judge_gpu(
            gpu,
            next((entry for entry in memory if gpu.uuid and entry.uuid == gpu.uuid), None),
            [holder for holder in holders if holder.uuid == gpu.uuid],
        )
        for gpu in gpus
    ]


def gpu_memory() -> tuple[GpuMemory, ...]:
    """The memory of every GPU of this machine, as nvidia-smi says; none where it says nothing."""
    return parse_memory(_nvidia_smi("--query-gpu=index,uuid,memory.free,memory.total"))


def gpu_processes() -> tuple[GpuProcess, ...]:
    """The processes that hold memory of a GPU and are visible here, as nvidia-smi says."""
    return parse_processes(_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory"))


def _nvidia_smi(query: str) -> str:
    """What nvidia-smi prints; nothing where it is not there or does not end well."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_memory(text: str) -> tuple[GpuMemory, ...]:
    """GPUs in lines `index, uuid, free, total`; numbers that are none, like [N/A], are None; other lines are none."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(GpuMemory(row[1], _mib(row[2]), _mib(row[3])) for row in rows if len(row) == 4 and row[0].isdecimal())


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Processes in lines `uuid, pid, used`; a number that is none, like [N/A], is None; other lines are none."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(GpuProcess(row[0], int(row[1]), _mib(row[2])) for row in rows if len(row) == 3 and row[1].isdecimal())


def _mib(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def judge_gpu(gpu: Gpu, memory: GpuMemory | None, holders: Sequence[GpuProcess]) -> Finding:
    """A GPU that nobody uses, or a remark that names who holds its memory."""
    name = f"GPU {gpu.id}"
    if memory is None or memory.free is None or memory.total is None:
        found, is_held = f"{gpu.name}, free memory not known", False
    else:
        found = f"{gpu.name}, {memory.free / 1024:.1f} of {memory.total / 1024:.1f} GiB free"
        is_held = memory.total - memory.free > _HELD_SHARE * memory.total
    if not holders and not is_held:
        return Finding(name, "ok", found)
    return Finding(
        name, "remark", f"{found}, {holder_words(holders)}", "Wait until they end, or choose others with --gpus."
    )


def holder_words(holders: Sequence[GpuProcess]) -> str:
    """Who holds a GPU's memory, each process with its share where that is known."""
    shares = [f"{each.pid}" + (f" ({each.used / 1024:.1f} GiB)" if each.used else "") for each in holders]
    return f"held by PID {', '.join(shares)}" if shares else "held by processes that are not visible here"


def _size(count: float) -> str:
    return decimal(int(count))

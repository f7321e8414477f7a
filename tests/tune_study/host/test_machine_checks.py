import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.host.machine_checks import GpuMemory, GpuProcess

H100 = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3")
UNLIMITED = resource.RLIM_INFINITY
GB = 10**9


@contextmanager
def limit_resource(resource_kind: int, soft_limit: int) -> Iterator[None]:
    """Lower a soft limit of this process inside the block."""
    old_limits = resource.getrlimit(resource_kind)
    resource.setrlimit(resource_kind, (soft_limit, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource_kind, old_limits)


# Memory and processor


@pytest.mark.parametrize(
    ("available", "trials", "severity", "advice"),
    [
        (1.59 * GB, 1, "problem", "need 1.6 GB"),
        (1.61 * GB, 1, "ok", ""),
        (1.61 * GB, 2, "remark", "--max-concurrent 1"),
        (5 * GB, 8, "remark", "--max-concurrent 6"),
        (5 * GB, 6, "ok", ""),
    ],
)
def test_memory_is_counted_in_trials(available: float, trials: int, severity: str, advice: str) -> None:
    result = machine_checks.check_memory(int(available), trials)
    assert result.severity == severity
    assert advice in result.advice
    assert bool(result.advice) == (severity != "ok")


def write_control_group(folder: Path, **numbers: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in numbers.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{value}\n")


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    write_control_group(tmp_path / "a" / "b", memory_max="max", memory_current=5)
    assert machine_checks.read_cgroup_free(tmp_path, "0::/a/b\n") is None
    write_control_group(tmp_path / "a", memory_max=1000, memory_current=300)
    assert machine_checks.read_cgroup_free(tmp_path, "0::/a/b\n") == 700
    write_control_group(
        tmp_path / "a" / "b", memory_max=400, memory_current=350, memory_stat="anon 9\ninactive_file 20"
    )
    assert machine_checks.read_cgroup_free(tmp_path, "0::/a/b\n") == 70
    write_control_group(tmp_path / "a" / "b", memory_max=400, memory_current=450, memory_stat="anon 9")
    assert machine_checks.read_cgroup_free(tmp_path, "0::/a/b\n") == 0


def test_control_groups_of_version_1_and_in_a_container(tmp_path: Path) -> None:
    limits = {"memory_limit_in_bytes": 1000, "memory_usage_in_bytes": 900, "memory_stat": "total_inactive_file 50"}
    write_control_group(tmp_path / "memory", **limits)
    # A container sees the host's name of its group, and finds the group at the root.
    assert machine_checks.read_cgroup_free(tmp_path, "5:cpuset:/x\n4:cpu,memory:/docker/12ab\n0::/\n") == 150
    assert machine_checks.read_cgroup_free(tmp_path, "5:cpuset:/x\n") is None


@given(st.text() | st.from_regex(r"([0-9]*:[a-z,]*:[/.a-z]*\n)*", fullmatch=True))
def test_no_list_of_control_groups_breaks_the_reading(membership: str) -> None:
    assert machine_checks.read_cgroup_free(Path("/no-such-mount"), membership) is None


def test_the_memory_that_is_available_is_that_of_this_machine() -> None:
    assert 0 < machine_checks.measure_available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_low_limit_on_open_files_is_a_remark_with_the_command() -> None:
    with limit_resource(resource.RLIMIT_NOFILE, 1024):
        cores, _, files = machine_checks.check_resources(False, ())
    assert cores.severity == "ok"
    assert (files.severity, files.detail) == ("remark", "at most 1024; Ray needs 4096")
    assert "ulimit -n 4096" in files.advice


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "advice"),
    [
        (4096, 4096, "ok", ""),
        (UNLIMITED, UNLIMITED, "ok", ""),
        (4095, UNLIMITED, "remark", "ulimit -n 4096"),
        (1024, 2048, "remark", "hard limit of 2048"),
    ],
)
def test_limits_on_open_files(soft: int, hard: int, severity: str, advice: str) -> None:
    result = machine_checks.check_open_files(soft, hard)
    assert result.severity == severity
    assert advice in result.advice


# Disk


@pytest.mark.parametrize(
    ("free", "needed", "severity"),
    [(2 * GB, 1 * GB, "ok"), (0.5 * GB, 1 * GB, "remark"), (0.09 * GB, 1 * GB, "problem"), (0, 0, "problem")],
)
def test_room_on_a_disk(free: float, needed: float, severity: str) -> None:
    result = machine_checks.check_space("disk", Path("/out"), int(free), needed, "Free some.")
    assert (result.severity, result.advice) == (severity, "" if severity == "ok" else "Free some.")
    assert "/out" in result.detail


def test_the_disks_of_this_machine_are_asked(tmp_path: Path) -> None:
    output, ray = machine_checks.check_disks(tmp_path / "not" / "yet", Path("/no-such-folder/below"), False)[:2]
    assert (output.name, ray.name) == ("disk: output", "disk: Ray")
    assert str(tmp_path / "not" / "yet") in output.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shared", "memory", "severity"),
    [(64 * 2**20, 8 * GB, "remark"), (2.5 * GB, 8 * GB, "ok"), (2.3 * GB, 8 * GB, "remark"), (10 * GB, 999 * GB, "ok")],
)
def test_shared_memory_against_rays_object_store(shared: float, memory: float, severity: str) -> None:
    assert machine_checks.check_shared_memory(int(shared), int(memory)).severity == severity


# The output folder


def test_an_output_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    writing, locks = machine_checks.check_output(tmp_path / "new" / "folder")
    assert (writing.severity, locks.severity) == ("ok", "ok")
    assert str(tmp_path) in writing.detail
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_output_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    (result,) = machine_checks.check_output(tmp_path / "taken" / "below")
    assert (result.severity, result.detail) == ("problem", f"{tmp_path / 'taken'} is not a folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (result,) = machine_checks.check_output(tmp_path / "dangling")
    assert result.severity == "problem"


def test_an_output_that_nobody_may_write_is_a_problem() -> None:
    (result,) = machine_checks.check_output(Path("/proc/no-such-folder"))
    assert (result.name, result.severity) == ("write access", "problem")
    assert result.detail.startswith("/proc: ")
    assert "--output" in result.advice


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with limit_resource(resource.RLIMIT_FSIZE, 2**12):
        (result,) = machine_checks.check_output(tmp_path)
    assert (result.severity, result.detail) == ("problem", f"{tmp_path}: {os.strerror(errno.EFBIG)}")
    assert list(tmp_path.iterdir()) == []


def raise_no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_disk_without_locks_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    writing, locks = machine_checks.check_output(tmp_path)
    assert (writing.severity, locks.severity) == ("ok", "problem")
    assert os.strerror(errno.ENOLCK) in locks.detail
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_keeps_nobody_out_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert machine_checks.check_locks(tmp_path).detail == "a lock there does not keep other processes out"


# Network and sockets


def test_loopback_ports_can_be_used() -> None:
    assert machine_checks.check_ports().severity == "ok"


def test_ports_that_cannot_be_had_are_a_problem() -> None:
    lowest = os.dup(0)
    os.close(lowest)
    with limit_resource(resource.RLIMIT_NOFILE, lowest + 3):
        result = machine_checks.check_ports()
    assert (result.severity, result.detail) == ("problem", f"127.0.0.1: {os.strerror(errno.EMFILE)}")


@pytest.mark.parametrize(("name", "severity"), [("localhost", "ok"), ("no such host", "remark"), ("a..b", "remark")])
def test_host_names(name: str, severity: str) -> None:
    result = machine_checks.check_host_name(name)
    assert result.severity == severity
    assert (name in result.advice) == (severity != "ok")


@pytest.mark.parametrize("letter", ["x", "ß"])
@pytest.mark.parametrize("excess", [0, 1])
def test_the_longest_folder_is_the_one_that_ray_accepts(letter: str, excess: int) -> None:
    from ray._private.utils import validate_socket_filepath

    n_bytes = machine_checks._MAX_SOCKET_PATH_BYTES - len(machine_checks._LONGEST_SOCKET_NAME) + excess - 2
    folder = Path("/" + "y" * (n_bytes % len(letter.encode()) + 1) + letter * (n_bytes // len(letter.encode())))
    if excess:
        assert machine_checks.check_socket_path(folder).severity == "problem"
        with pytest.raises(OSError, match="AF_UNIX path length cannot exceed"):
            validate_socket_filepath(f"{folder}{machine_checks._LONGEST_SOCKET_NAME}")
    else:
        assert machine_checks.check_socket_path(folder).severity == "ok"
        validate_socket_filepath(f"{folder}{machine_checks._LONGEST_SOCKET_NAME}")


@pytest.mark.parametrize(
    "environ", [{}, {"TMPDIR": "/a"}, {"RAY_TMPDIR": "/b"}, {"RAY_TMPDIR": "/b", "TMPDIR": "/a"}, {"RAY_TMPDIR": "/"}]
)
def test_rays_folder_is_where_ray_says(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import get_default_system_temp_dir

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert machine_checks.find_ray_folder(environ) == Path(get_default_system_temp_dir())


# GPUs

MEMORY = """0, GPU-5a4b, 81037, 81559
1, GPU-77aa, [N/A], [N/A]
2, GPU-88cc, 1024, 81559
"""
PROCESSES = """GPU-88cc, 4242, 70000
GPU-88cc, 4243, [N/A]
GPU-77aa, [N/A], 5
"""
COMPLAINT = "NVIDIA-SMI has failed because it couldn't communicate, at all, with the NVIDIA driver.\n"


def test_what_nvidia_smi_prints_is_read() -> None:
    assert machine_checks.parse_gpu_memory(MEMORY + COMPLAINT) == (
        GpuMemory("GPU-5a4b", 81037, 81559),
        GpuMemory("GPU-77aa", None, None),
        GpuMemory("GPU-88cc", 1024, 81559),
    )
    assert machine_checks.parse_gpu_processes(PROCESSES) == (
        GpuProcess("GPU-88cc", 4242, 70000),
        GpuProcess("GPU-88cc", 4243, None),
    )
    for complaint in (COMPLAINT, "No devices were found\n", "No running processes found", ""):
        assert machine_checks.parse_gpu_memory(complaint) == machine_checks.parse_gpu_processes(complaint) == ()


@given(st.text() | st.lists(st.lists(st.text(), max_size=5).map(", ".join)).map("\n".join))
def test_no_text_breaks_the_reading(text: str) -> None:
    machine_checks.parse_gpu_memory(text)
    machine_checks.parse_gpu_processes(text)


sizes = st.none() | st.integers(0, 10**6)
uuids = st.from_regex(r"GPU-[0-9a-f-]{1,36}", fullmatch=True)


@given(st.lists(st.builds(GpuMemory, uuids, sizes, sizes)), st.sampled_from(["[N/A]", "[Not Supported]", ""]))
def test_memory_that_is_printed_is_read_again(listing: list[GpuMemory], missing_text: str) -> None:
    cells = [[missing_text if cell is None else str(cell) for cell in (i, *entry)] for i, entry in enumerate(listing)]
    assert machine_checks.parse_gpu_memory("\n".join(map(", ".join, cells))) == tuple(listing)


@given(st.lists(st.builds(GpuProcess, uuids, st.integers(1, 2**22), sizes)))
def test_processes_that_are_printed_are_read_again(listing: list[GpuProcess]) -> None:
    cells = [["[N/A]" if cell is None else str(cell) for cell in entry] for entry in listing]
    assert machine_checks.parse_gpu_processes("\n".join(map(", ".join, cells))) == tuple(listing)


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    """Install a fake nvidia-smi that prints the listings above."""
    script = folder / "nvidia-smi"
    answers = f"*memory.free*) printf '%s' '{MEMORY}';; *compute-apps*) printf '%s' '{PROCESSES}';;"
    script.write_text(f"#!/bin/sh\ncase $1 in {answers} esac\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_that_others_use_are_a_remark_with_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch)
    mig = Gpu("MIG-1", "MIG-1", "NVIDIA H100")
    gpus = (H100, Gpu("1", "GPU-77aa", "NVIDIA GB10"), Gpu("2", "GPU-88cc", "NVIDIA H100"), mig)
    free, unreadable, busy, slice_ = machine_checks.check_gpus(gpus, 3)
    assert (free.severity, free.detail) == ("ok", "NVIDIA H100 80GB HBM3, 79.1 of 79.6 GiB free")
    assert (unreadable.severity, unreadable.detail) == ("ok", "NVIDIA GB10, free memory unknown")
    assert (slice_.name, slice_.severity) == ("GPU MIG-1", "ok")
    assert (busy.name, busy.severity) == ("GPU 2", "remark")
    assert busy.detail == "NVIDIA H100, 1.0 of 79.6 GiB free, used by PID 4242 (68.4 GiB), 4243"
    assert "--gpus" in busy.advice


def test_a_driver_that_does_not_answer_leaves_the_memory_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, code=9)
    (result,) = machine_checks.check_gpus((H100,), 1)
    assert (result.severity, result.detail) == ("ok", "NVIDIA H100 80GB HBM3, free memory unknown")


@given(st.integers(0, 81559))
def test_memory_that_no_visible_process_holds_is_a_remark(free: int) -> None:
    result = machine_checks.check_gpu(H100, GpuMemory(H100.uuid, free, 81559), [])
    assert (result.severity == "remark") == (81559 - free > 8155.9)
    assert ("not visible here" in result.detail) == (result.severity == "remark")


def test_no_gpu_is_a_remark_and_says_which_preset_needs_none() -> None:
    (result,) = machine_checks.check_gpus((), 0)
    assert result.severity == "remark"
    assert "--preset laptop" in result.advice
    (hidden_result,) = machine_checks.check_gpus((), 2)
    assert hidden_result.severity == "remark"
    assert "unset CUDA_VISIBLE_DEVICES" in hidden_result.advice

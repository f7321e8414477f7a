import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.host.machine_checks import CheckResult, GpuMemory, GpuProcess

H100 = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3")
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


# Memory


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
    assert advice in result.text


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


# Disk


def test_a_disk_needs_some_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "yet"
    usage = shutil.disk_usage(tmp_path)
    for free, severity in ((GB, "ok"), (GB - 1, "problem"), (0, "problem")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        result = machine_checks.check_disk(folder, "problem", "Free some.")
        assert result.severity == severity
        assert ("Free some." in result.text) == (severity == "problem")
        assert str(folder) in result.text
    assert machine_checks.check_disk(folder, "remark", "Free some.").severity == "remark"
    assert list(tmp_path.iterdir()) == []


# The output folder


def test_an_output_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = machine_checks.check_output(tmp_path / "new" / "folder")
    assert result == CheckResult("ok", f"a file can be written in {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_output_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = machine_checks.check_output(tmp_path / "taken" / "below")
    assert result.severity == "problem"
    assert result.text.startswith(f"{tmp_path / 'taken'}: Not a directory")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    result = machine_checks.check_output(tmp_path / "dangling")
    assert result.severity == "problem"


def test_an_output_that_nobody_may_write_is_a_problem() -> None:
    result = machine_checks.check_output(Path("/proc/no-such-folder"))
    assert result.severity == "problem"
    assert result.text.startswith("/proc: ")
    assert "--output" in result.text


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with limit_resource(resource.RLIMIT_FSIZE, 2**12):
        result = machine_checks.check_output(tmp_path)
    assert result.severity == "problem"
    assert result.text.startswith(f"{tmp_path}: {os.strerror(errno.EFBIG)}. ")
    assert list(tmp_path.iterdir()) == []


# Ray's folder


@pytest.mark.parametrize("letter", ["x", "ß"])
@pytest.mark.parametrize("excess", [0, 1])
def test_the_longest_folder_is_the_one_that_ray_accepts(letter: str, excess: int) -> None:
    from ray._private.utils import validate_socket_filepath

    n_bytes = machine_checks._MAX_SOCKET_PATH_BYTES - len(machine_checks._LONGEST_SOCKET_NAME) + excess - 2
    folder = Path("/" + "y" * (n_bytes % len(letter.encode()) + 1) + letter * (n_bytes // len(letter.encode())))
    if excess:
        assert "Type `export RAY_TMPDIR=/tmp`" in machine_checks.explain_long_path(folder)
        with pytest.raises(OSError, match="AF_UNIX path length cannot exceed"):
            validate_socket_filepath(f"{folder}{machine_checks._LONGEST_SOCKET_NAME}")
    else:
        assert machine_checks.explain_long_path(folder) == ""
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


def test_visible_gpus_are_listed() -> None:
    result = machine_checks.check_gpus((H100, Gpu("3", "", "NVIDIA GB10")), 4)
    assert result == CheckResult("ok", "0 (NVIDIA H100 80GB HBM3), 3 (NVIDIA GB10)")


def test_no_gpu_is_a_remark_and_says_which_preset_needs_none() -> None:
    result, hidden_result = (machine_checks.check_gpus((), count) for count in (0, 2))
    assert (result.severity, hidden_result.severity) == ("remark", "remark")
    assert "--preset laptop" in result.text
    assert "unset CUDA_VISIBLE_DEVICES" in hidden_result.text

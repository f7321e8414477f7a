import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_study.host import machine_checks
from tune_study.host.machine_checks import GpuMemory, GpuProcess

# Memory


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

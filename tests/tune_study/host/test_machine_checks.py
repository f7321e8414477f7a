import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_study.host import gpus, machine_checks
from tune_study.host.gpus import Gpu, detect_gpus
from tune_study.host.machine_checks import GpuMemory, GpuProcess, query_gpu_memory, query_gpu_processes

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


def print_in_nvidia_smi(text: str) -> Any:
    """Let nvidia-smi print this text in the block."""
    return mock.patch.object(gpus.subprocess, "run", return_value=SimpleNamespace(stdout=text))


def test_what_nvidia_smi_prints_is_read() -> None:
    with print_in_nvidia_smi(f"0, GPU-5a4b, NVIDIA H100 80GB HBM3\n1, GPU-77aa, NVIDIA H100, 94GB\n{COMPLAINT}\n"):
        names = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3"), Gpu("1", "GPU-77aa", "NVIDIA H100, 94GB")
        assert detect_gpus({}) == names
    with print_in_nvidia_smi(MEMORY + COMPLAINT):
        assert query_gpu_memory() == (
            GpuMemory("GPU-5a4b", 81037, 81559),
            GpuMemory("GPU-77aa", None, None),
            GpuMemory("GPU-88cc", 1024, 81559),
        )
    with print_in_nvidia_smi(PROCESSES + COMPLAINT):
        assert query_gpu_processes() == (GpuProcess("GPU-88cc", 4242, 70000), GpuProcess("GPU-88cc", 4243, None))
    for complaint in (COMPLAINT, "No devices were found\n", "No running processes found", ""):
        with print_in_nvidia_smi(complaint):
            assert query_gpu_memory() == query_gpu_processes() == detect_gpus({}) == ()


@given(st.text() | st.lists(st.lists(st.text(), max_size=5).map(", ".join)).map("\n".join))
def test_no_text_breaks_the_reading(text: str) -> None:
    with print_in_nvidia_smi(text):
        query_gpu_memory()
        query_gpu_processes()


sizes = st.none() | st.integers(0, 10**6)
uuids = st.from_regex(r"GPU-[0-9a-f-]{1,36}", fullmatch=True)


@given(
    st.lists(st.builds(GpuMemory, uuids, sizes, sizes)),
    st.lists(st.builds(GpuProcess, uuids, st.integers(1, 2**22), sizes)),
    st.sampled_from(["[N/A]", "[Not Supported]", ""]),
)
def test_what_is_printed_is_read_again(memory: list[GpuMemory], processes: list[GpuProcess], missing: str) -> None:
    for rows, entries, query in (
        ([(number, *entry) for number, entry in enumerate(memory)], memory, query_gpu_memory),
        (processes, processes, query_gpu_processes),
    ):
        lines = [", ".join(missing if cell is None else str(cell) for cell in row) for row in rows]
        with print_in_nvidia_smi("\n".join(lines)):
            assert list(query()) == entries

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tune_study.host import machine_checks
from tune_study.host.machine_checks import Gpu, GpuMemory, detect_gpus, query_gpu_memory

# Memory


def write_control_group(folder: Path, **numbers: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in numbers.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{value}\n")


def test_every_control_group_above_a_process_limits_it(tmp_path: Path) -> None:
    write_control_group(tmp_path / "a" / "b", memory_max="max", memory_current=5, memory_stat="anon 9")
    assert machine_checks.read_cgroup_limits(tmp_path, "0::/a/b\n") == []
    write_control_group(tmp_path / "a", memory_max=1000, memory_current=300, memory_stat="anon 9")
    assert machine_checks.read_cgroup_limits(tmp_path, "5:cpuset:/x\n0::/a/b\n") == [700]
    write_control_group(
        tmp_path / "a" / "b", memory_max=400, memory_current=350, memory_stat="anon 9\ninactive_file 20"
    )
    assert machine_checks.read_cgroup_limits(tmp_path, "0::/a/b\n") == [70, 700]
    write_control_group(tmp_path / "a" / "b", memory_max=400, memory_current=450, memory_stat="anon 9")
    assert machine_checks.read_cgroup_limits(tmp_path, "0::/a/b\n") == [0, 700]
    # A container finds its group at the root. Groups of version 1 are not read.
    write_control_group(tmp_path, memory_max=150, memory_current=50, memory_stat="anon 9")
    assert machine_checks.read_cgroup_limits(tmp_path, "4:cpu,memory:/a\n0::/\n") == [100]
    assert machine_checks.read_cgroup_limits(tmp_path, "4:cpu,memory:/a\n") == []


def test_the_memory_that_is_available_is_that_of_this_machine() -> None:
    assert 0 < machine_checks.measure_available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Ray's folder


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
COMPLAINT = "NVIDIA-SMI has failed because it couldn't communicate, at all, with the NVIDIA driver.\n"


def print_in_nvidia_smi(text: str) -> Any:
    """Let nvidia-smi print this text in the block."""
    return mock.patch.object(machine_checks.subprocess, "run", return_value=SimpleNamespace(stdout=text))


def test_what_nvidia_smi_prints_is_read() -> None:
    with print_in_nvidia_smi(f"0, GPU-5a4b, NVIDIA H100 80GB HBM3\n1, GPU-77aa, NVIDIA H100, 94GB\n{COMPLAINT}\n"):
        names = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3"), Gpu("1", "GPU-77aa", "NVIDIA H100, 94GB")
        assert detect_gpus({}) == names
    with print_in_nvidia_smi(MEMORY + COMPLAINT):
        assert query_gpu_memory() == {"GPU-5a4b": GpuMemory(81037, 81559), "GPU-88cc": GpuMemory(1024, 81559)}
    for complaint in (COMPLAINT, "No devices were found\n", ""):
        with print_in_nvidia_smi(complaint):
            assert (query_gpu_memory(), detect_gpus({})) == ({}, ())

"""Detect the visible GPUs of this machine and the CPU cores that this process may use."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
"""Where the NVIDIA driver has one folder per GPU."""


class Gpu(NamedTuple):
    """One visible GPU."""

    id: str
    """As in CUDA_VISIBLE_DEVICES, an index or a UUID."""
    uuid: str
    """Empty if unknown."""
    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""


def detect_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Detect the GPUs that a process with this environment would see; empty without an NVIDIA driver.

    Asks nvidia-smi or, if that fails, the driver's /proc folder. CUDA is not loaded, since it would create a context on
    a GPU and torch takes seconds to import.
    """
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.strip() in ("", "-1"):
        return ()
    if (rows := query_nvidia_smi("--query-gpu=index,uuid,name", 3, number=0)) is not None:
        return select_visible(tuple(Gpu(*row) for row in rows), visible_devices)
    folders = sorted(_PROC_GPUS.iterdir()) if _PROC_GPUS.is_dir() else []
    return select_visible(tuple(Gpu(str(index), "", "GPU") for index, _ in enumerate(folders)), visible_devices)


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


def query_nvidia_smi(query: str, n_fields: int, number: int) -> list[list[str]] | None:
    """Run nvidia-smi; return the fields of each line, or None if it is missing or fails.

    number: the index of a field that is a number. Lines without it are complaints, and are skipped.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[field.strip() for field in line.split(",", n_fields - 1)] for line in text.splitlines()]
    return [row for row in rows if len(row) == n_fields and row[number].isdecimal()]


def count_cpus() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""The processors of this machine: its visible GPUs, and the cores that this process may use."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


class Gpu(NamedTuple):
    """One visible GPU: the id that CUDA_VISIBLE_DEVICES takes, its unique id where known, and its product name."""

    id: str
    uuid: str
    name: str


def detect_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The CUDA GPUs that a process started here would see, without loading CUDA; none where there is no driver."""
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.strip() in ("", "-1"):
        return ()
    return select_visible(_query_gpus(), visible_devices)


def select_visible(gpus: tuple[Gpu, ...], visible_devices: str | None) -> tuple[Gpu, ...]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES names, in its order; it ends at its first unknown entry, as in CUDA."""
    if visible_devices is None:
        return gpus
    selected_gpus: list[Gpu] = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        matching_gpus = [gpu for gpu in gpus if entry and (gpu.id == entry or gpu.uuid.startswith(entry))]
        if not matching_gpus and not (gpus and entry.startswith("MIG-")):
            break
        selected_gpus.append(matching_gpus[0]._replace(id=entry) if matching_gpus else Gpu(entry, entry, gpus[0].name))
    return tuple(selected_gpus)


def _query_gpus() -> tuple[Gpu, ...]:
    """All GPUs of the machine, from nvidia-smi or, where it is missing, from the driver's own listing."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        folders = sorted(_PROC_GPUS.iterdir()) if _PROC_GPUS.is_dir() else []
        return tuple(Gpu(str(index), "", "GPU") for index, _ in enumerate(folders))
    return parse_gpu_listing(listing)


def parse_gpu_listing(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's lines `index, uuid, name`; other lines, such as its errors, are none."""
    rows = [[part.strip() for part in line.split(",", 2)] for line in text.splitlines()]
    return tuple(Gpu(*row) for row in rows if len(row) == 3 and row[0].isdecimal())


def count_cpus() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Find out whether this machine has compiled the kernels. Numba caches machine code; a marker says it is complete."""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from trainable.files.paths import find_cache_folder

COMPILE_COMMAND = "python -m trainable.tiny --compile"
"""Compiles the kernels. Studies run it before they start."""


def find_marker(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the marker, which exists if these kernels are compiled. Needs numba.

    Like numba's cache, its name depends on the kernels and their location, the versions of Python and numba, and the
    processor.
    """
    source = Path(__file__).with_name("compiled.py")
    versions = (sys.version, version("numba"), version("llvmlite"), environ.get("NUMBA_CACHE_DIR"))
    key = repr((str(source), source.read_bytes(), versions, _describe_processor()))
    return find_cache_folder(environ) / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def is_compiled(environ: Mapping[str, str] = os.environ) -> bool:
    """Check whether the kernels are compiled: the marker exists, and the machine code has not been deleted."""
    try:
        if not find_marker(environ).exists():
            return False
        folder = Path(__file__).parent / "__pycache__"
        # In other places, numba chooses the names of its folders, so they are not checked.
        is_beside = os.access(folder, os.W_OK) and not environ.get("NUMBA_CACHE_DIR")
        return not is_beside or any(folder.glob("compiled.sample_turn-*.nbi"))
    except OSError:  # for example, an unreadable home folder
        return False


def leave_marker() -> None:
    """Leave the marker if the cache is writable. Without it, the next study checks again."""
    with suppress(OSError):
        marker = find_marker()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _describe_processor() -> list[str]:
    """Return name and features of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features"))]

"""Whether this machine has compiled the kernels: numba keeps the machine code, and a marker says that it is whole."""

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
"""Compiles the kernels; studies run it before they start."""


def find_marker(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that says that these kernels are compiled, whether or not it exists; needs numba.

    Its name depends on what numba's own cache depends on: the kernels and where they are, the versions of Python and
    numba, and the processor.
    """
    source = Path(__file__).with_name("compiled.py")
    versions = (sys.version, version("numba"), version("llvmlite"), environ.get("NUMBA_CACHE_DIR"))
    key = repr((str(source), source.read_bytes(), versions, _describe_processor()))
    return find_cache_folder(environ) / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def is_compiled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the kernels are compiled: there is a marker, and nobody has deleted the machine code since."""
    try:
        if not find_marker(environ).exists():
            return False
        folder = Path(__file__).parent / "__pycache__"
        # Elsewhere, numba keeps machine code in folders whose names are its own affair.
        is_beside = os.access(folder, os.W_OK) and not environ.get("NUMBA_CACHE_DIR")
        return not is_beside or any(folder.glob("compiled.sample_turn-*.nbi"))
    except OSError:  # such as a home folder that this user may not read
        return False


def leave_marker() -> None:
    """Leave the marker, if the cache can be written; without it, the next study looks again."""
    with suppress(OSError):
        marker = find_marker()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _describe_processor() -> list[str]:
    """Name and features of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features"))]

"""Whether this machine has compiled the kernels: numba keeps the machine code, and a marker says that it is whole."""

import hashlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

COMPILE_COMMAND = "python -m trainable.tiny --compile"
"""Compiles the kernels; studies run it before they start."""


def find_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which this project keeps what it has made on this machine: TUNE_STUDY_CACHE, or the user's cache.

    environ: the environment variables. Relative paths are below the home folder, because runs have other working
    folders.
    """
    home = Path(environ.get("HOME", "~")).expanduser()
    cache = environ.get("TUNE_STUDY_CACHE")
    return home / (
        Path(cache).expanduser() if cache else Path(environ.get("XDG_CACHE_HOME") or ".cache") / "tune_study"
    )


def find_marker(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that says that these kernels are compiled, whether or not it exists; needs numba.

    Its name depends on the kernels, where they are installed, and the versions of Python and numba.
    """
    source = Path(__file__).with_name("compiled.py")
    key = repr((str(source), source.read_bytes(), sys.version, version("numba")))
    return find_cache_folder(environ) / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

"""The folder in which this project keeps what it has made on this machine and can make again."""

import os
from collections.abc import Mapping
from pathlib import Path


def find_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder TUNE_STUDY_CACHE, or tune_study/ in the user's cache; it may not exist yet.

    environ: the environment variables. Relative paths are below the home folder, because runs have other working
    folders.
    """
    home = Path(environ.get("HOME", "~")).expanduser()
    cache = environ.get("TUNE_STUDY_CACHE")
    return home / (
        Path(cache).expanduser() if cache else Path(environ.get("XDG_CACHE_HOME") or ".cache") / "tune_study"
    )

"""The teachers of the shipped policies: where this machine keeps them, and the command that makes one.

A teacher is its policy after the first stage of the recipe, before it learned the bad habits that training is to fix.
Teachers are not shipped: two CPU minutes make one again.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from trainable.config.command_lines import quote_argument


def find_teacher_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which this machine keeps the teacher `name` (a key of `TEACHERS`), whether or not it exists yet.

    environ: the environment variables. The folder is in TUNE_STUDY_CACHE, or else below the user's cache folder.
    """
    if environ.get("TUNE_STUDY_CACHE"):
        return Path(environ["TUNE_STUDY_CACHE"]).expanduser() / name
    home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return home / "tune_study" / name


def is_made(folder: Path) -> bool:
    """Whether a teacher is in its folder. The folder gets its name when it is complete."""
    return (folder / "config.json").is_file()


def explain_missing_teacher(name: str, folder: Path) -> str:
    """The message for a teacher that this machine has not made yet."""
    return (
        f"The teacher {name} has not been made on this machine: {folder} does not exist. Make it, in about two CPU "
        f"minutes, with `python -m trainable.tiny --policy {quote_argument(name)}`."
    )

"""The teachers of the shipped policies: where this machine keeps them, and the command that makes one.

A teacher is its policy after the first stage of the recipe, before it learned the bad habits that training is to fix.
Teachers are not shipped: two CPU minutes make one again.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODELS, TEACHERS
from trainable.files.paths import find_cache_folder


def find_teacher_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which this machine keeps the teacher `name` (a key of `TEACHERS`), whether or not it exists yet.

    environ: the environment variables. The folder is in `find_cache_folder`. Its name depends on the recipe, so that a
    teacher of another recipe is not taken for this one.
    """
    recipe = (SHIPPED_MODELS[TEACHERS[name]].folder / "recipe.json").read_bytes()
    return find_cache_folder(environ) / f"{name}-{hashlib.sha256(recipe).hexdigest()[:8]}"


def is_made(folder: Path) -> bool:
    """Whether a teacher is in its folder. The folder gets its name when it is complete."""
    return (folder / "config.json").is_file()


def format_teacher_command(name: str) -> str:
    """The command that makes the teacher `name` in the folder where runs look for it."""
    return f"python -m trainable.tiny --policy {quote_argument(name)}"


def explain_missing_teacher(name: str, folder: Path) -> str:
    """The message for a teacher that this machine has not made yet."""
    return (
        f"The teacher {name} has not been made on this machine: {folder} does not exist. Make it, in about two CPU "
        f"minutes, with `{format_teacher_command(name)}`."
    )

"""The teachers of the shipped policies: where this machine keeps them, and the command that makes one.

A teacher is its policy after the recipe's first stage, before it learned the bad habits that training should fix.
Teachers are not shipped, since making one takes two CPU minutes.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODELS, TEACHERS
from trainable.files.paths import find_cache_folder


def find_teacher_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which may not exist yet, for the teacher `name` (a key of `TEACHERS`) on this machine.

    Its name contains a hash of the recipe, so that teachers of other recipes are never mistaken for this one.
    """
    recipe = (SHIPPED_MODELS[TEACHERS[name]].folder / "recipe.json").read_bytes()
    return find_cache_folder(environ) / f"{name}-{hashlib.sha256(recipe).hexdigest()[:8]}"


def is_made(folder: Path) -> bool:
    """Check whether a teacher is in its folder, which gets its name only when it is complete."""
    return (folder / "config.json").is_file()


def format_teacher_command(name: str) -> str:
    """Return the command that makes the teacher `name` where runs look for it."""
    return f"python -m trainable.tiny --policy {quote_argument(name)}"


def explain_missing_teacher(name: str, folder: Path) -> str:
    """Return the message for a teacher that has not been made on this machine."""
    return (
        f"The teacher {name} has not been made on this machine: {folder} does not exist. Make it, in about two CPU "
        f"minutes, with `{format_teacher_command(name)}`."
    )

"""Format commands so that a user can paste them into a shell. All printed and stored commands are made here."""

import os
import shlex
import sys
from pathlib import Path

from trainable.files.paths import escape_controls

INSTALLED_PROGRAM = "tune-study"
"""The command that the installation of the package adds to an environment."""
PROGRAM = INSTALLED_PROGRAM if Path(sys.argv[0]).name == INSTALLED_PROGRAM else "python -m tune_study"
"""How the user started this program, which is how the commands that it prints start it, too."""


def format_command(*arguments: str | Path, program: str = PROGRAM) -> str:
    """Format a command of this program, with its arguments quoted for a shell.

    arguments: pass paths as Path: one that begins with `-` would be read as an option, so `./` is put in front.
    program: how the program itself is typed.
    """
    texts = [
        os.path.join(".", argument) if isinstance(argument, Path) and str(argument).startswith("-") else str(argument)
        for argument in arguments
    ]
    return " ".join([program, *map(quote_argument, texts)])


def split_words(text: str) -> list[str]:
    """Split a text into words, as a shell does. Raises ValueError for a quote without an end."""
    return shlex.split(text)


def quote_argument(text: str) -> str:
    """Quote one word of a command for a shell. What cannot be printed is shown as backslash escapes."""
    return escape_controls(shlex.quote(text))

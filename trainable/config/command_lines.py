"""Format commands so that a user can paste them into a shell. Every command that is printed or stored is made here."""

import os
import shlex
import sys
from pathlib import Path

INSTALLED_PROGRAM = "tune-study"
"""The command that the installation of the package adds to an environment."""
PROGRAM = INSTALLED_PROGRAM if Path(sys.argv[0]).name == INSTALLED_PROGRAM else "python -m tune_study"
"""How this program was typed, and how it is typed in the commands that it prints."""


def format_command(*arguments: str | Path, program: str = PROGRAM) -> str:
    """A command of this program with its arguments quoted for a shell.

    arguments: a path is given as a Path: a relative one whose name begins with `-` would be read as an option, so it
    gets a `./` in front. program: how the program itself is typed.
    """
    texts = [
        os.path.join(".", argument) if isinstance(argument, Path) and str(argument).startswith("-") else str(argument)
        for argument in arguments
    ]
    return " ".join([program, *map(quote_argument, texts)])


def quote_argument(text: str) -> str:
    """Quote one word of a command for a shell.

    A line break, another control character or a byte that is no UTF-8 is written as an escape sequence in the quotes
    $'...' of bash and zsh: as such, it would not survive the terminal from which it is copied.
    """
    if text.isprintable():
        return shlex.quote(text)
    # Letter by letter: other printable characters, such as accented ones, stay readable.
    return "$'" + "".join(_escape_character(character) for character in text) + "'"


def _escape_character(character: str) -> str:
    if character in ("\\", "'"):
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))

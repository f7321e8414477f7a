"""Parse JSON from a file of unknown origin: damage and excessive nesting raise an error that names the file."""

import json
import re
from pathlib import Path
from typing import Any

from trainable.files.paths import read_bytes, write_text

MAX_DEPTH = 100
"""Levels of brackets that a JSON value may have. A study's own files have at most six."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class DamagedFileError(ValueError):
    """A file of a study cannot be read; the message names the file and what is wrong with it."""


def parse_json(content: bytes) -> Any:
    """Parse a JSON document in UTF-8. Raise ValueError if it is no JSON or nested deeper than MAX_DEPTH."""
    # Python's parser fails at a depth that depends on its caller's stack, so the depth is checked before.
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _measure_depth(content) > MAX_DEPTH:
        raise ValueError(f"brackets are nested deeper than {MAX_DEPTH} levels")
    return json.loads(content)


def _measure_depth(content: bytes) -> int:
    """The deepest nesting of brackets outside strings; stops above MAX_DEPTH."""
    depth = max_depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", content)):
        depth += 1 if bracket.group() in b"[{" else -1
        max_depth = max(max_depth, depth)
        if max_depth > MAX_DEPTH:
            break
    return max_depth


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: there is no file.
        UnsafePathError: `path` is a link, or is no regular file.
        DamagedFileError: the content is not JSON.
    """
    try:
        return parse_json(read_bytes(path))
    except ValueError as error:
        raise DamagedFileError(
            f"{path} is not valid JSON ({error}). It is always written in one piece, so another program or a disk "
            "error changed it: restore it from a copy."
        ) from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file, if it cannot be read, or if it holds no JSON object."""
    try:
        content = read_json(path)
    except (OSError, DamagedFileError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: object) -> None:
    """Replace a file by `content` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

"""Read and write JSON files of unknown origin: damage and excessive nesting raise an error that names the file.

The files of a study that hold one object each (study.json, run.json, status.json) have a last key, `checksum`, which
covers all other keys. Whoever changes such a file by hand makes it unreadable.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainable.files.control_characters import escape_controls
from trainable.files.paths import read_bytes, write_text

CHECKSUM_KEY = "checksum"
CHECKSUM_DIGITS = 16

MAX_DEPTH = 100
"""Levels of brackets that a JSON value may have. A study's own files have at most six."""

MAX_BYTES = 2**26
"""Size of the largest JSON file that is read. A study.json with the most runs that a plan may have is far smaller."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, which the end of the document ends as well. The repeat is possessive: it takes linear time in any text."""
_BRACKET = re.compile(rb"[\[\]{}]")


class DamagedFileError(ValueError):
    """A file of a study cannot be read; the message names the file and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_controls(message))


class DamageWarning(UserWarning):
    """A file of a study is damaged and was not read; the message names it and what was read instead, if anything."""


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
        DamagedFileError: the content is not JSON, or too large.
    """
    try:
        return parse_json(read_bytes(path, MAX_BYTES))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: it is not valid JSON ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read an object that `write_object` wrote, without its checksum. Raises the errors of `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} is damaged: it does not hold a JSON object")
    checksum = content.pop(CHECKSUM_KEY, None)
    if checksum != _compute_checksum(content):
        raise DamagedFileError(f"{path} is damaged: it does not match its checksum")
    return content


def find_object(path: Path) -> dict[str, Any] | None:
    """The object that `write_object` wrote to a file; None if there is no file, or if it cannot be read."""
    try:
        return read_object(path)
    except (OSError, DamagedFileError):
        return None


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by `content` with a checksum, atomically."""
    write_text(path, format_object(content))


def format_object(content: Mapping[str, Any]) -> str:
    """`content` as indented JSON whose last key is its checksum."""
    # What `read_object` will see: JSON has neither tuples nor keys that are not text.
    parsed_content = json.loads(json.dumps(dict(content)))
    parsed_content[CHECKSUM_KEY] = _compute_checksum(parsed_content)
    return json.dumps(parsed_content, indent=2, ensure_ascii=False) + "\n"


def _compute_checksum(content: Mapping[str, Any]) -> str:
    """The first digits of the SHA-256 of an object; independent of white space and of the order of keys."""
    canonical_text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical_text.encode()).hexdigest()[:CHECKSUM_DIGITS]

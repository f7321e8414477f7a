"""Read and write JSON files of unknown origin. Damage raises an error that names the file.

The files of a study with one object each (study.json, run.json, status.json) have a last key, `checksum`, which covers
all other keys. So editing such a file by hand makes it unreadable.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from trainable.files.paths import escape_controls, read_bytes, write_text

CHECKSUM_KEY = "checksum"
CHECKSUM_DIGITS = 16

MAX_BYTES = 2**26
"""Maximum size of a JSON file to read. A study.json with the maximum number of runs is far smaller."""


class DamagedFileError(ValueError):
    """Raised if a file of a study cannot be read. The message names the file and its problem."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_controls(message))


class DamageWarning(UserWarning):
    """Warns that a damaged file of a study was not read. The message names it, and what was read instead, if any."""


def parse_json(content: bytes) -> Any:
    """Parse a JSON document in UTF-8. Raise ValueError if it is none, or nested too deeply for Python."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def parse_finite(value: object) -> float | None:
    """Convert `value` to a float, or to None if it is not a finite number (text, NaN, infinity, None, a bool)."""
    # In Python a bool is a Real, but in a column of numbers, True is a mistake and not a 1.
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def read_object(path: Path) -> dict[str, Any]:
    """Read an object that `write_object` wrote, without its checksum.

    Raises:
        FileNotFoundError: if there is no file.
        UnsafePathError: if `path` is a link.
        DamagedFileError: if the content is no such object, or too large.
    """
    try:
        content = parse_json(read_bytes(path, MAX_BYTES))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: it is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} is damaged: it does not hold a JSON object")
    checksum = content.pop(CHECKSUM_KEY, None)
    if checksum != _compute_checksum(content):
        raise DamagedFileError(f"{path} is damaged: it does not match its checksum")
    return content


def find_object(path: Path) -> dict[str, Any] | None:
    """Read an object that `write_object` wrote, or return None if there is no file or it cannot be read."""
    try:
        return read_object(path)
    except (OSError, DamagedFileError):
        return None


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by `content` with a checksum, atomically."""
    write_text(path, format_object(content))


def format_object(content: Mapping[str, Any]) -> str:
    """Format `content` as indented JSON with its checksum as the last key."""
    # Convert to what `read_object` will see, since JSON has no tuples, and only text as keys.
    parsed_content = json.loads(json.dumps(dict(content)))
    parsed_content[CHECKSUM_KEY] = _compute_checksum(parsed_content)
    return json.dumps(parsed_content, indent=2, ensure_ascii=False) + "\n"


def _compute_checksum(content: Mapping[str, Any]) -> str:
    """Compute the first digits of the SHA-256 of an object, independently of white space and the order of keys."""
    canonical_text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical_text.encode()).hexdigest()[:CHECKSUM_DIGITS]

"""Read Python files that a user typed, and show how their text has changed."""

import difflib
from pathlib import Path

from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError

MAX_BYTES = 1_000_000
MAX_DIFF_LINES = 40


def read_source(path_text: str, purpose: str) -> str:
    """The text of a Python file. Raise PlanError if it cannot be read, or is none.

    purpose: what the file is for, after "type the path of a Python file".
    """
    path = Path(path_text).expanduser()
    shown_path = format_value(path_text, 1000)
    if not path.is_file():
        raise PlanError(f"There is no file {shown_path}: type the path of a Python file {purpose}.")
    try:
        content = path.read_bytes()
        if len(content) > MAX_BYTES:
            raise PlanError(f"{shown_path} has more than {MAX_BYTES} bytes: type the path of a file {purpose}.")
        return content.decode()
    except UnicodeDecodeError:
        raise PlanError(f"{shown_path} is not a text in UTF-8: type the path of a Python file.") from None
    except OSError as error:
        raise PlanError(f"{shown_path} cannot be read: {error.strerror}.") from None


def format_changes(old_text: str, new_text: str) -> str:
    """The lines in which a file differs from its text when a study was started, indented, for a message."""
    lines = list(
        difflib.unified_diff(
            old_text.splitlines(), new_text.splitlines(), "when the study was started", "now", lineterm="", n=1
        )
    )
    return "\n  ".join(lines[:MAX_DIFF_LINES] + ["..."] * (len(lines) > MAX_DIFF_LINES))

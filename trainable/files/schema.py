"""The schema number of the files of a study, by which a version recognizes files that it cannot read."""

from trainable.files.control_characters import is_printable

SCHEMA = 2
"""It increases when a file changes so that an earlier version cannot read it."""

MAX_RUNS = 10_000
"""Runs that a study may have. More would exceed what Ray Tune schedules, and what can be read at once."""

_MAX_NAME_BYTES = 255
"""Bytes that the name of a folder may have."""


def is_run_id(text: str) -> bool:
    """Whether `text` can be a run_id, which names a folder. Plans and readers of study.json ask this function.

    It has no slash and no leading dot, so that it cannot name a folder outside the study's, and is printable.
    """
    is_name = text != "" and not text.startswith(".") and "/" not in text and is_printable(text)
    return is_name and len(text.encode()) <= _MAX_NAME_BYTES


def find_schema_problem(folder: object, schema: object) -> str:
    """Why this version cannot read the folder of a study; empty if it can.

    folder: results/<run>, as it was typed. schema: that of its study.json.
    """
    if schema == SCHEMA:
        return ""
    return (
        f"{folder} has files of schema {schema!r}, and this version reads schema {SCHEMA}. Read them with the version "
        f"that wrote them (`versions` and `git` in study.json), or run the study again with another --output"
    )

"""Parse the lines of a run's files, checking each before it enters a table.

A process that is killed while appending can leave a truncated last line in a JSONL file. Invalid lines of any kind are
skipped.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from analysis.data.schemas import BOOL, CATEGORY, FLOAT, INT, NULLABLE_INT, TEXT, Row, get_schemas
from trainable.config.setting_types import flatten_settings
from trainable.families import Family
from trainable.runs.records import GRADIENT_COLUMNS

ANALYSIS_SOURCES = ("train", "probe")


def flatten_config(config: Mapping[str, Any]) -> Row:
    """Flatten a nested configuration to dotted names for a table. Lists become JSON text."""
    fields = flatten_settings(config).items()
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in fields}


def is_int64(value: object) -> bool:
    """Check whether `value` is an integer that fits into 64 bits. True and False do not count."""
    return type(value) is int and abs(value) < 2**63


def is_number(value: object) -> bool:
    """Check whether `value` is a number that fits into a float64. True and False count as 1 and 0."""
    # json.loads accepts NaN, Infinity and integers of any length; the comparison is False for all that do not fit.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def is_text(value: object) -> bool:
    """Check whether `value` is text that UTF-8 can encode, unlike the lone surrogates that JSON escapes can produce."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def is_bool(value: object) -> bool:
    """Check whether `value` is True or False."""
    return isinstance(value, bool)


MAX_OWN_NAME_LENGTH = 80
"""Maximum length of the name of a column that a plug-in game or another trainer adds."""

_VALIDATORS: dict[str, Callable[[object], bool]] = {
    TEXT: is_text,
    CATEGORY: is_text,
    FLOAT: is_number,
    INT: is_int64,
    NULLABLE_INT: is_int64,
    BOOL: is_bool,
}


def get_evaluation_key(row: Row) -> tuple[int, str, str] | None:
    """Return (step, split, mode) of a line of levels.jsonl, or None if a field is missing or has the wrong type."""
    has_names = all(is_text(row.get(name)) for name in ("split", "mode", "success"))
    has_lists = all(
        isinstance(row.get(name), list) and all(map(is_int64, row[name])) for name in ("levels", "clusters")
    )
    return (row["step"], row["split"], row["mode"]) if has_names and has_lists and row["step"] >= 0 else None


def get_analysis_key(row: Row) -> tuple[int, str, bool] | None:
    """Return (step, source, prefilter) of a line of gradients.jsonl or probes.jsonl, or None if a field is invalid."""
    if row.get("source") not in ANALYSIS_SOURCES or not is_bool(row.get("prefilter")) or row["step"] < 0:
        return None
    has_rows = has_valid_entries(
        row.get("rows"), {"bucket": is_text, "component": is_text, "uses_training_batch": is_bool}
    )
    has_groups = has_valid_entries(row.get("groups"), {"bucket": is_text, "group": is_int64})
    return (row["step"], row["source"], row["prefilter"]) if has_rows and has_groups else None


def has_valid_entries(entries: object, validators: Mapping[str, Callable[[object], bool]]) -> bool:
    """Check whether `entries` is a list of objects with valid values for all keys of `validators`."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and all(is_valid(entry.get(name)) for name, is_valid in validators.items())
        for entry in entries
    )


def parse_step_row(row: Row, family: Family) -> Row:
    """Extract the step and the columns of a line of metrics.jsonl, dropping values of the wrong type."""
    dtypes = get_schemas(family.name)["steps"]
    names = [column.name for column in family.step_columns if column.name in row]
    valid_values = {name: row[name] for name in names if row[name] is None or _VALIDATORS[dtypes[name]](row[name])}
    # Measures of a plug-in game, or of another trainer.
    own_names = [
        name
        for name in row
        if name not in dtypes
        and name.startswith(family.own_prefixes)
        and len(name) <= MAX_OWN_NAME_LENGTH
        and (name.isidentifier() or "" in family.own_prefixes)
    ]
    own_values = {
        name: row[name] for name in own_names[: family.max_own_columns] if row[name] is None or is_number(row[name])
    }
    return {"step": row["step"], **valid_values, **own_values}


def make_analysis_rows(lines: Iterable[Row], frame_name: str) -> list[Row]:
    """Make the rows of a frame from the analyses in `lines`, dropping values of the wrong type.

    frame_name: gradients, with a row per component and bucket, or gradient_groups, with a row per group.
    """
    dtypes, key, names = get_schemas("ppo")[frame_name], "groups", ["bucket", "group", "reward_std"]
    if frame_name == "gradients":
        key, names = "rows", [column.name for column in GRADIENT_COLUMNS]
    return [
        {
            **{name: entry[name] for name in names if _VALIDATORS[dtypes[name]](entry.get(name))},
            **{name: line[name] for name in ("step", "source", "prefilter")},
        }
        for line in lines
        for entry in line[key]
    ]

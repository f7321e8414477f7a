"""Readers for the files of a run: JSON objects and JSON lines.

A process that is killed while it appends can leave a truncated last line in a JSONL file. Such a line, and any other
invalid line, is skipped. JSON objects have a checksum. A damaged study.json is an error, since it says what the study
is; of a run.json or status.json that is damaged, a warning says so, and the rows are read without it.
"""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.data.families import (
    BOOL,
    CATEGORY,
    FAMILIES,
    FLOAT,
    INT,
    NULLABLE_INT,
    RUN_FILE_SCHEMA,
    TEXT,
    TIME,
    Row,
    TableFamily,
)
from trainable.config.aliases import flatten_settings
from trainable.files.json_lines import Lines
from trainable.files.json_values import DamagedFileError, DamageWarning, read_object
from trainable.files.paths import UnsafePathError
from trainable.files.schema import MAX_RUNS, is_run_id
from trainable.runs.records import GRADIENT_COLUMNS, STATUSES
from trainable.runs.run_ends import OPEN_STATUSES

ANALYSIS_SOURCES = ("train", "probe")


def read_valid_object(path: Path) -> Row:
    """Read a JSON object whose fields have the types of the columns with their names.

    Raises:
        FileNotFoundError: there is no file.
        UnsafePathError: the file is a link, or no regular file.
        DamagedFileError: the file is damaged.
    """
    content = read_object(path)
    invalid_names = [name for name, value in content.items() if not _is_valid_value(name, value)]
    if invalid_names:
        raise DamagedFileError(f"{path} is damaged: it has invalid values ({', '.join(invalid_names)})")
    return content


def find_valid_object(path: Path) -> Row:
    """Read a JSON object like `read_valid_object`; empty, with a warning, if the file cannot be read.

    A file that does not exist is no reason for a warning: a run that has not started has no files.
    """
    try:
        return read_valid_object(path)
    except FileNotFoundError:
        return {}
    except (DamagedFileError, UnsafePathError) as error:
        warnings.warn(f"{error}.", DamageWarning, stacklevel=3)
        return {}


def select_valid_values(fields: Row) -> Row:
    """Those of `fields` that are valid for a JSON file of a run."""
    return {name: value for name, value in fields.items() if _is_valid_value(name, value)}


def flatten_config(config: Mapping[str, Any]) -> Row:
    """A nested configuration as dotted fields for a table, in which lists become JSON text."""
    fields = flatten_settings(config).items()
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in fields}


def find_steps_total(config: object) -> int | None:
    """The planned number of steps of a configuration, or None if it does not contain it."""
    steps_total = flatten_config(config).get("trainer.total_training_steps") if isinstance(config, dict) else None
    return steps_total if is_int64(steps_total) else None


def is_int64(value: object) -> bool:
    """Whether `value` is an integer that fits into 64 bits. True and False do not count."""
    return type(value) is int and abs(value) < 2**63


def is_number(value: object) -> bool:
    """Whether `value` is a number that fits into a float64. True and False count as 1 and 0."""
    # json.loads accepts NaN, Infinity and integers of any length; the comparison is False for all that do not fit.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def is_text(value: object) -> bool:
    """Whether `value` is text that UTF-8 can encode. JSON escapes can produce lone surrogates, which UTF-8 cannot."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _is_time(value: object) -> bool:
    return isinstance(value, str) and not pd.isna(pd.to_datetime(value, utc=True, format="ISO8601", errors="coerce"))


def is_bool(value: object) -> bool:
    """Whether `value` is True or False."""
    return isinstance(value, bool)


MAX_OWN_COLUMNS, MAX_OWN_NAME_LENGTH = 32, 80
"""Limits of the columns that a game of the user adds: their number, and the length of a name."""

_VALIDATORS: dict[str, Callable[[object], bool]] = {
    TEXT: is_text,
    CATEGORY: is_text,
    FLOAT: is_number,
    INT: is_int64,
    NULLABLE_INT: is_int64,
    TIME: _is_time,
    BOOL: is_bool,
}


def _is_valid_value(name: str, value: object) -> bool:
    """Whether `value` is valid for a field of a JSON file of a run. A field that is no column may have any value."""
    if name == "config":
        return isinstance(value, dict) and all(_is_setting(*field) for field in flatten_config(value).items())
    if name == "status":
        return value in (*STATUSES, *OPEN_STATUSES)
    if name == "runs":
        return isinstance(value, list) and len(value) <= MAX_RUNS and all(map(_is_run_entry, value))
    if name == "axis":
        if not isinstance(value, dict) or not is_text(value.get("dose", "")):
            return False
        values = value.get("values", [])
        return isinstance(values, list) and len(values) <= MAX_RUNS and all(map(is_text, values))
    if name == "seeds":
        return isinstance(value, list) and len(value) <= MAX_RUNS and all(map(is_int64, value))
    if name == "family":
        return is_text(value)
    if name == "points":
        return _is_points(value)
    if name == "preset_steps":
        return value is None or (isinstance(value, int) and is_int64(value) and value > 0)
    if name == "search":
        return value is None or _is_search(value)
    dtype = RUN_FILE_SCHEMA.get(name)
    return dtype is None or value is None or _VALIDATORS[dtype](value)


def _is_run_entry(entry: object) -> bool:
    """Whether an entry of `runs` in study.json has a name that is a folder, and valid fields."""
    return (
        isinstance(entry, dict)
        and is_text(entry.get("run_id"))
        and is_run_id(entry["run_id"])
        and all(_is_valid_value(name, value) for name, value in entry.items())
    )


def _is_points(value: object) -> bool:
    """Whether `points` of study.json has settings by arm, and settings have texts."""
    return (
        isinstance(value, dict)
        and len(value) <= MAX_RUNS
        and all(
            is_text(arm)
            and isinstance(settings, dict)
            and all(is_text(name) and is_text(text) for name, text in settings.items())
            for arm, settings in value.items()
        )
    )


def _is_search(value: object) -> bool:
    """Whether `search` of study.json has objectives and a space whose dimensions can be searched."""
    if not isinstance(value, dict) or not is_int64(value.get("num_points")):
        return False
    objectives, space = value.get("objectives"), value.get("space")
    if objectives not in (["success"], ["success", "cost"]) or not isinstance(space, list):
        return False
    if not 0 < len(space) <= MAX_RUNS or not all(map(_is_dimension, space)):
        return False
    return is_int64(value.get("points_per_round")) and len({entry["name"] for entry in space}) == len(space)


def _is_dimension(entry: object) -> bool:
    """Whether an entry of a space is a choice between texts, or an interval."""
    if not isinstance(entry, dict) or not (is_text(entry.get("name")) and is_text(entry.get("setting"))):
        return False
    flags = is_bool(entry.get("is_log")) and is_bool(entry.get("is_integer"))
    if not flags or not all(_is_text_list(entry.get(name)) for name in ("values", "condition")):
        return False
    if len(entry["condition"]) not in (0, 2):
        return False
    if entry["values"]:
        return len(set(entry["values"])) == len(entry["values"])
    if not (is_number(entry.get("low")) and is_number(entry.get("high"))):
        return False
    low, high = float(entry["low"]), float(entry["high"])
    if not -math.inf < low < high < math.inf:  # false for NaN, too
        return False
    if entry["is_integer"] and not (max(-low, high) < 2**53 and low.is_integer() and high.is_integer()):
        return False
    return low > 0 or not entry["is_log"]


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_RUNS and all(map(is_text, value))


def _is_setting(name: str, value: object) -> bool:
    """Whether a field of `config` in run.json can be stored in a column of the trials."""
    return is_text(name) and (value is None or isinstance(value, bool | float) or is_int64(value) or is_text(value))


def select_lines(lines: Lines, key: Callable[[Row], Any], *, drop_rolled_back: bool = True) -> list[Row]:
    """The last intact line of each key, sorted by key. Lines without a key are skipped.

    drop_rolled_back: a line whose step is smaller than that of previous lines means that the run was restored from an
    earlier checkpoint. The previous lines of larger steps are then dropped, since the restored run repeats these steps.
    """
    rows_by_key: dict[Any, Row] = {}
    last_step = -1  # the largest step of `rows_by_key`, so that only a line that goes back costs a search
    for row in lines.records:
        row_key = key(row) if is_int64(row.get("step")) else None
        if row_key is None:
            continue
        if drop_rolled_back:
            if row["step"] < last_step:
                rows_by_key = {
                    old_key: old_row for old_key, old_row in rows_by_key.items() if old_row["step"] <= row["step"]
                }
            last_step = row["step"]
        rows_by_key[row_key] = row
    return [rows_by_key[name] for name in sorted(rows_by_key)]


def make_step_key(family: TableFamily) -> Callable[[Row], int | None]:
    """A key function for metrics.jsonl that returns the step, or None if it is below the first step of the family."""
    return lambda row: row["step"] if row["step"] >= family.first_step else None


def get_evaluation_key(row: Row) -> tuple[int, str, str] | None:
    """(step, split, mode) of a line of levels.jsonl, or None if a field is missing or has the wrong type."""
    has_names = all(is_text(row.get(name)) for name in ("split", "mode", "success"))
    has_lists = all(
        isinstance(row.get(name), list) and all(map(is_int64, row[name])) for name in ("levels", "clusters")
    )
    return (row["step"], row["split"], row["mode"]) if has_names and has_lists and row["step"] >= 0 else None


def get_analysis_key(row: Row) -> tuple[int, str, bool] | None:
    """(step, source, prefilter) of a line of gradients.jsonl or probes.jsonl, or None if a field is invalid."""
    if row.get("source") not in ANALYSIS_SOURCES or not is_bool(row.get("prefilter")) or row["step"] < 0:
        return None
    has_rows = has_valid_entries(
        row.get("rows"), {"bucket": is_text, "component": is_text, "uses_training_batch": is_bool}
    )
    has_groups = has_valid_entries(row.get("groups"), {"bucket": is_text, "group": is_int64})
    return (row["step"], row["source"], row["prefilter"]) if has_rows and has_groups else None


def has_valid_entries(entries: object, validators: Mapping[str, Callable[[object], bool]]) -> bool:
    """Whether `entries` is a list of objects that all have valid values for the keys of `validators`."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and all(is_valid(entry.get(name)) for name, is_valid in validators.items())
        for entry in entries
    )


def parse_step_row(row: Row, family: TableFamily) -> Row:
    """The step and the columns of a line of metrics.jsonl, without values of the wrong type."""
    dtypes = family.schemas["steps"]
    names = [column.name for column in family.step_columns if column.name in row]
    valid_values = {name: row[name] for name in names if row[name] is None or _VALIDATORS[dtypes[name]](row[name])}
    own_names = [name for name in row if name not in dtypes and _is_own_column(name, family)][:MAX_OWN_COLUMNS]
    own_values = {name: row[name] for name in own_names if row[name] is None or _VALIDATORS[FLOAT](row[name])}
    return {"step": row["step"], **valid_values, **own_values}


def _is_own_column(name: str, family: TableFamily) -> bool:
    """Whether a column may be a measure of a game of the user."""
    return name.startswith(family.own_prefixes) and len(name) <= MAX_OWN_NAME_LENGTH and name.isidentifier()


def make_gradient_rows(lines: Iterable[Row]) -> list[Row]:
    """One row per component and bucket of the analyses in `lines`, without values of the wrong type."""
    names = [column.name for column in GRADIENT_COLUMNS]
    return [_make_row(line, entry, names, "gradients") for line in lines for entry in line["rows"]]


def make_group_rows(lines: Iterable[Row]) -> list[Row]:
    """One row per group of the analyses in `lines`."""
    names = ["bucket", "group", "reward_std"]
    return [_make_row(line, entry, names, "gradient_groups") for line in lines for entry in line["groups"]]


def _make_row(line: Row, entry: Row, names: Iterable[str], frame_name: str) -> Row:
    dtypes = FAMILIES["ppo"].schemas[frame_name]
    valid_values = {
        name: entry[name] for name in names if entry.get(name) is not None and _VALIDATORS[dtypes[name]](entry[name])
    }
    return {**valid_values, **{name: line[name] for name in ("step", "source", "prefilter")}}

"""The files of a run as they are read: JSON that is written whole, and lines of which a kill may have torn the last.

A file of lines is read for what stands in it: a line that is torn, odd or without a key is left out. A file that is
written whole and is damaged is an error that names it.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.data.families import COUNT, COUNT_OR_MISSING, NUMBER, RUN_FILES, TEXT, TIME, TRUTH, Row, TableFamily
from analysis.data.frames import SCHEMAS
from trainable.runs.records import GRADIENT_COLUMNS, STATUSES

SOURCES = ("train", "probe")


def read_json(path: Path) -> Row:
    """A JSON object, or an empty one where the file does not exist; ValueError where it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); it is written whole, so something else changed it.") from None
    odd = [name for name, value in found.items() if not _fits(name, value)] if isinstance(found, dict) else ["all"]
    if odd:
        raise ValueError(f"{path} is damaged (in {', '.join(odd)}); it is written whole, so something else changed it.")
    return dict(found)


def flat(config: Row, prefix: str = "") -> Row:
    """A nested configuration as dotted fields; a list is kept as its JSON text."""
    fields: Row = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return fields


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number that 64 bits hold; True and False are none."""
    return type(value) is int and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_text(value: object) -> bool:
    """Whether `value` is text that UTF-8 has; JSON can spell half a character."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _is_time(value: object) -> bool:
    return isinstance(value, str) and not pd.isna(pd.to_datetime(value, utc=True, format="ISO8601", errors="coerce"))


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


_IS: dict[str, Callable[[object], bool]] = {
    TEXT: _is_text,
    NUMBER: _is_number,
    COUNT: is_whole,
    COUNT_OR_MISSING: is_whole,
    TIME: _is_time,
    TRUTH: _is_truth,
}


def _fits(name: str, value: object) -> bool:
    """Whether `value` can stand in a column, or for the settings; a name that is no column takes anything."""
    if name == "config":
        return isinstance(value, dict) and all(_is_setting(*field) for field in flat(value).items())
    if name == "status":
        return value in (*STATUSES, "running")
    kind = RUN_FILES.get(name)
    return kind is None or value is None or _IS[kind](value)


def _is_setting(name: str, value: object) -> bool:
    """Whether a field of run.json's `config` can stand in a column of the trials."""
    return _is_text(name) and (value is None or isinstance(value, bool | float) or is_whole(value) or _is_text(value))


def read_lines(path: Path, key: Callable[[Row], Any], *, goes_back: bool = True) -> list[Row]:
    """JSON lines: the last one of each key, sorted by key. A line that a kill tore, or without a key, is left out.

    goes_back: a line of an earlier step than those before it is of a run that went back, and gave all of them up.
    """
    if not path.is_file():
        return []
    found: dict[Any, Row] = {}
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        name = key(row) if isinstance(row, dict) and is_whole(row.get("step")) else None
        if name is None:
            continue
        if goes_back:
            found = {other: kept for other, kept in found.items() if kept["step"] <= row["step"]}
        found[name] = row
    return [found[name] for name in sorted(found)]


def step_of(family: TableFamily) -> Callable[[Row], int | None]:
    """The step of a line of metrics.jsonl; None below the family's first."""
    return lambda row: row["step"] if row["step"] >= family.first_step else None


def evaluation_of(row: Row) -> tuple[int, str, str] | None:
    """(step, split, mode) of a line of levels.jsonl; None where something in it is missing or of another type."""
    names = all(_is_text(row.get(name)) for name in ("split", "mode", "success"))
    lists = all(isinstance(row.get(name), list) and all(map(is_whole, row[name])) for name in ("levels", "clusters"))
    return (row["step"], row["split"], row["mode"]) if names and lists and row["step"] >= 0 else None


def analysis_of(row: Row) -> tuple[int, str, bool] | None:
    """(step, source, prefilter) of a line of gradients.jsonl or probes.jsonl; None where it is odd, as above."""
    if row.get("source") not in SOURCES or not _is_truth(row.get("prefilter")) or row["step"] < 0:
        return None
    texts = _each(row.get("rows"), {"bucket": _is_text, "component": _is_text, "uses_training_batch": _is_truth})
    groups = _each(row.get("groups"), {"bucket": _is_text, "group": is_whole})
    return (row["step"], row["source"], row["prefilter"]) if texts and groups else None


def _each(entries: object, needed: dict[str, Callable[[object], bool]]) -> bool:
    """Whether `entries` is a list of objects in each of which the needed values are there and of their types."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and all(is_one(entry.get(name)) for name, is_one in needed.items()) for entry in entries
    )


def measured(row: Row, family: TableFamily) -> Row:
    """The step of a line of metrics.jsonl and its columns; a value that cannot stand in its column is missing."""
    kinds = family.schemas["steps"]
    names = [column.name for column in family.step_columns if column.name in row]
    fitting = {name: row[name] for name in names if row[name] is None or _IS[kinds[name]](row[name])}
    return {"step": row["step"], **fitting}


def gradient_rows(lines: Iterable[Row]) -> list[Row]:
    """A row for each component of each bucket of the analyses in `lines`; a value that does not fit is missing."""
    names = [column.name for column in GRADIENT_COLUMNS]
    return [_row(line, entry, names, "gradients") for line in lines for entry in line["rows"]]


def group_rows(lines: Iterable[Row]) -> list[Row]:
    """A row for each group of the analyses in `lines`."""
    names = ["bucket", "group", "reward_std"]
    return [_row(line, entry, names, "gradient_groups") for line in lines for entry in line["groups"]]


def _row(line: Row, entry: Row, names: Iterable[str], frame: str) -> Row:
    kinds = SCHEMAS[frame]
    fitting = {name: entry[name] for name in names if entry.get(name) is not None and _IS[kinds[name]](entry[name])}
    return {**fitting, **{name: line[name] for name in ("step", "source", "prefilter")}}

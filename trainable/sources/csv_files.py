"""Read tables: CSV of any separator with a row per step, and what W&B exports of a chart."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainable.sources.logs import (
    STEP_KEYS,
    Entries,
    LogError,
    Roles,
    RunLog,
    find_step_key,
    make_log,
    make_logs,
)

TABLE_SUFFIXES = (".csv", ".tsv")
"""Endings of files whose first line names the columns."""
_SEPARATORS = ",\t;"
_MAX_CELL_CHARACTERS = 2**24
_BOUNDS = ("__MIN", "__MAX")


def read_csv(path: Path, content: bytes, roles: Roles) -> list[RunLog]:
    """Read a table whose first line names its columns; empty if that line names no step, and the file no table.

    Empty cells are missing values. A column of text that is the same in all rows is a setting.

    Raises LogError for a table without a column of the step.
    """
    lines = content.replace(b"\0", b"").decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    header = lines[0] if lines else ""
    separator = max(_SEPARATORS, key=header.count)
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    reader = csv.DictReader(lines, delimiter=separator, restkey="", restval="")
    try:
        names = [name for name in reader.fieldnames or () if name]
        columns_by_run = _find_chart_columns(names)
        if not columns_by_run and not find_step_key(names, roles.step):
            if path.suffix not in TABLE_SUFFIXES or not names:
                return []
            raise LogError(
                f"{path} has no column of the training step: type --column step=NAME, or call it "
                f"{', '.join(STEP_KEYS[:4])}. Its columns are {', '.join(names[:15])}."
            )
        table = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise LogError(f"{path} is no table that can be read: {error} in line {reader.line_num}.") from None
    entries = [(line, {name: _parse(cells[name]) for name in names if cells[name].strip()}) for line, cells in table]
    if columns_by_run:
        return _make_chart_logs(path, names[0], columns_by_run, entries, roles.step)
    values = {name: {row.get(name) for _, row in entries} for name in names}
    settings = {name: texts.pop() for name, texts in values.items() if len(texts) == 1}
    settings = {name: text for name, text in settings.items() if isinstance(text, str)}
    return make_logs(path, "table", entries, settings, roles)


def _parse(cell: str) -> float | str:
    if cell in ("True", "False"):
        return float(cell == "True")
    try:
        return float(cell)
    except ValueError:
        return cell


def _find_chart_columns(names: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Find the columns of each run in a chart of W&B, by measurement; empty if the names are of another table.

    W&B calls columns `RUN - METRIC`, and puts their minimum and maximum beside them. The first column is the axis.

    >>> _find_chart_columns(["Step", "a - lr", "a - lr__MIN", "a - lr__MAX"])
    {'a': {'lr': 'a - lr'}}
    """
    columns: dict[str, dict[str, str]] = {}
    for name in names[1:]:
        run, separator, metric = name.rpartition(" - ")
        if separator and all(name + bound in names for bound in _BOUNDS):
            columns.setdefault(run, {})[metric] = name
    return columns


def _make_chart_logs(
    path: Path, axis: str, columns_by_run: Mapping[str, Mapping[str, str]], entries: Entries, step_name: str
) -> list[RunLog]:
    """Make the log of each run in a chart.

    Raises LogError if the axis is no step, such as the time, and the runs have no step beside it.
    """
    logs = []
    for run, columns in columns_by_run.items():
        run_entries = [
            (line, {axis: row.get(axis), **{metric: row[name] for metric, name in columns.items() if name in row}})
            for line, row in entries
            if any(name in row for name in columns.values())
        ]
        log = make_log(path, "W&B chart", run_entries, {}, step_name)
        if not log:
            raise LogError(
                f"{path} is a chart of W&B over {axis}, which has no training step of the run {run}: choose Step, or "
                "the trainer's counter of steps, as the axis of the chart and export it again."
            )
        log.run = run
        bounds = [[name + bound for bound in _BOUNDS] for name in columns.values()]
        num_means = sum(row.get(low) != row.get(high) for _, row in entries for low, high in bounds)
        if num_means:
            log.notes.append(
                f"{num_means} numbers of {run} are means of W&B, over steps, or over runs if the chart groups them: a "
                "group is no run, so export the chart without groups."
            )
        logs.append(log)
    return logs

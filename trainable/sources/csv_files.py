"""Read tables: CSV of any separator with a row per step."""

import csv
from pathlib import Path

from trainable.sources.logs import STEP_KEYS, LogError, Roles, RunLog, find_step_key, make_logs

TABLE_SUFFIXES = (".csv", ".tsv")
"""Endings of files whose first line names the columns."""
_SEPARATORS = ",\t;"
_MAX_CELL_CHARACTERS = 2**24


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
        if not find_step_key(names, roles.step):
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

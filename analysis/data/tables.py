"""Read and write the parquet tables of a study, which may come from untrusted sources and be built to exhaust memory.

A table contains the SHA-256 of its file, so that any changed byte is noticed.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainable.config.command_lines import format_command
from trainable.files.paths import atomic_write, read_bytes
from trainable.runs.study_record import SCHEMA

MAX_TABLE_BYTES = 2**30
"""Limit on a table's memory. The levels of a hundred runs with 40 evaluations of 512 levels take about a third."""
MAX_COLUMNS = 2000
"""Several times the largest table's number. The overhead of a column is not counted in MAX_TABLE_BYTES."""

_TEXT_TYPES = ("string", "large_string")
_OTHER_TYPES = (*_TEXT_TYPES, "null")
_NO_CHECKSUM = "0" * 64
_CHECKSUM = re.compile(rb'"sha256": "([0-9a-f]{64})"')
"""The checksum in the attributes of a table, which pandas writes as JSON near the end of the file. It is computed with
zeros in its place."""


def write_table(table: pd.DataFrame, path: Path, damage: Sequence[str] = ()) -> None:
    """Write a table of a study atomically.

    damage: problems in the files that the table was made from, in sentences. `get_damage` returns them.
    """
    marked_table = table.copy(deep=False)
    # pandas stores attrs in the file. The checksum must be the last of them.
    marked_table.attrs = {"schema": SCHEMA, "damage": list(damage), "sha256": _NO_CHECKSUM}
    content = add_checksum(marked_table.to_parquet(None, index=False))
    with atomic_write(path) as temp_path:
        temp_path.write_bytes(content)


def add_checksum(content: bytes) -> bytes:
    """Insert the correct checksum into the content of a table's file; ValueError if it has no place for one."""
    matches = list(_CHECKSUM.finditer(content))
    if not matches:
        raise ValueError("it has no checksum")
    start, end = matches[-1].span(1)  # the attributes come after all data
    checksum = hashlib.sha256(content[:start] + _NO_CHECKSUM.encode() + content[end:]).hexdigest()
    return content[:start] + checksum.encode() + content[end:]


def get_damage(table: pd.DataFrame) -> list[str]:
    """Return what was wrong with the files that a table of `read_table` was made from, in sentences."""
    damage = table.attrs.get("damage")
    return [text for text in damage if isinstance(text, str)] if isinstance(damage, list) else []


def read_table(path: Path) -> pd.DataFrame:
    """Read a table of a study.

    ValueError that names the file if it is damaged, has another schema, or would take more than `MAX_TABLE_BYTES`.
    """
    try:
        return _read_bounded(path)
    # pyarrow raises many kinds of errors for damaged bytes, some of them only when a column is decoded.
    except Exception as error:
        # The first line, shortened: pyarrow's messages may contain the damaged bytes.
        line = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(". ")
        raise ValueError(
            f"{path} cannot be read ({line}); `{format_command('report', path.parent)}` writes it again."
        ) from error


def _read_bounded(path: Path) -> pd.DataFrame:
    """Read a parquet file; ValueError if its decoded content would be too large."""
    content = read_bytes(path, MAX_TABLE_BYTES)
    # Checked first, because some damaged bytes crash pyarrow's native code.
    if add_checksum(content) != content:
        raise ValueError("it does not match its checksum")
    parquet_file: Any = pq.ParquetFile(pa.BufferReader(content))
    metadata, schema = parquet_file.metadata, parquet_file.schema_arrow
    if metadata.num_columns > MAX_COLUMNS:
        raise ValueError(f"it has {metadata.num_columns} columns, more than {MAX_COLUMNS}")
    row_groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    _check_size(
        8 * metadata.num_rows * metadata.num_columns
        + sum(group.column(i).total_uncompressed_size for group in row_groups for i in range(group.num_columns))
    )
    # Until it is decoded, a text that a billion rows share takes a single dictionary entry.
    for field in schema:
        value_type = _get_value_type(field.type)
        if not (pa.types.is_primitive(value_type) or str(value_type) in _OTHER_TYPES):
            raise ValueError(f"its column {field.name[:80]!r} has the type {str(field.type)[:80]}")
    text_names = [field.name for field in schema if str(_get_value_type(field.type)) in _TEXT_TYPES]
    table: Any = pq.read_table(pa.BufferReader(content), read_dictionary=text_names)
    # The size of the text columns once their dictionaries are decoded.
    chunks = [chunk for name in text_names for chunk in table[name].chunks]
    lengths = [pc.binary_length(chunk.dictionary).cast(pa.int64()).take(chunk.indices) for chunk in chunks]
    _check_size(sum(pc.sum(length).as_py() or 0 for length in lengths))
    for name in text_names:  # a categorical column stays a dictionary
        if not pa.types.is_dictionary(schema.field(name).type):
            table = table.set_column(table.column_names.index(name), name, table[name].cast(schema.field(name).type))
    frame: pd.DataFrame = table.to_pandas()
    schema_number = frame.attrs.get("schema", 0)
    if schema_number != SCHEMA:
        raise ValueError(f"it has schema {schema_number}, and this version reads schema {SCHEMA}")
    return frame


def _get_value_type(column_type: Any) -> Any:
    """Return the type of a column's values, for a dictionary (category) column too."""
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_TABLE_BYTES:
        limit = f"{MAX_TABLE_BYTES / 2**30:g} GiB"
        raise ValueError(f"it would take {n_bytes / 2**30:.1f} GiB of memory, more than {limit}")

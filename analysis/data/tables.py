"""Read the parquet tables of a study, whose content may be damaged or made to exhaust the memory."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainable.config.command_lines import format_command
from trainable.files.paths import open_regular
from trainable.files.schema import SCHEMA

MAX_TABLE_BYTES = 2**31
"""Memory that a table may take. The levels of a hundred runs with 40 evaluations of 512 levels take a fourteenth."""


def read_table(path: Path) -> pd.DataFrame:
    """Read a table of a study.

    Raises:
        ValueError: the table is damaged, has another schema, or would take more memory than `MAX_TABLE_BYTES`. The
            message names the file.
    """
    try:
        table = _read_bounded(path)
    # pyarrow raises errors of many kinds for damaged bytes, some of them when a column is decoded.
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({_format_error_line(error)}); "
            f"`{format_command('report', path.parent)}` writes it again."
        ) from error
    if table.attrs.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.attrs.get('schema', 0)}, and this version reads schema {SCHEMA}.")
    return table


def _read_bounded(path: Path) -> pd.DataFrame:
    """Read a parquet file; ValueError if its content is far larger than the file suggests."""
    with open_regular(path, "rb") as file:
        parquet_file: Any = pq.ParquetFile(file)
        metadata, schema = parquet_file.metadata, parquet_file.schema_arrow
        row_groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        _check_size(
            8 * metadata.num_rows * metadata.num_columns
            + sum(group.column(i).total_uncompressed_size for group in row_groups for i in range(group.num_columns))
        )
        # A text that a billion rows share is one entry of a dictionary, until it is decoded.
        text_names = [field.name for field in schema if str(field.type) in ("string", "large_string")]
        table: Any = pq.read_table(file, read_dictionary=text_names)
        _check_size(sum(_measure_text(table[name]) for name in text_names))
    for name in text_names:
        table = table.set_column(table.column_names.index(name), name, table[name].cast(schema.field(name).type))
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _measure_text(column: Any) -> int:
    """The size in bytes of a column of texts after its dictionaries are decoded."""
    return sum(
        pc.sum(pc.binary_length(chunk.dictionary).cast(pa.int64()).take(chunk.indices)).as_py() or 0
        for chunk in column.chunks
    )


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_TABLE_BYTES:
        raise ValueError(f"it would take {n_bytes / 2**30:.1f} GiB of memory, and at most {MAX_TABLE_BYTES >> 30} may")


def _format_error_line(error: Exception) -> str:
    """The first line of an error, shortened: pyarrow's messages may have the damaged bytes."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(". ")

"""Parquet tables that expand, lie about themselves, or ask for code."""

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.data.frames import FRAME_NAMES
from analysis.data.tables import add_checksum
from tests.attack.hostile.contents import Change, HostileCopy, Toucher

MakeTable = Callable[[pa.Table, Path, HostileCopy], None]
MANY = 40_000_000
"""Rows of a column that takes a few kilobytes on disk, and hundreds of megabytes in memory."""


def _write_many_rows(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Equal values: a run length on disk, gigabytes in memory."""
    chunk = pa.table(dict.fromkeys(table.column_names[:8], pa.nulls(1 << 20, pa.float64())))
    with pq.ParquetWriter(path, chunk.schema.with_metadata(table.schema.metadata), compression="zstd") as writer:
        for _ in range(MANY >> 20):
            writer.write_table(chunk.replace_schema_metadata(table.schema.metadata))


def _write_long_texts(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """A text of a megabyte, once on disk and 20,000 times in memory."""
    text = "x" * (1 << 20)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array([text]))
    columns = dict.fromkeys(table.column_names[:2], column)
    bomb = pa.table(columns).replace_schema_metadata(table.schema.metadata)
    with pq.ParquetWriter(path, bomb.schema, compression="zstd") as writer:
        for _ in range(10):
            writer.write_table(bomb)


def _write_many_columns(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    columns = {f"column-{number}": pa.array([1.0]) for number in range(30_000)}
    pq.write_table(pa.table(columns).replace_schema_metadata(table.schema.metadata), path)


def _write_extension_type(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """A column whose type says that it is a pickled class."""
    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Toucher(copy.home / "ran")),
    }
    fields = [field.with_metadata(marks) for field in table.schema]
    pq.write_table(table.cast(pa.schema(fields, metadata=table.schema.metadata)), path)


def _name_other_runs(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Rows of runs of which study.json knows nothing."""
    frame = table.to_pandas()
    frame["run_id"] = "../../evil\x1b[2J"
    _write_frame(frame, table, path)


def _write_text_columns(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Texts with control characters and markup in all columns of texts."""
    frame = table.to_pandas()
    for name in frame.columns:
        if frame[name].dtype == object and name != "run_id":
            frame[name] = "\x1b]52;c;ZXZpbA==\x07<script>attack-of-the-folder</script>$\\frac{$"
    _write_frame(frame, table, path)


def _write_frame(frame: pd.DataFrame, table: pa.Table, path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(frame).replace_schema_metadata(table.schema.metadata), path)


MAKERS: dict[str, MakeTable] = {
    "many-rows": _write_many_rows,
    "long-texts": _write_long_texts,
    "many-columns": _write_many_columns,
    "extension-type": _write_extension_type,
    "other-runs": _name_other_runs,
    "texts": _write_text_columns,
}


def _change_table(name: str, make: MakeTable, copy: HostileCopy) -> None:
    """Replace a table; all tables are newer than the rows, so that they are read."""
    path = copy.folder / f"{name}.parquet"
    table = pq.read_table(path)
    path.unlink()
    make(table, path, copy)
    with suppress(ValueError):  # a table without the metadata has no place for a checksum
        path.write_bytes(add_checksum(path.read_bytes()))
    later = time.time() + 60
    for table_name in FRAME_NAMES:
        os.utime(copy.folder / f"{table_name}.parquet", (later, later))


TABLES: dict[str, Change] = {
    f"parquet/{table}/{name}": partial(_change_table, table, make)
    for name, make in MAKERS.items()
    for table in ("trials", "steps", "gradient_groups")
    if table == "steps" or name in ("many-rows", "extension-type", "texts", "other-runs")
}

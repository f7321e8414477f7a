"""Parquet tables that expand, lie about themselves, or ask for code."""

import os
import pickle
import random
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


def _write_plain_texts(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Equal long texts of a column that is no dictionary to its reader."""
    texts = pa.array(["x" * 4096] * 20_000)
    bomb = pa.table(dict.fromkeys(table.column_names[:2], texts)).replace_schema_metadata(table.schema.metadata)
    with pq.ParquetWriter(path, bomb.schema, compression="zstd") as writer:
        for _ in range(15):
            writer.write_table(bomb)


def _write_many_columns(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    columns = {f"column-{number}": pa.array([1.0]) for number in range(30_000)}
    pq.write_table(pa.table(columns).replace_schema_metadata(table.schema.metadata), path)


def _write_deep_types(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    kind = pa.int8()
    for _ in range(400):
        kind = pa.list_(kind)
    pq.write_table(pa.table({"run_id": pa.nulls(1, kind)}).replace_schema_metadata(table.schema.metadata), path)


def _write_other_types(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """The right columns, all with a type that no table has."""
    values = pa.array([[{"a": b"\x00"}]] * table.num_rows)
    pq.write_table(
        pa.table(dict.fromkeys(table.column_names, values)).replace_schema_metadata(table.schema.metadata), path
    )


def _write_extension_type(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """A column whose type says that it is a pickled class."""
    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Toucher(copy.home / "ran")),
    }
    fields = [field.with_metadata(marks) for field in table.schema]
    pq.write_table(table.cast(pa.schema(fields, metadata=table.schema.metadata)), path)


def _write_pandas_metadata(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Metadata of pandas that is nested, and names types that are none."""
    metadata = {b"pandas": b'{"columns": [], "index_columns": ["../x"], "attributes": ' + b"[" * 200_000}
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata}), path)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _lie_about_rows(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Every number of rows and of values in the footer is a larger one: the column is shorter than the table says."""
    n_rows, claimed = 20_011, 1_000_003
    columns = {name: pa.nulls(n_rows, pa.float64()) for name in table.column_names}
    pq.write_table(pa.table(columns).replace_schema_metadata(table.schema.metadata), path)
    # Thrift's compact protocol writes an integer as the varint of twice its value; both have three bytes.
    content = path.read_bytes()
    path.write_bytes(content.replace(_encode_varint(2 * n_rows), _encode_varint(2 * claimed)))


def _repeat_rows(table: pa.Table, path: Path, copy: HostileCopy) -> None:
    """Every row twice."""
    pq.write_table(pa.concat_tables([table, table]), path)


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
    "plain-texts": _write_plain_texts,
    "many-columns": _write_many_columns,
    "deep-types": _write_deep_types,
    "other-types": _write_other_types,
    "extension-type": _write_extension_type,
    "pandas-metadata": _write_pandas_metadata,
    "lying-row-count": _lie_about_rows,
    "repeated-rows": _repeat_rows,
    "other-runs": _name_other_runs,
    "texts": _write_text_columns,
}


def _change_table(name: str, make: MakeTable, copy: HostileCopy, rng: random.Random) -> None:
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
    if table == "steps" or name in ("many-rows", "extension-type", "texts", "repeated-rows", "other-runs")
}

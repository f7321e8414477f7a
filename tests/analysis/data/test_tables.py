import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.data import tables
from analysis.data.tables import add_checksum, get_damage, read_table, write_table
from trainable.runs.study_record import SCHEMA


def write_arrow_table(table: pa.Table, path: Path) -> None:
    """Write a table that pandas would not make, with a right checksum."""
    empty_fields: dict[str, object] = {name: [] for name in ("columns", "index_columns", "column_indexes")}
    attributes = json.dumps({**empty_fields, "attributes": {"schema": SCHEMA, "sha256": "0" * 64}})
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"pandas": attributes}), buffer)
    path.write_bytes(add_checksum(buffer.getvalue()))


def test_a_table_is_read_as_pandas_wrote_it_and_remembers_the_damage_of_its_files(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "arm": pd.Series(["b", "a", "b", "b"], dtype="category"),
            "text": pd.Series(["a", "", None, "a"], dtype="str"),
            "number": [1.5, np.nan, np.inf, 0.0],
            "whole": pd.Series([1, None, 3, 4], dtype="Int64"),
            "is_true": [True, False, True, True],
            "time": pd.to_datetime(["2026-01-01", None, "2026-01-02", "2026-01-02"], utc=True),
            "config/mixed": ["x", None, "y", "y"],
            "config/missing": [None, None, None, None],
        }
    )
    path = tmp_path / "trials.parquet"
    write_table(frame, path)
    pd.testing.assert_frame_equal(read_table(path), pd.read_parquet(path))
    assert [str(dtype) for dtype in read_table(path).dtypes[:2]] == ["category", "str"]
    assert read_table(path).attrs["schema"] == SCHEMA
    write_table(pd.DataFrame({"a": [1]}), path)
    assert get_damage(read_table(path)) == []
    write_table(pd.DataFrame({"a": [1]}), path, ["run.json is damaged."])
    assert get_damage(read_table(path)) == ["run.json is damaged."]


def test_a_small_file_cannot_fill_the_memory_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "levels.parquet"
    table = pa.table({f"c{index}": np.zeros(2**16, dtype=bool) for index in range(100)})
    write_arrow_table(table, path)
    assert path.stat().st_size < 2**18
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 2**24)
    with pytest.raises(ValueError, match=r"levels\.parquet cannot be read \(it would take 0\.0 GiB of memory"):
        read_table(path)


# A category of a long text is stored once, but the columns of some frames are made text again.
@pytest.mark.parametrize("column", [pa.array(["x" * 2**20] * 100), pa.array(["x" * 2**20] * 100).dictionary_encode()])
def test_a_small_file_cannot_fill_the_memory_with_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: pa.Array
) -> None:
    path = tmp_path / "trials.parquet"
    write_arrow_table(pa.table({"reason": column}), path)
    assert path.stat().st_size < 2**23
    assert len(read_table(path)) == 100  # 100 MiB are not too much
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 2**26)
    with pytest.raises(ValueError, match=r"it would take 0\.1 GiB of memory"):
        read_table(path)


def test_tables_of_many_columns_through_links_or_without_checksums_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    write_arrow_table(pa.table({f"c{index}": [1.0] for index in range(2000)}), path)
    assert len(read_table(path).columns) == 2000
    write_arrow_table(pa.table({f"c{index}": [1.0] for index in range(2001)}), path)
    with pytest.raises(ValueError, match="it has 2001 columns, more than 2000"):
        read_table(path)
    write_table(pd.DataFrame({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="is a symbolic link"):
        read_table(tmp_path / "link.parquet")
    frame = pd.DataFrame({"level": range(50)})
    frame.attrs = {"schema": SCHEMA}
    frame.to_parquet(path, index=False)
    with pytest.raises(ValueError, match="it has no checksum"):
        read_table(path)


@pytest.mark.parametrize("column", [pa.array([["a"]]), pa.array([b"a"]).dictionary_encode(), pa.array([{"a": 1}])])
def test_only_columns_of_numbers_and_texts_are_read(tmp_path: Path, column: pa.Array) -> None:
    write_arrow_table(pa.table({"arm": column}), tmp_path / "trials.parquet")
    with pytest.raises(ValueError, match="its column 'arm' has the type"):
        read_table(tmp_path / "trials.parquet")


def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "levels.parquet"
    write_table(pd.DataFrame({"level": range(50), "text": ['"sha256": "' + "0" * 64 + '"'] * 50}), path)
    content = path.read_bytes()
    assert len(read_table(path)) == 50
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(ValueError, match=r"levels\.parquet cannot be read"):
            read_table(path)

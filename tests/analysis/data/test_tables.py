import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.data import tables
from analysis.data.tables import read_table
from trainable.files.schema import SCHEMA


def write_table(path: Path, frame: pd.DataFrame) -> None:
    frame.attrs = {"schema": SCHEMA}
    frame.to_parquet(path, index=False)


def test_a_table_is_read_as_pandas_wrote_it(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
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
    write_table(path, frame)
    pd.testing.assert_frame_equal(read_table(path), pd.read_parquet(path))


def test_a_small_file_cannot_fill_the_memory_with_rows(tmp_path: Path) -> None:
    path = tmp_path / "levels.parquet"
    table = pa.table({f"c{index}": np.zeros(2**21, dtype=bool) for index in range(150)})
    pq.write_table(table, path)
    assert path.stat().st_size < 2**22
    with pytest.raises(ValueError, match=r"levels\.parquet cannot be read \(it would take 2\.4 GiB of memory"):
        read_table(path)


def test_a_small_file_cannot_fill_the_memory_with_a_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(300, dtype="int32")), pa.array(["x" * 2**20]))
    pq.write_table(pa.table({"reason": texts}), path, store_schema=False)
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="has schema 0"):  # 300 MiB are not too much
        read_table(path)
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 2**28)
    with pytest.raises(ValueError, match=r"it would take 0\.3 GiB of memory"):
        read_table(path)


def test_a_table_that_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.parquet")
    write_table(tmp_path / "other.parquet", pd.DataFrame({"a": [1]}))
    (tmp_path / "link.parquet").symlink_to(tmp_path / "other.parquet")
    for name, problem in (("fifo", "is a FIFO"), ("link", "is a symbolic link")):
        with pytest.raises(ValueError, match=problem):
            read_table(tmp_path / f"{name}.parquet")

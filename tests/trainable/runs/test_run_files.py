import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainable.runs.run_files import append_json_line, read_rows


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, **values}


def test_rows_are_read_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [row(1, x=0.1 + 0.2, text="√", none=None, flag=True), row(2, x=1e-300, names=["a"])]
    for record in rows:
        append_json_line(path, record)
    assert read_rows(path) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_there_are_no_rows_without_a_file(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_are_null(tmp_path: Path, value: float) -> None:
    append_json_line(tmp_path / "m", row(1, x=value))
    assert json.loads((tmp_path / "m").read_text())["x"] is None


def test_the_last_row_of_a_step_counts_and_rows_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for step, x in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (10, 1)):
        append_json_line(path, row(step, x=x))
    assert read_rows(path) == [row(1, x=0), row(2, x=1), row(3, x=1), row(10, x=1)]


def test_any_tear_of_the_last_line_loses_that_line_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for step in (1, 2):
        append_json_line(path, row(step, text="√ or so"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = 2 if end >= len(whole) - 1 else 1  # the line lacks its newline at most
        assert [found["step"] for found in read_rows(path)] == [1, 2][:kept]
        append_json_line(path, row(3))
        assert [found["step"] for found in read_rows(path)] == [*[1, 2][:kept], 3]


def test_a_line_of_zeros_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "m"
    append_json_line(path, row(1))
    with path.open("ab") as file:
        file.write(b"\0" * 40)  # what some file systems leave after a power cut
    append_json_line(path, row(2))
    assert [found["step"] for found in read_rows(path)] == [1, 2]

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainable.runs.run_files import append_json_line, read_rows


def make_row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, **values}


def test_rows_are_read_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [make_row(1, x=0.1 + 0.2, text="√", none=None, flag=True), make_row(2, x=1e-300, names=["a"])]
    for record in rows:
        append_json_line(path, record)
    assert read_rows(path) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_there_are_no_rows_without_a_file(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_are_null(tmp_path: Path, value: float) -> None:
    append_json_line(tmp_path / "m", make_row(1, x=value))
    assert json.loads((tmp_path / "m").read_text())["x"] is None


def test_the_last_row_of_a_step_counts_and_rows_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for step, x in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (10, 1)):
        append_json_line(path, make_row(step, x=x))
    assert read_rows(path) == [make_row(1, x=0), make_row(2, x=1), make_row(3, x=1), make_row(10, x=1)]


def test_a_truncated_last_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for step in (1, 2):
        append_json_line(path, make_row(step, text="√ or so"))
    content = path.read_bytes()
    first_end = content.index(b"\n") + 1
    for end in range(first_end, len(content) + 1):
        path.write_bytes(content[:end])
        row_count = 2 if end >= len(content) - 1 else 1  # the line is complete, possibly without its newline
        assert [row["step"] for row in read_rows(path)] == [1, 2][:row_count]
        append_json_line(path, make_row(3))
        assert [row["step"] for row in read_rows(path)] == [*[1, 2][:row_count], 3]


def test_a_line_of_zeros_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "m"
    append_json_line(path, make_row(1))
    with path.open("ab") as file:
        file.write(b"\0" * 40)  # some file systems leave zeros after a power cut
    append_json_line(path, make_row(2))
    assert [row["step"] for row in read_rows(path)] == [1, 2]

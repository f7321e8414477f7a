"""Every change of a file of lines is noticed, and what a crash leaves is not taken for a change."""

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.files import json_lines
from trainable.files.json_lines import LineEnd, abandon_lines, append_line, read_lines, write_lines

RECORDS = [{"step": step, "x": 0.1 * step, "text": '√, "checksum": "0123456789abcdef"}'} for step in (1, 2, 3, 4)]


def append_all(path: Path, records: list[dict[str, object]]) -> LineEnd:
    end = LineEnd()
    for record in records:
        end = append_line(path, record, end)
    return end


@pytest.fixture
def path(tmp_path: Path) -> Path:
    append_all(tmp_path / "lines", RECORDS)
    return tmp_path / "lines"


def test_records_are_read_as_they_were_appended(path: Path, tmp_path: Path) -> None:
    lines = read_lines(path)
    assert lines.records == RECORDS
    assert [line.number for line in lines.lines] == [1, 2, 3, 4]
    assert lines.damaged_numbers == []
    assert [set(json.loads(line)) for line in path.read_text().splitlines()] == [{"step", "x", "text", "checksum"}] * 4
    missing = read_lines(tmp_path / "missing")
    assert (missing.records, missing.end) == ([], LineEnd())
    assert missing.contains(LineEnd())


def test_the_checksum_is_that_of_the_definition(tmp_path: Path) -> None:
    append_all(tmp_path / "lines", [{"a": 1}, {"b": 2}])
    first = hashlib.sha256(b'{"a": 1}').hexdigest()[:16]
    second = hashlib.sha256(first.encode() + b'{"b": 2}').hexdigest()[:16]
    expected = f'{{"a": 1, "checksum": "{first}"}}\n{{"b": 2, "checksum": "{second}"}}\n'
    assert (tmp_path / "lines").read_text() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_are_null(tmp_path: Path, value: float) -> None:
    append_line(tmp_path / "lines", {"x": value}, LineEnd())
    assert read_lines(tmp_path / "lines").records == [{"x": None}]


@pytest.mark.parametrize("record", [{}, {"checksum": 1}, {"valid_lines": 0}])
def test_a_record_needs_a_key_other_than_the_checksum(tmp_path: Path, record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="reserved"):
        append_line(tmp_path / "lines", record, LineEnd())


def edit(line: int, change: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    """Change one line, by its index."""
    return lambda lines: [*lines[:line], change(lines[line]), *lines[line + 1 :]]


@pytest.mark.parametrize(
    ("change", "damaged", "steps"),
    [
        (edit(1, lambda line: line.replace(b"0.2", b"0.3")), [2], [1, 3, 4]),
        (edit(1, lambda line: line[:10] + bytes(10) + line[20:]), [2], [1, 3, 4]),
        (edit(1, lambda line: line[:-4] + (b'0"}\n' if line[-4:] != b'0"}\n' else b'1"}\n')), [2, 3], [1, 4]),
        (edit(1, lambda line: line[:-4] + b'x"}\n'), [3], [1, 4]),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], [2, 3, 4], [1]),
        (lambda lines: [lines[0], *lines[2:]], [2], [1, 4]),
        (lambda lines: lines[1:], [1], [3, 4]),
        (lambda lines: [*lines[:2], lines[0], *lines[2:]], [3, 4], [1, 2, 4]),
    ],
    ids=["digit", "zeros", "checksum", "no checksum", "swapped", "lost", "first lost", "repeated"],
)
def test_a_change_is_named_by_its_line(
    path: Path, change: Callable[[list[bytes]], list[bytes]], damaged: list[int], steps: list[int]
) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    lines = read_lines(path)
    assert lines.damaged_numbers == damaged
    assert [record["step"] for record in lines.records] == steps


@given(st.data())
def test_any_changed_byte_is_noticed_unless_the_last_line_became_a_torn_one(data: st.DataObject) -> None:
    body = write_in_memory(RECORDS)
    position = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != body[position]))
    lines = read_in_memory(body[:position] + bytes([byte]) + body[position + 1 :])
    end = read_in_memory(body).end
    assert lines.damaged_numbers or not lines.contains(end) or lines.records == RECORDS
    if lines.records == RECORDS:  # only the newline at the end of the file may differ
        assert position == len(body) - 1
    # The last line alone cannot tell a torn line from a changed one; the recorded end can.
    if not lines.damaged_numbers and position < len(body) - 1:
        assert not lines.contains(end)


@given(st.integers(0, 400))
def test_any_tear_of_the_last_line_loses_that_line_and_no_other(lost: int) -> None:
    body = write_in_memory(RECORDS)
    last_start = body[:-1].rindex(b"\n") + 1
    lines = read_in_memory(body[: max(last_start, len(body) - lost)])
    assert not lines.damaged_numbers
    assert [record["step"] for record in lines.records] == ([1, 2, 3, 4] if lost <= 1 else [1, 2, 3])


def write_in_memory(records: list[dict[str, object]]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        append_all(Path(folder) / "lines", records)
        return (Path(folder) / "lines").read_bytes()


def read_in_memory(content: bytes) -> json_lines.Lines:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lines").write_bytes(content)
        return read_lines(Path(folder) / "lines")


def test_the_chain_continues_after_a_torn_line(path: Path) -> None:
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        end = read_lines(path).end
        append_line(path, {"step": 5}, end)
        lines = read_lines(path)
        assert not lines.damaged_numbers
        assert [record["step"] for record in lines.records] == [1, 2, 3, *([4] if cut == 1 else []), 5]
        assert lines.contains(end)
    path.write_bytes(whole)
    end = read_lines(path).end
    path.write_bytes(whole + bytes(40))  # what some file systems leave after a power cut
    append_line(path, {"step": 5}, end)
    assert [record["step"] for record in read_lines(path).records] == [1, 2, 3, 4, 5]


def test_a_repeated_write_of_a_line_counts_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = read_lines(path).end

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(json_lines.os, "fsync", fail)
        with pytest.raises(OSError, match="full"):
            append_line(path, {"step": 5}, end)
    new_end = append_line(path, {"step": 5}, end)
    lines = read_lines(path)
    assert path.read_bytes().count(b'"step": 5') == 2
    assert [record["step"] for record in lines.records] == [1, 2, 3, 4, 5]
    assert not lines.damaged_numbers
    assert lines.end == new_end


def test_an_end_is_contained_only_in_the_lines_that_led_to_it(path: Path) -> None:
    other = path.with_name("other")
    ends = list(itertools.accumulate(RECORDS, lambda end, record: append_line(other, record, end), initial=LineEnd()))
    assert all(read_lines(path).contains(end) for end in ends)
    longer = append_line(path, {"step": 5}, ends[-1])
    assert read_lines(path).contains(longer)
    assert not read_lines(other).contains(longer)
    assert not read_lines(path).contains(ends[2]._replace(line_count=3))


def test_abandoned_lines_do_not_count_and_their_damage_does_not_either(path: Path) -> None:
    end = read_lines(path).end
    second_end = LineEnd(2, read_lines(path).lines[1].checksum)
    raw = path.read_bytes().splitlines(keepends=True)
    change = raw[2].replace(b'"step": 3', b'"step": 9')
    path.write_bytes(b"".join([*raw[:2], change, raw[3]]))
    assert read_lines(path).damaged_numbers == [3]
    end = abandon_lines(path, second_end, end)
    continued_end = append_line(path, {"step": 7}, end)
    lines = read_lines(path)
    assert [record["step"] for record in lines.records] == [1, 2, 7]
    assert lines.damaged_numbers == []
    assert lines.end == continued_end == LineEnd(6, continued_end.checksum)
    assert lines.contains(second_end)
    assert lines.contains(continued_end)
    # A state that stands on abandoned lines belongs to an attempt that no longer counts.
    assert not lines.contains(LineEnd(4, lines.lines[3].checksum))


def test_an_end_right_after_abandoned_lines_is_contained(path: Path) -> None:
    """A row may vouch for a file that has had no line since some of its lines were abandoned."""
    for valid_count in (0, 2, 4):
        checksums = ["", *(line.checksum for line in read_lines(path).lines)]
        end = abandon_lines(path, LineEnd(valid_count, checksums[valid_count]), read_lines(path).end)
        lines = read_lines(path)
        assert lines.end == end
        assert lines.contains(end)
        assert lines.records == RECORDS[:valid_count]
        path.unlink()
        append_all(path, RECORDS)


def test_rewritten_lines_form_a_chain_of_their_own(path: Path) -> None:
    write_lines(path, RECORDS[1:])
    lines = read_lines(path)
    assert lines.records == RECORDS[1:]
    assert not lines.damaged_numbers
    other = path.with_name("other")
    append_all(other, RECORDS[1:])
    assert path.read_bytes() == other.read_bytes()


def test_lines_without_a_checksum_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    write_lines(path, [{"step": step} for step in range(3)])
    assert list(read_lines(path).unchecked_numbers) == []
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_lines(path).unchecked_numbers) == [3]
    path.write_bytes(b"{}\n" + bytes(9) + b"\n\n")
    assert list(read_lines(path).unchecked_numbers) == [1, 2]

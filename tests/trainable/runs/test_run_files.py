from pathlib import Path

import pytest

from tests.fakes.lines import append_record
from trainable.files.json_lines import read_lines, write_lines
from trainable.runs.run_files import (
    ENDS_KEY,
    EPISODES_FILE,
    GRADIENTS_FILE,
    LEVELS_FILE,
    METRICS_FILE,
    RunLines,
    read_rows,
)


def make_row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, **values}


def test_the_last_row_of_a_step_counts_and_rows_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    for step, x in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (10, 1)):
        append_record(path, make_row(step, x=x))
    assert read_rows(path) == [make_row(1, x=0), make_row(2, x=1), make_row(3, x=1), make_row(10, x=1)]
    records = [make_row(0), {"other": 1}, {"step": True}, {"step": 2.0}, {"step": 2**63}, {"step": -1}, make_row(2)]
    write_lines(tmp_path / METRICS_FILE, records)
    assert read_rows(tmp_path / METRICS_FILE) == [make_row(0), make_row(2)]


def write_run(folder: Path) -> None:
    """Two steps with an evaluation and a recorded episode each, and a gradient analysis in the second."""
    for step in (1, 2):
        append_record(folder / LEVELS_FILE, {"step": step, "success": "0110"})
        append_record(folder / EPISODES_FILE, {"step": step, "level": 123})
        if step == 2:
            append_record(folder / GRADIENTS_FILE, {"step": step, "rows": []})
        ends = {name: list(read_lines(folder / name).end) for name in (LEVELS_FILE, EPISODES_FILE, GRADIENTS_FILE)}
        append_record(folder / METRICS_FILE, make_row(step, **{ENDS_KEY: ends}))


def test_an_undamaged_run_has_no_damage(tmp_path: Path) -> None:
    assert RunLines.read(tmp_path).find_damage() == []
    write_run(tmp_path)
    lines = RunLines.read(tmp_path)
    assert lines.find_damage() == []
    assert lines.list_rows() == [make_row(1), make_row(2)]
    assert lines.is_intact_up_to(lines.files[METRICS_FILE].end)
    # Nor do lines of a step without its row damage it.
    append_record(tmp_path / LEVELS_FILE, {"step": 3, "success": "0000"})
    assert RunLines.read(tmp_path).find_damage() == []


def test_a_lost_file_and_a_damaged_line_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / GRADIENTS_FILE).unlink()
    loss = "gradients.jsonl lacks lines: it had 1 when the last row was written"
    assert RunLines.read(tmp_path).find_damage() == [loss]
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 7'))
    lines = RunLines.read(tmp_path)
    assert lines.find_damage() == ["metrics.jsonl does not match its checksums at line 1", loss]
    assert lines.list_rows() == [make_row(2)]


@pytest.mark.parametrize("name", [LEVELS_FILE, EPISODES_FILE])
def test_a_lost_line_at_the_end_of_another_file_is_noticed(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    lines = RunLines.read(tmp_path)
    assert lines.find_damage() == [f"{name} lacks lines: it had 2 when the last row was written"]
    end = lines.files[METRICS_FILE].end
    assert not lines.is_intact_up_to(end)
    first_line = lines.files[METRICS_FILE].lines[0]
    assert lines.is_intact_up_to(end._replace(line_count=1, checksum=first_line.checksum))


def test_rows_of_a_version_that_records_no_episodes_vouch_for_their_other_files(tmp_path: Path) -> None:
    append_record(tmp_path / LEVELS_FILE, {"step": 1, "success": "0110"})
    ends = {LEVELS_FILE: list(read_lines(tmp_path / LEVELS_FILE).end)}
    append_record(tmp_path / METRICS_FILE, make_row(1, **{ENDS_KEY: ends}))
    lines = RunLines.read(tmp_path)
    assert lines.find_damage() == []
    assert lines.is_intact_up_to(lines.files[METRICS_FILE].end)


def test_ends_that_no_run_writes_are_damage_and_no_error(tmp_path: Path) -> None:
    for ends in ([1], {LEVELS_FILE: 3}, {LEVELS_FILE: ["1", 2]}, {LEVELS_FILE: [True, "a"]}, {LEVELS_FILE: [-1, ""]}):
        write_lines(tmp_path / METRICS_FILE, [make_row(1, **{ENDS_KEY: ends})])
        problems = RunLines.read(tmp_path).find_damage()
        assert problems == ([] if isinstance(ends, list) else problems)
        assert len(problems) == (0 if isinstance(ends, list) else 1)


def test_a_file_that_is_refused_is_named_and_hides_no_other(tmp_path: Path) -> None:
    write_run(tmp_path)
    target = tmp_path / "target"
    (tmp_path / LEVELS_FILE).rename(target)
    (tmp_path / LEVELS_FILE).symlink_to(target)
    lines = RunLines.read(tmp_path)
    assert lines.list_rows() == [make_row(1), make_row(2)]
    (problem,) = lines.find_damage()
    assert problem.startswith(f"{tmp_path / LEVELS_FILE} is a symbolic link")
    (tmp_path / METRICS_FILE).unlink()
    (tmp_path / METRICS_FILE).mkdir()
    assert read_rows(tmp_path / METRICS_FILE) == []
    assert "Is a directory" in RunLines.read(tmp_path).find_damage()[0]

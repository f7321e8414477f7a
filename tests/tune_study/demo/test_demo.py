"""Tests of the recorded study: its archive, and the command that shows it."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import analysis
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_values import read_object
from trainable.runs.study_record import SCHEMA, write_record
from tune_study.commands.cli import app
from tune_study.demo import archive


def test_the_recorded_study_is_of_this_schema_and_small() -> None:
    assert archive.read_recorded_study().schema == SCHEMA, "make it again: make record-demo"
    assert archive.ARCHIVE.stat().st_size <= 2_000_000


def test_another_study_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "results" / archive.read_recorded_study().run
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds something else: type another folder, as in `demo --output elsewhere`" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_a_recorded_study_that_its_user_continued_is_shown_again(tmp_path: Path) -> None:
    study = archive.read_recorded_study()
    folder = tmp_path / "results" / study.run
    archive.unpack(folder)
    for created_at, exit_code in ((study.created_at, 0), ("2020-01-01T00:00:00+00:00", 2)):
        write_record(folder, replace(study, max_seeds=9, created_at=created_at))
        assert CliRunner().invoke(app, ["demo", "--output", str(tmp_path)]).exit_code == exit_code


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study whose runs have ended."""
    folder = write_study(
        tmp_path, [FakeRun(arm, steps=10) for arm in ("0", "0.1")], FakeStudy(levels=8, total_steps=10)
    )
    for path in folder.glob("runs/*"):
        (path / "episodes.jsonl").touch()
        (path / "levels.jsonl").touch()
    return folder


@pytest.mark.long
def test_a_study_is_unpacked_as_it_was_packed(study: Path, tmp_path: Path) -> None:
    path, copy = tmp_path / "study.tar.xz", tmp_path / "copy"
    assert archive.pack(study, path) == path.stat().st_size
    content = path.read_bytes()
    archive.pack(study, path)
    assert path.read_bytes() == content
    archive.unpack(copy, path)
    assert analysis.diff_frames(analysis.load(study).steps, analysis.load(copy).steps) == []
    assert analysis.diff_frames(analysis.load(study).levels, analysis.load(copy).levels) == []
    assert archive.read_recorded_study(path).recorded == read_object(study / "study.json")["command"]

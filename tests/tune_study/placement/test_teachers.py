"""What a plan says of teachers that this machine lacks, and how they are made."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from trainable.models.teachers import find_teacher_folder
from tune_study.placement.model_files import (
    check_model,
    describe_teachers,
    find_missing_teachers,
    make_missing_teachers,
)
from tune_study.plan.errors import PlanError

NAME = "sokoban-tiny-teacher"
PATHS = ("sokoban-tiny", NAME, NAME, "Qwen/Qwen2.5-3B")


def write_teacher(environment: dict[str, str]) -> None:
    folder = find_teacher_folder(NAME, environment)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_a_missing_teacher_is_named_once_and_one_that_is_there_not(tmp_path: Path) -> None:
    environment = {"TUNE_STUDY_CACHE": str(tmp_path)}
    assert find_missing_teachers(PATHS, environment) == [NAME]
    (line,) = describe_teachers(PATHS, environment, is_local=True)
    assert line == (
        f"Teacher: {NAME} is made first, in about two CPU minutes, in {find_teacher_folder(NAME, environment)}"
    )
    with pytest.raises(PlanError, match=f"`python -m trainable.tiny --policy {NAME}`"):
        check_model(NAME, environment)
    write_teacher(environment)
    assert find_missing_teachers(PATHS, environment) == []
    assert describe_teachers(PATHS, environment, is_local=True) == []
    check_model(NAME, environment)


def test_on_a_cluster_nothing_is_made_and_the_plan_says_what_to_do(tmp_path: Path) -> None:
    (line,) = describe_teachers(PATHS, {"TUNE_STUDY_CACHE": str(tmp_path)}, is_local=False)
    assert line.startswith(f"Teacher: every node needs {NAME}")
    assert f"`python -m trainable.tiny --policy {NAME}`" in line


def make_fake_python(folder: Path, body: str) -> str:
    """Make an executable that stands for Python and runs `body` in a shell."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("code", "is_refused"), [(0, False), (3, True)])
def test_the_command_is_run_and_its_lines_are_shown(
    code: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", make_fake_python(tmp_path, f'echo "typed: $*"; exit {code}'))
    environment = {"TUNE_STUDY_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    console = Console(file=io.StringIO(), width=200)
    if is_refused:
        with pytest.raises(PlanError, match=f"the command ended with code {code}"):
            make_missing_teachers(PATHS, environment, console)
    else:
        make_missing_teachers(PATHS, environment, console)
    assert isinstance(console.file, io.StringIO)
    assert f"typed: -m trainable.tiny --policy {NAME}" in console.file.getvalue()
    assert find_missing_teachers(PATHS, environment) == [NAME]

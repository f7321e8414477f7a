"""What a plan says of teachers that this machine lacks, and how they are made."""

import io
import sys
from contextlib import nullcontext
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


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_is_run_and_its_lines_are_shown(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "typed: $*"; exit {code}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    environment, output = {"TUNE_STUDY_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}, io.StringIO()
    refusal = f"ended with code {code}, and its message is above: try `python -m trainable.tiny --policy {NAME}`"
    with pytest.raises(PlanError, match=refusal) if code else nullcontext():
        make_missing_teachers(PATHS, environment, Console(file=output, width=200))
    assert f"typed: -m trainable.tiny --policy {NAME}" in output.getvalue()

"""Tests of the command `compare`."""

import shlex
from pathlib import Path

import pytest

from tests.fakes.command_line import get_output, type_in
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STUDY = FakeStudy(levels=20, total_steps=10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two studies of two arms and two seeds; the second has another learning rate."""
    runs = [FakeRun(arm, seed, steps=10) for arm in ("0", "0.1") for seed in range(2)]
    other_runs = [FakeRun(arm, seed, steps=10) for arm in ("0", "0.2") for seed in range(2)]
    first = write_study(tmp_path_factory.mktemp("first"), runs, STUDY)
    return str(first), str(write_study(tmp_path_factory.mktemp("second"), other_runs, STUDY))


def test_the_terminal_has_arms_verdicts_and_the_page(folders: tuple[str, str], work_dir: Path) -> None:
    out = get_output(shlex.join(["compare", *folders]))
    (study,) = (line.split("  ") for line in out.splitlines() if line.endswith(folders[0]))
    assert (study[0], "4 runs: 4 completed" in study, "0 to 1" in study) == ("A", True, True)
    assert "The settings that all arms of a study share are the same in every study." in out
    assert "Only in A: 0.1." in out
    assert "Only in B: 0.2." in out
    assert "B against A, 1 arm in common: " in out
    assert f"Page: {work_dir / 'comparison.html'}" in out
    assert (work_dir / "comparison.html").is_file()


def test_a_page_that_cannot_be_written_is_refused(folders: tuple[str, str], work_dir: Path) -> None:
    answer = type_in(shlex.join(["compare", *folders, "--to", str(work_dir / "missing" / "page.html")]))
    assert (answer.code, "type another --to" in answer.err) == (2, True)

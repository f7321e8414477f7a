"""Tests of what the terminal prints of the results of a study: verdicts, notes and sentences, in any width."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.sandbox_folders import FakeRun, FakeStudy, make_seed_runs, write_sandbox
from tune_study.tune.session import write_results

ARMS = {"DG": (0.30, 0.34, 0.35), "GRPO": (0.50, 0.52, 0.51), "TPO": (0.31, 0.33, 0.36)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a baseline, two arms with the same note, and one whose only run failed."""
    runs = [run for arm, errors in ARMS.items() for run in make_seed_runs(arm, errors)]
    runs.append(FakeRun("ASPO", 0, status="failed", steps=40, reason="RuntimeError: x"))
    return write_sandbox(tmp_path_factory.mktemp("sandbox"), runs, FakeStudy("some-study"))


def print_results(folder: Path, width: int, is_terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=is_terminal, color_system=None)
    assert write_results(folder, console, with_pictures=False) == ""
    return output.getvalue()


@pytest.mark.long
def test_outside_of_a_terminal_a_row_is_a_line_and_equal_notes_are_one(folder: Path) -> None:
    lines = print_results(folder, 40, False).splitlines()
    assert lines[0].split("  ")[0] == "arm"
    rows = {line.split()[0]: line.split()[1] for line in lines[1:5]}
    assert rows == {"DG": "baseline", "GRPO": "worse", "TPO": "equal", "ASPO": "no"}
    assert "  GRPO, TPO: over 3 seeds, with the noise of all arms" in lines
    assert "basis" not in lines[0]
    assert lines[-2].startswith("4 arms, baseline DG. Compared with DG over 3 seeds, test error at the end is ")
    assert lines[-1] == f"Report: {folder / 'report.html'}"


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 24])
def test_a_terminal_of_any_width_has_every_verdict(folder: Path, width: int) -> None:
    text = print_results(folder, width, True)
    for arm, verdict in (("GRPO", "worse"), ("TPO", "equal"), ("ASPO", "no comparison")):
        assert arm in text
        assert verdict.split()[0] in text
    assert ("Left out at this width: runs. " in text) == (width == 80)

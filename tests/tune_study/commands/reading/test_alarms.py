"""Tests of `alarms`: its table, and what it says where nothing can be chosen."""

from pathlib import Path

import pytest

from tests.analysis.report.test_fork import write_fork
from tests.analysis.sweep.test_symptoms import STUDY, write_collapse
from tests.fakes.command_line import assert_refused, get_output, type_in
from tests.fakes.plans import write_started_study
from tests.fakes.run_folders import FakeRun, write_study


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with four runs that collapsed and one that did not."""
    folder = tmp_path_factory.mktemp("alarms")
    write_collapse(folder, (10, 12, 14, 9))
    return folder


@pytest.fixture(scope="module")
def text(output: Path) -> str:
    """What the command prints with two seeds on each side; the detectors of others come after an empty line."""
    return get_output(f"alarms {output} --first-test-seed 2 --others")


@pytest.mark.long
def test_the_table_has_the_score_on_other_seeds(text: str) -> None:
    lines = text.partition("\n\n")[0].splitlines()
    assert lines[0] == "1 study, 5 runs with rows: 4 collapsed."
    (spread,) = [line for line in lines if line.startswith("reward_std")]
    assert "  2 of 2  " in spread
    assert lines[-1].startswith("Each alarm is the best of its symptom on seeds below 2")


@pytest.mark.long
def test_the_detectors_of_others_come_below(text: str) -> None:
    lines = text.partition("\n\n")[2].splitlines()
    assert lines[0].split()[:3] == ["detector", "thresholds", "announces"]
    (line,) = [line for line in lines if line.startswith("RAGEN reward_variance_collapse") and " published " in line]
    assert "  2 of 2  " in line
    assert line.endswith("reward_std < 0.1 x its first 10 steps, 10 in a row")
    assert lines[-1].startswith("published: the numbers of the source")


@pytest.mark.slow
def test_repeated_runs_are_left_out(output: Path, text: str, tmp_path: Path) -> None:
    write_collapse(tmp_path, (10, 12, 14, 9))
    lines = type_in(f"alarms {output} {tmp_path} --first-test-seed 2").out.splitlines()
    assert lines[0] == "2 studies, 5 runs with rows, without 5 that repeat another run: 4 collapsed."
    assert lines[1:] == text.partition("\n\n")[0].splitlines()[1:]


@pytest.mark.long
def test_forks_are_left_out(output: Path, text: str, tmp_path: Path) -> None:
    fork = write_fork(tmp_path, {"actor.lr": 1e-5})
    fork = fork.rename(fork.with_name("kl-fork-0"))
    lines = type_in(f"alarms {output} {tmp_path} --first-test-seed 2").out.splitlines()
    line = "Left out: kl-fork-0. The runs of a fork repeat rows of the runs that they continue."
    first, *others = text.partition("\n\n")[0].splitlines()
    assert lines == [first, line, *others]
    for folder in (fork, tmp_path):
        assert_refused(f"alarms {folder}", f"There are only forks, whose runs repeat others, in {folder}")


@pytest.mark.long
def test_few_seeds_have_thresholds_and_a_warning(output: Path) -> None:
    lines = type_in(f"alarms {output}").out.splitlines()
    (spread,) = [line for line in lines if line.startswith("reward_std")]
    assert "  4 of 4  " in spread
    assert "scored on the same runs, so its numbers are too good: seeds below 5 and from there on" in lines[-1]


@pytest.mark.long
def test_without_collapse_nothing_is_chosen(tmp_path: Path) -> None:
    write_study(tmp_path, [FakeRun("0"), FakeRun("0.1")], STUDY)
    assert get_output(f"alarms {tmp_path}").endswith(": 0 collapsed.\nThere is nothing to announce.\n")


def test_a_study_without_rows_has_no_alarm(tmp_path: Path) -> None:
    write_started_study(tmp_path)
    output = get_output(f"alarms {tmp_path}")
    assert output.splitlines()[0] == "1 study, 0 runs with rows: 0 collapsed."

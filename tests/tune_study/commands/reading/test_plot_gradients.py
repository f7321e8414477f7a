"""The command plot-gradients: what it lists, which files it writes, and what it refuses in one paragraph."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from tests.fakes import sandbox_folders
from tests.fakes.command_line import Answer, assert_refused, get_output, read_files, type_in
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_study
from tune_study.commands.reading.plot_gradients import parse_steps, read_analyses, select_steps
from tune_study.plan.errors import PlanError

STUDY = FakeStudy(total_steps=3, test_freq=2, levels=10)
RUNS = (FakeRun("0", steps=3), FakeRun("0.1", steps=3))


def plot(folder: Path, line: str = "") -> Answer:
    return type_in(f"plot-gradients {folder} {line}")


def write_analyzed_study(output: Path, *analyses: Sequence[FakeAnalysis]) -> Path:
    """Write a study with one run for each list of analyses."""
    runs = RUNS[: len(analyses)]
    folder = write_study(output, runs, STUDY)
    for run, run_analyses in zip(runs, analyses, strict=True):
        write_analyses(folder, run, run_analyses)
    return folder


@pytest.fixture
def single_run_study(tmp_path: Path) -> Path:
    """A study of one run that is analyzed at steps 1 and 11, before and after the filter."""
    return write_analyzed_study(
        tmp_path, [FakeAnalysis(step, prefilter=is_prefilter) for step in (1, 11) for is_prefilter in (True, False)]
    )


@pytest.fixture
def mixed_study(tmp_path: Path) -> Path:
    """A study of two runs, and a probe of the first."""
    return write_analyzed_study(
        tmp_path, [FakeAnalysis(1), FakeAnalysis(1, "probe")], [FakeAnalysis(1), FakeAnalysis(11)]
    )


def list_expected_files(*steps: int, prefix: str = "") -> set[str]:
    figure_names = ("plots", "loss_plots", "reward_std", "normed_grads", "summary")
    file_names = {f"gradient_analysis_{figure_name}_step_{step}.png" for figure_name in figure_names for step in steps}
    file_names |= {f"gradient_analysis_metrics_step_{step}.json" for step in steps}
    file_names |= {f"gradient_analysis_bucket_rv_table_step_{step}.csv" for step in steps}
    return {prefix + name for name in file_names | {"gradient_analysis_steps.png"}}


def list_selections(table: pd.DataFrame) -> list[tuple[object, ...]]:
    groups = table.groupby(["run_id", "source"], sort=False)
    return [(*names, tuple(sorted(set(rows["step"])))) for names, rows in groups]


@pytest.mark.slow
def test_the_pictures_of_every_step_go_into_the_runs_folder(single_run_study: Path) -> None:
    answer = plot(single_run_study)
    target = single_run_study / "figures" / "gradients" / "arm0-seed0"
    assert (answer.code, answer.err) == (0, "")
    assert read_files(target).keys() == list_expected_files(1, 11)
    assert {Path(line) for line in answer.out.splitlines()} == {target / name for name in list_expected_files(1, 11)}
    metrics = json.loads((target / "gradient_analysis_metrics_step_11.json").read_text())
    assert {"grad_norm/all/task", "grad_norm_prefilter/bucket_6/entropy", "actor/loss/total"} <= set(metrics)


@pytest.mark.parametrize("texts", [("11", "1"), ("1,11",), ("11, 1", "11")])
def test_steps_are_chosen_in_any_spelling(single_run_study: Path, texts: tuple[str, ...]) -> None:
    table = select_steps(read_analyses(single_run_study), None, None, parse_steps(texts))
    assert list_selections(table) == [("arm0-seed0", "train", (1, 11))]


@pytest.mark.slow
def test_an_output_folder_of_ones_own(single_run_study: Path, tmp_path: Path) -> None:
    get_output(plot(single_run_study, f"--step 11 --output-dir {tmp_path}/new/pictures"))
    assert read_files(tmp_path / "new" / "pictures").keys() == list_expected_files(11)
    assert not (single_run_study / "figures").exists()


@pytest.mark.slow
def test_runs_and_probes_have_folders_of_their_own(mixed_study: Path) -> None:
    assert plot(mixed_study).code == 0
    assert read_files(mixed_study / "figures" / "gradients").keys() == (
        list_expected_files(1, prefix="arm0-seed0/")
        | list_expected_files(1, prefix="arm0-seed0/probe/")
        | list_expected_files(1, 11, prefix="arm01-seed0/")
    )


@pytest.mark.parametrize(
    ("trial", "source", "steps", "selections"),
    [
        (None, None, (11,), [("arm01-seed0", "train", (11,))]),
        (None, "probe", (), [("arm0-seed0", "probe", (1,))]),
        ("arm01-seed0", None, (), [("arm01-seed0", "train", (1, 11))]),
        ("0.1", None, (11, 1), [("arm01-seed0", "train", (1, 11))]),
    ],
)
def test_a_run_a_source_and_steps_can_be_chosen(
    mixed_study: Path,
    trial: str | None,
    source: str | None,
    steps: tuple[int, ...],
    selections: list[tuple[object, ...]],
) -> None:
    assert list_selections(select_steps(read_analyses(mixed_study), trial, source, steps)) == selections


def test_steps_are_listed_and_nothing_is_drawn(mixed_study: Path) -> None:
    output = get_output(plot(mixed_study, "--list-steps"))
    assert [line.split()[:3] for line in output.splitlines()[1:]] == [
        ["arm0-seed0", "train", "1"],
        ["arm0-seed0", "probe", "1"],
        ["arm01-seed0", "train", "1"],
        ["arm01-seed0", "train", "11"],
    ]
    assert "after the filter" in output
    assert "task, entropy" in output
    assert not (mixed_study / "figures").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--step 2", "Step 2 was not analyzed: type --step with one of 1, 11."),
        ("--step x", "--step 'x' is not a step: type whole numbers"),
        ("--step 1,,2", "has an empty entry"),
        (
            "--trial arm2-seed0",
            "There is no analysis of a run `arm2-seed0`: type --trial and one of arm0-seed0, arm01-seed0.",
        ),
        ("--source test", "There is no analysis from source test: leave --source out, or type --source probe."),
        (
            "--trial arm01-seed0 --source probe",
            "There is no analysis from source probe: leave --source out, or type --source tr",
        ),
        ("--output-dir new", "and 3 were analyzed: add such as --trial arm0-seed0 --source train."),
        ("--trial arm0-seed0 --output-dir new", "--output-dir takes the figures of one run and source, and 2 were"),
    ],
)
def test_bad_input_gets_one_paragraph_and_writes_nothing(
    mixed_study: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixed_study.parent)
    files_before = read_files(mixed_study.parent)
    answer = plot(mixed_study, line)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""
    assert read_files(mixed_study.parent) == files_before


def test_a_study_without_analyses_says_how_to_get_some(tmp_path: Path) -> None:
    folder = write_analyzed_study(tmp_path, [])
    for line in ("", "--list-steps"):
        assert_refused(
            plot(folder, line),
            "has no gradient analysis: run a study with --set trainer.gradient_analysis_mode=True",
            f"type `python -m tune_study probe {folder}` to analyze",
        )
    # With several runs, `probe` has to be told which.
    several_runs = write_study(tmp_path / "several", [FakeRun("0", steps=2), FakeRun("0.1", steps=2)])
    assert f"`python -m tune_study probe {several_runs} --trial 0` to analyze" in plot(several_runs, "").err


def test_a_study_without_a_language_model_is_told_where_its_gradients_are(tmp_path: Path) -> None:
    folder = sandbox_folders.write_sandbox(tmp_path, sandbox_folders.make_seed_runs("DG", (0.4,)))
    with pytest.raises(PlanError, match="fine-tuned no language model: the gradients of its runs were measured during"):
        read_analyses(folder)


def test_a_folder_that_cannot_be_made_is_refused(single_run_study: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    assert_refused(plot(single_run_study, f"--output-dir {tmp_path}/taken"), "taken cannot be written")
    assert (tmp_path / "taken").read_text() == "mine"

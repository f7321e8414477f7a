"""Tests of what a notebook asks of a study: charts and single runs."""

import re
from pathlib import Path

import pytest

import analysis
from analysis.charts.chart import WIDTH
from analysis.data.frames import FRAME_NAMES, SCHEMAS
from analysis.data.load import load as load_frames
from analysis.notebook.frames import NotebookFrames
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

SMALL = FakeStudy(levels=40, total_steps=10)
ARMS = ("0", "0.1", "nofilter")


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> NotebookFrames:
    runs = [FakeRun(arm, seed, steps=10) for arm in ARMS for seed in (3, 1)]
    return analysis.load(write_study(tmp_path_factory.mktemp("study"), runs, SMALL))


def test_a_run_has_its_rows_of_every_frame_and_an_arm_stands_for_its_smallest_seed(frames: NotebookFrames) -> None:
    run = frames.run("0.1", seed=3)
    assert (run.arm, run.seed) == ("0.1", 3)
    assert set(run.steps["run_id"]) == set(run.levels["run_id"]) == {run.run_id}
    assert list(run.steps["step"]) == list(range(1, 11))
    assert run.trial["arm"] == "0.1"
    setting = frames.trials.set_index("run_id").loc[run.run_id, "config/actor.kl_loss_coef"]
    assert run.settings[("actor", "kl_loss_coef")] == setting == 0.1
    assert repr(run) == "StudyRun 0.1, seed 3: completed"
    run = frames.run("0")
    assert run.seed == 1
    assert frames.run(run.run_id) == run
    # Reports name the setting, too, and who types a number means its value.
    assert frames.run("KL 0") == frames.run(0) == frames.run(0.0) == run


def test_a_run_that_does_not_exist_is_answered_with_those_that_do(frames: NotebookFrames) -> None:
    with pytest.raises(ValueError, match=r"There is no arm `0.2` here. Choose one of: 0, 0.1, nofilter."):
        frames.run("0.2")
    with pytest.raises(ValueError, match=r"`0.1` has no seed 2. Choose one of: 1, 3."):
        frames.run("0.1", 2)


def test_an_arm_of_several_studies_needs_one_of_them(tmp_path: Path) -> None:
    for run in ("first", "second"):
        write_study(tmp_path, [FakeRun("0", steps=4)], FakeStudy(run=run, levels=8, total_steps=4))
    both = analysis.load(tmp_path)
    with pytest.raises(ValueError, match="Several studies have an arm `0`: use select_study with one of first, second"):
        both.run("0")
    assert both.select_study("second").run("0").steps["study"].eq("second").all()


def test_frames_without_a_folder_restore_nothing_and_selected_ones_keep_charts_and_runs(frames: NotebookFrames) -> None:
    loose = NotebookFrames(frames.trials, frames.steps, frames.levels, frames.study)
    with pytest.raises(ValueError, match=r"not loaded from a folder: use analysis.load"):
        loose.run("0").restore()
    assert isinstance(frames.select_study("kl"), NotebookFrames)
    assert not isinstance(load_frames(frames.folders[0]), NotebookFrames)


@pytest.mark.long
def test_charts_name_the_arms_by_their_setting_and_are_shown_without_network(frames: NotebookFrames) -> None:
    survival = frames.plot.survival()
    for chart in (frames.plot.dose_response(), frames.plot.curves("entropy"), survival):
        content = chart.to_dict()  # checks it against the schema of Vega-Lite
        arms = {row["arm"] for rows in content["datasets"].values() for row in rows if "arm" in row}
        assert arms == {"KL 0", "KL 0.1", "nofilter"}
        assert content["width"] == WIDTH
    shown = survival._repr_mimebundle_()
    assert list(shown) == ["text/html"]
    assert not re.search(r"""(?:src|href)\s*=\s*["']https?://|https?://cdn""", shown["text/html"])
    assert "KL 0.1" in shown["text/html"]


def test_a_notebook_shows_the_sizes_of_all_tables(frames: NotebookFrames) -> None:
    text = frames._repr_html_()
    assert f"<td>{frames.study.name}</td>" in text
    assert all(f"<code>{name}</code> {len(getattr(frames, name)):,}" in text for name in FRAME_NAMES)


def test_what_has_no_chart_is_refused(frames: NotebookFrames, tmp_path: Path) -> None:
    for typed, advice in (("entropi", "`entropy`"), ("val_succes", "`val_success`")):
        with pytest.raises(ValueError, match=f"There is no step column `{typed}` in this study.*{advice}"):
            frames.plot.curves(typed)
    plot = analysis.load(write_study(tmp_path / "empty", [], SMALL)).plot
    for draw in (plot.dose_response, plot.curves, plot.survival):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()
    points = [{"actor.kl_loss_coef": kl, "actor.entropy_coeff": entropy} for kl in (0.0, 0.1) for entropy in (0.0, 0.1)]
    runs = [FakeRun(f"point{index}", steps=4, settings=point) for index, point in enumerate(points)]
    with pytest.raises(ValueError, match="The arms of this study form a grid"):
        analysis.load(write_study(tmp_path, runs, SMALL)).plot.dose_response()


def test_the_means_are_those_of_the_report(tmp_path: Path) -> None:
    stop = ("low_validation_success", 0.0, 0.01)
    runs = [FakeRun("0", 0, steps=10), FakeRun("0", 1, status="early_stopped", steps=5, success=(0.3, 0.0), stop=stop)]
    frames = analysis.load(write_study(tmp_path, runs, SMALL))
    content = frames.plot.curves("val_success").to_dict()
    (rows,) = content["datasets"].values()
    last_values = frames.steps.groupby("run_id")["val_success"].last()
    means = [row["value"] for row in rows if row["run_id"] == "mean of KL 0"]
    assert means[-1] == pytest.approx(last_values.mean(), rel=1e-12)  # a stopped run keeps its last value
    assert content["layer"][0]["encoding"]["y"]["axis"]["title"] == "validation success (fraction)"


def test_names_agree_between_the_tables() -> None:
    """A column of `trials` that sums up one of `steps` has its name after a word that says how (docs/metrics.md)."""
    trials, steps = (SCHEMAS[name].keys() for name in ("trials", "steps"))
    prefixes = ("base_", "final_", "mean_", "late_", "peak_")
    named = {name: name.removeprefix(prefix) for name in trials for prefix in prefixes if name.startswith(prefix)}
    assert len(named) >= 9
    assert set(named.values()) <= steps
    # Every other column of results has the same name in both.
    results = {name for name in trials if "success" in name or name.startswith(("total_", "seconds_"))}
    assert results - named.keys() <= steps

"""Tests of what a report shows of gradients and of retrieval, which appear only where a run measured them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.grid.layout import name_arms
from analysis.report.gradients import GRADIENTS
from analysis.report.page import render_page, view_sections
from analysis.report.pages import draw_figures
from analysis.report.results import SweepResults
from analysis.report.section import Heading, Section
from tests.analysis.report.test_pages import Page, parse_page
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_study

SMALL = FakeStudy(levels=20, total_steps=6)
Spec = dict[str, Any]


def make_frames(output: Path, arms: dict[str, list[FakeAnalysis]], seeds: int = 1) -> StudyFrames:
    runs = [(FakeRun(arm, seed, steps=6), analyses) for arm, analyses in arms.items() for seed in range(seeds)]
    folder = write_study(output, [run for run, _ in runs], SMALL)
    for run, analyses in runs:
        write_analyses(folder, run, [replace(fake_analysis, seed=run.seed) for fake_analysis in analyses])
    return read_study(folder)


def draw(frames: StudyFrames) -> dict[str, Spec]:
    """Draw the figures for which the frames have data."""
    results = SweepResults(name_arms(frames))
    tables = {figure: figure.make_table(results) for figure in GRADIENTS.figures}
    return {
        figure.name: charts.make_spec(figure.draw(table, results))
        for figure, table in tables.items()
        if table is not None and len(table)
    }


def get_lines(spec: Spec) -> tuple[list[str], list[str], list[list[int]]]:
    """Return the lines in the legend of a figure, with their colors and their dashes."""
    line = next(layer for layer in spec["spec"]["layer"] if layer["mark"]["type"] == "line")["encoding"]
    assert line["color"]["scale"]["domain"] == line["strokeDash"]["scale"]["domain"]
    return line["color"]["scale"]["domain"], line["color"]["scale"]["range"], line["strokeDash"]["scale"]["range"]


def get_curves(spec: Spec) -> dict[tuple[str, str], int]:
    """Return the number of buckets of each curve."""
    rows = pd.DataFrame(spec["datasets"][spec["data"]["name"]])
    curves: dict[tuple[str, str], int] = rows.groupby(["line", "curve"], sort=False).size().to_dict()
    return curves


def make_page(frames: StudyFrames, section: Section[SweepResults] = GRADIENTS) -> Page:
    results = SweepResults(name_arms(frames))
    return parse_page(render_page(Heading("", "title"), view_sections([section], results, with_charts=True)))


@pytest.mark.long
def test_gradients_are_on_the_page_and_arms_have_different_colors(tmp_path: Path) -> None:
    analyses = [FakeAnalysis(step, prefilter=prefilter) for step in (1, 5) for prefilter in (True, False)]
    frames = make_frames(tmp_path, {"0": analyses}, seeds=3)
    page = make_page(frames)
    words = page.words
    assert "gradients" in page.ids
    assert "How much of the gradient step of each bucket comes from the KL and entropy terms." in words
    assert "signal: rho" in words
    assert "The step is the expected one, without noise" in words
    for step in (1, 5):  # arm, step, batch, component, runs, buckets
        assert f"KL 0 {step} before the filter task 3 18" in words
    assert "Spearman's rank correlation with the reward std" in words
    frames = make_frames(
        tmp_path / "arms", {arm: [FakeAnalysis(1), FakeAnalysis(5)] for arm in ("0", "0.1", "1")}, seeds=2
    )
    figures = draw(frames)
    for name in ("gradient_signal", "regularizer_share"):
        lines, colors, _ = get_lines(figures[name])
        assert (lines, len(set(colors))) == (["KL 0", "KL 0.1", "KL 1"], 3)
        assert list(get_curves(figures[name]).values()) == [6] * 6


@pytest.mark.long
def test_probes_are_lines_and_rows_of_their_own_beside_training(tmp_path: Path) -> None:
    probe = FakeAnalysis(5, "probe", components=("task", "kl"))
    frames = make_frames(tmp_path, {"0": [FakeAnalysis(1), FakeAnalysis(5), probe], "1": [FakeAnalysis(1)]})
    figures = draw(frames)
    for name in ("gradient_signal", "regularizer_share"):
        lines, colors, dashes = get_lines(figures[name])
        assert lines == ["KL 0", "KL 1", "KL 0, probe"]
        assert dashes == [[1, 0], [1, 0], [5, 3]]
        assert colors[0] == colors[2] != colors[1]  # of one arm
        assert list(get_curves(figures[name]).values()) == [6, 6, 6]
    words = make_page(frames, replace(GRADIENTS, figures=())).words
    assert "KL 0 5 probe, after the filter kl 1 6" in words
    assert "KL 0 1 after the filter" not in words  # arm 0 is shown only at its last step


@pytest.mark.slow
def test_a_filter_that_kept_nothing_is_on_the_page(tmp_path: Path) -> None:
    analyses = [FakeAnalysis(1, prefilter=True), FakeAnalysis(1, buckets=0)]
    words = make_page(make_frames(tmp_path, {"0": analyses})).words
    assert "The filter dropped all groups of arm0-seed0, step 1." in words
    assert "KL 0 1 before the filter task 1 6" in words


def test_without_a_regularizer_its_figure_is_left_out(tmp_path: Path) -> None:
    figures = draw(make_frames(tmp_path, {"0": [FakeAnalysis(components=("task",))]}))
    assert "gradient_signal" in figures
    assert "regularizer_share" not in figures


def test_retrieval_has_figures_where_it_was_measured(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, {"0": []})
    names = ["retrieval", "retrieval_first_turn"]
    assert not draw_figures(frames, names)
    column = "collapse_trajectory_retrieval_accuracy"
    measured = replace(frames, steps=frames.steps.assign(**{column: 1 / frames.steps["step"]}))
    (chart,) = draw_figures(measured, names).values()
    (rows,) = chart.to_dict()["datasets"].values()
    assert [row["value"] for row in rows] == measured.steps[column].to_list()

"""Tests that figures draw exactly their tables. They compare the data of the artists."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.sweep import plots, series, tables
from analysis.sweep.collapse import compute_survival
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STOP = ("low_validation_success", 0.002, 0.01)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    runs = [FakeRun("0", 0), FakeRun("0", 1), FakeRun("0.1"), FakeRun("nofilter", status="interrupted", steps=30)]
    runs.insert(3, FakeRun("1", status="early_stopped", steps=20, success=(0.35, 0.0), stop=STOP))
    return read_study(write_study(tmp_path_factory.mktemp("plots"), runs, FakeStudy(levels=60)))


@pytest.fixture(scope="module")
def colors() -> dict[str, str]:
    return plots.make_arm_colors(["0", "0.1", "1", "nofilter"], ["nofilter"])


def get_lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def get_points(axes: Axes, color: str = "") -> list[tuple[float, float]]:
    """Return every marker, or only those filled with `color` if one is given."""
    collections = [collection for collection in axes.collections if not color or _get_fill_color(collection) == color]
    return [
        (float(x), float(y)) for collection in collections for x, y in np.ma.filled(collection.get_offsets(), np.nan)
    ]


def _get_fill_color(collection: PathCollection) -> str:
    colors = collection.get_facecolor()
    return to_hex(colors[0]) if len(colors) else "none"


def test_dose_response_draws_every_arm_with_its_interval(frames: StudyFrames) -> None:
    table, runs = tables.make_dose_response(frames), tables.make_run_outcomes(frames)
    (axes,) = plots.draw_dose_response(table, runs, "actor.kl_loss_coef").axes
    lines, scored = get_lines(axes), table[table["scored"] > 0]
    for row in scored.itertuples():
        assert ([row.x, row.x], [row.low, row.high]) in lines
        assert (row.x, row.success) in get_points(axes)
    assert axes.get_xticks().tolist() == table["x"].to_list()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.1", "1", "nofilter"]
    assert axes.get_xlabel().startswith("actor.kl_loss_coef")
    assert axes.get_ylabel() == "success (fraction of episodes)"
    for base in (table["base"].iloc[0], table["base_greedy"].iloc[0]):
        assert any(y == [base, base] for _, y in lines)


def test_dose_response_joins_only_the_arms_on_the_scale(frames: StudyFrames) -> None:
    table, runs = tables.make_dose_response(frames), tables.make_run_outcomes(frames)
    (axes,) = plots.draw_dose_response(table, runs, "setting").axes
    joined = table[table["arm"].isin(["0.1", "1"])]
    assert (joined["x"].to_list(), joined["success"].to_list()) in get_lines(axes)
    dotted = [x[0] for x, y in get_lines(axes) if x[0] == x[-1] and y == [0, 1]]
    assert dotted == [np.mean(table["x"][:2]), np.mean(table["x"][2:])]


def test_dose_response_draws_single_runs_where_arms_have_several(frames: StudyFrames) -> None:
    table, runs = tables.make_dose_response(frames), tables.make_run_outcomes(frames)
    (axes,) = plots.draw_dose_response(table, pd.concat([runs, runs]), "setting").axes
    assert set(zip(runs["x"], runs["outcome"], strict=True)) <= set(get_points(axes))


def get_legend_names(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_names_only_what_is_drawn(frames: StudyFrames) -> None:
    table, runs = tables.make_dose_response(frames), tables.make_run_outcomes(frames)
    names = get_legend_names(plots.draw_dose_response(table, runs, "setting"))
    assert "every run stopped" in names
    assert "some runs stopped" not in names
    partly_stopped = table.assign(scored=table["scored"] + 1)
    assert "some runs stopped" in get_legend_names(plots.draw_dose_response(partly_stopped, runs, "setting"))
    sampled_only = table.assign(early_stopped=0, greedy=np.nan, test=np.nan, base=np.nan, base_greedy=np.nan)
    assert get_legend_names(plots.draw_dose_response(sampled_only, runs, "setting")) == ["validation, sampled"]


def test_a_stopped_arm_has_its_own_marker(frames: StudyFrames) -> None:
    table, runs = tables.make_dose_response(frames), tables.make_run_outcomes(frames)
    (axes,) = plots.draw_dose_response(table, runs, "setting").axes
    stopped = table[table["arm"] == "1"].iloc[0]
    assert get_points(axes, plots.STOPPED_COLOR) == [(stopped["x"], stopped["success"])]


def test_curves_have_a_panel_per_arm_with_every_run(frames: StudyFrames, colors: dict[str, str]) -> None:
    table = series.make_curves(frames, "val_success")
    means = series.compute_mean_curves(table, carry_forward=True)
    figure = plots.draw_curves(table, means, colors, "validation success (fraction)")
    assert [panel.get_title("left") for panel in figure.axes] == list(colors)
    for panel, arm in zip(figure.axes, colors, strict=True):
        (gray_line,) = [line for line in panel.get_lines() if to_hex(line.get_color()) == plots.GHOST_COLOR]
        arm_lines = [line for line in panel.get_lines() if line is not gray_line]
        assert {to_hex(line.get_color()) for line in arm_lines} == {colors[arm]}
        runs, others = (
            [(run["step"].to_list(), run["value"].to_list()) for _, run in rows.groupby("run_id", sort=False)]
            for rows in (table[table["arm"] == arm], table[table["arm"] != arm])
        )
        mean = means[means["arm"] == arm]
        expected = runs + ([(mean["step"].to_list(), mean["value"].to_list())] if len(mean) else [])
        assert [(list(line.get_xdata()), list(line.get_ydata())) for line in arm_lines] == expected
        assert split_at_gaps(gray_line) == others


def split_at_gaps(line: Line2D) -> list[tuple[list[float], list[float]]]:
    """Return the steps and values of a line between its gaps."""
    coordinates = np.array([line.get_xdata(), line.get_ydata()], dtype=float)
    bounds = [-1, *np.flatnonzero(np.isnan(coordinates[0])), coordinates.shape[1]]
    pieces = [coordinates[:, left + 1 : right].tolist() for left, right in pairwise(bounds)]
    return [(steps, values) for steps, values in pieces]


def test_curves_mark_how_a_run_ended(frames: StudyFrames, colors: dict[str, str]) -> None:
    table = series.make_curves(frames, "val_success")
    figure = plots.draw_curves(table, series.compute_mean_curves(table), colors, "label")
    marks = {panel.get_title("left"): get_points(panel) for panel in figure.axes}
    ends = table.groupby("run_id").last()
    assert marks["0"] == []
    assert marks["1"] == [(20, ends.loc["arm1-seed0", "value"])]
    assert marks["nofilter"] == [(30, ends.loc["armnofilter-seed0", "value"])]


def test_labels_have_units(frames: StudyFrames, colors: dict[str, str]) -> None:
    table = series.make_curves(frames, "entropy")
    figure = plots.draw_curves(table, series.compute_mean_curves(table), colors, "entropy (nats per token)")
    assert figure.get_supxlabel() == "training step"
    assert figure.get_supylabel() == "entropy (nats per token)"


def test_steps_are_whole_numbers_in_a_short_study_too(frames: StudyFrames, colors: dict[str, str]) -> None:
    table = series.make_curves(frames, "entropy").query("step <= 3")
    arm = table["arm"].iloc[0]
    figure = plots.draw_curves(table, series.compute_mean_curves(table), {arm: colors[arm]}, "label")
    assert all(tick == int(tick) for panel in figure.axes for tick in panel.get_xticks())


def test_survival_draws_its_table(frames: StudyFrames, colors: dict[str, str]) -> None:
    table = compute_survival(frames)
    (axes,) = plots.draw_survival(table, colors).axes
    # The rule stops the run at step 20, but its success has been halved at two validations by step 15.
    assert get_lines(axes) == [([0, 60], [1, 1]), ([0, 15], [1, 0])]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["no collapse: 0, 0.1, nofilter", "1: 1 of 1 collapsed"]


def test_colors_are_ordered_in_lightness_and_words_are_gray_or_brown() -> None:
    colors = plots.make_arm_colors([*"012345", "nofilter"], ["nofilter"])
    luminance = [np.dot(_to_rgb(colors[arm]), (0.2126, 0.7152, 0.0722)) for arm in "012345"]
    assert list(colors) == [*"012345", "nofilter"]
    assert np.all(np.diff(luminance) > 0)
    assert luminance[-1] < 0.75  # readable on white
    assert colors["nofilter"] in plots.WORD_COLORS
    assert plots.make_arm_colors(["a"], ["a"]) == {"a": plots.WORD_COLORS[0]}


def _to_rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))


def test_no_arm_and_no_curve_still_make_a_figure(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", status="", steps=0)], FakeStudy(levels=4)))
    table = series.make_curves(frames, "val_success")
    figure = plots.draw_curves(table, series.compute_mean_curves(table), plots.make_arm_colors(["0"]), "label")
    assert figure.axes == []

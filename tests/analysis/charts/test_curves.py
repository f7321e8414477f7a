"""Tests that charts over training steps draw exactly their tables."""

from typing import Any

import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts import curves as module
from analysis.charts.curves import draw_curves, draw_intervals, draw_onsets, draw_survival
from analysis.data.frames import StudyFrames
from analysis.sweep import series
from analysis.sweep.collapse import compute_survival
from tests.analysis.charts.specs import Layer, read_layers, read_spec

CURVE_LAYERS = ("thin", "thick", "single", "rings", "stops", "targets")
Colors = dict[str, str]


@pytest.fixture(scope="module")
def table(frames: StudyFrames) -> pd.DataFrame:
    return series.make_curves(frames, "val_success")


@pytest.fixture(scope="module")
def means(table: pd.DataFrame) -> pd.DataFrame:
    return series.compute_mean_curves(table, carry_forward=True)


def read_curves(table: pd.DataFrame, means: pd.DataFrame, colors: Colors) -> dict[str, Layer]:
    layers = read_layers(draw_curves(table, means, colors, "success (fraction)"))
    return dict(zip(("band",) * (len(layers) - len(CURVE_LAYERS)) + CURVE_LAYERS, layers, strict=True))


def test_curves_have_every_run_and_mean(table: pd.DataFrame, means: pd.DataFrame, colors: Colors) -> None:
    layers = read_curves(table, means, colors)
    # An arm of one run has its run in place of a mean.
    assert set(layers["thin"].rows["arm"]) == set(means["arm"]) == {"0"}
    assert layers["thin"].mark["strokeWidth"] < layers["thick"].mark["strokeWidth"]
    lines = pd.concat([layers["thin"].rows, layers["thick"].rows])
    expected = pd.concat([table, means.assign(run_id="mean of 0")])
    columns = ["run_id", "step", "value"]
    assert lines[columns].sort_values(columns).to_numpy().tolist() == (
        expected[columns].sort_values(columns).to_numpy().tolist()
    )
    assert layers["single"].rows.empty
    for name, arm, step in (("rings", "0.1", 6), ("stops", "0.3", 5)):
        assert layers[name].list("arm", "step", "value") == [
            [arm, step, table.loc[table["arm"] == arm, "value"].iloc[-1]]
        ]
    assert layers["stops"].mark["color"] == charts.STOPPED_COLOR
    # The pointer finds every value, and no mean, which has no run.
    targets = layers["targets"]
    assert targets.rows["value"].to_list() == table["value"].to_list()
    assert [entry["field"] for entry in targets.encoding["tooltip"]] == ["arm", "seed", "step", "value", "status"]
    assert targets.encoding["y"]["axis"]["title"] == "success (fraction)"
    assert targets.encoding["x"]["axis"]["tickMinStep"] == 1  # steps are whole numbers in a short study, too
    assert targets.encoding["color"]["scale"] == {"domain": list(colors), "range": list(colors.values())}
    assert targets.encoding["color"]["legend"]["orient"] == "bottom"


@pytest.mark.parametrize("panel", [None, "arm"])
def test_targets_of_the_pointer_are_not_in_pictures(table: pd.DataFrame, colors: Colors, panel: str | None) -> None:
    spec = read_spec(draw_curves(table, series.compute_mean_curves(table), colors, "success", panel=panel))
    assert str(spec).count(f"'name': '{charts.TARGETS}") == 1
    svg = charts.draw_svg(spec)
    assert svg.count('aria-roledescription="point"') == 2  # a ring and a cross
    assert svg.count('aria-roledescription="line mark"') >= table["run_id"].nunique()


def test_means_have_bands_and_single_points_a_mark(table: pd.DataFrame, means: pd.DataFrame, colors: Colors) -> None:
    band = read_curves(table, means.assign(standard_error=0.125), colors)["band"]
    assert (band.mark["type"], band.get_field("y"), band.get_field("y2")) == ("area", "low", "high")
    assert band.rows["low"].to_list() == pytest.approx((means["value"] - 0.125).to_list())
    assert band.rows["high"].to_list() == pytest.approx((means["value"] + 0.125).to_list())
    table = table.drop_duplicates("run_id")
    means = series.compute_mean_curves(table)
    layers = read_curves(table, means, colors)
    assert layers["single"].mark["type"] == "point"
    assert len(layers["single"].rows) == len(means) + len(table)
    assert layers["thin"].rows.empty
    assert layers["thick"].rows.empty
    assert "<svg" in charts.draw_svg(read_spec(draw_curves(table[:0], means[:0], colors, "no curve")))


def test_long_curves_are_thinned_and_keep_their_last_points(
    table: pd.DataFrame, means: pd.DataFrame, colors: Colors, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, steps = table.drop_duplicates("run_id", keep="last"), range(1, 12)
    long = ends.loc[ends.index.repeat(11)].assign(step=[*steps] * len(ends)).reset_index(drop=True)
    monkeypatch.setattr(module, "MAX_POINTS", len(long) // 3)
    layers = read_curves(long, means[:0], colors)
    assert layers["targets"].rows["step"].to_list() == [1, 5, 9, 11] * len(ends)
    assert layers["rings"].list("step") == layers["stops"].list("step") == [[11]]


def test_panels_have_the_order_of_the_table(table: pd.DataFrame, means: pd.DataFrame, colors: Colors) -> None:
    table = table.assign(panel="KL " + table["arm"], dash=table["seed"].astype(str))

    def read(table: pd.DataFrame) -> dict[str, Any]:
        return read_spec(draw_curves(table, means[:0], colors, "a", dash="dash", panel="panel", line_at=0.25))

    spec = read(table)
    assert (spec["facet"]["field"], spec["facet"]["sort"]) == ("panel", list(dict.fromkeys(table["panel"])))
    assert (spec["columns"], spec["spec"]["width"]) == (3, 230)
    line, thin, *_, targets = spec["spec"]["layer"]
    assert line["mark"]["type"] == "rule"
    assert thin["encoding"]["strokeDash"]["field"] == "dash"
    assert "dash" in {tooltip["field"] for tooltip in targets["encoding"]["tooltip"]}
    assert "facet" not in read(table.assign(panel="one"))


def test_survival_draws_its_table(frames: StudyFrames, colors: Colors) -> None:
    lines, targets = read_layers(draw_survival(compute_survival(frames), colors))
    for layer in (lines, targets):
        drawn = layer.rows.groupby("arm")[["step", "surviving_fraction"]].agg(list)
        assert drawn.loc["0"].to_list() == [[0, 10], [1, 1]]
        assert drawn.loc["0.3"].to_list() == [[0, 5], [1, 0]]
    assert lines.mark["interpolate"] == "step-after"
    assert lines.encoding["y"]["scale"]["domain"] == [0, 1]


def test_onsets_are_points_in_rows_by_their_median(colors: Colors) -> None:
    onsets = [("late", "a", 9), ("late", "b", 7), ("early", "a", 2), ("early", "b", 4), ("once", "b", 5)]
    table = pd.DataFrame([*onsets, ("never", "a", None)], columns=["label", "run_id", "onset"])
    table = table.assign(arm="0", seed=0, low=table["onset"] - 1, high=table["onset"] + 2)
    intervals, points, bars = read_layers(draw_onsets(table, colors))
    assert points.encoding["y"]["sort"] == ["early", "once", "late"]
    assert points.list("label", "run_id", "onset") == [list(onset) for onset in onsets]
    assert (points.get_field("x"), intervals.get_field("x"), intervals.get_field("x2")) == ("onset", "low", "high")
    # A run has the same place in every row.
    assert points.rows.groupby("run_id")["offset"].unique().map(list).to_dict() == {"a": [-0.25], "b": [0.25]}
    assert bars.list("label", "onset") == [["early", 3], ["once", 5], ["late", 8]]


def test_intervals_are_beside_zero_the_margin_and_their_pairs() -> None:
    columns = ["name", "difference", "difference_low", "difference_high"]
    table = pd.DataFrame([("up", 0.2, 0.1, 0.4), ("down", -0.3, None, None)], columns=columns)
    pairs = pd.DataFrame([("up", 0.15), ("up", 0.25)], columns=["name", "difference"])
    band, zero, rings, bounds, points = read_layers(draw_intervals(table, "label", margin=0.05, pairs=pairs))
    assert (band.list("from", "to"), zero.list("at")) == ([[-0.05, 0.05]], [[0]])
    assert rings.list("name", "difference") == [["up", 0.15], ["up", 0.25]]
    assert bounds.list(*columns) == [["up", 0.2, 0.1, 0.4]]
    assert (bounds.get_field("x"), bounds.get_field("x2")) == ("difference_low", "difference_high")
    assert points.list("name", "difference") == [["up", 0.2], ["down", -0.3]]
    assert points.encoding["y"]["sort"] == ["up", "down"]
    assert (points.mark["filled"], rings.mark.get("filled", False)) == (True, False)
    assert points.encoding["x"]["axis"]["title"] == "label"
    assert len(read_layers(draw_intervals(table, "label"))) == 3

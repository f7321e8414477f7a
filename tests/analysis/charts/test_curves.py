"""Tests that charts over training steps draw exactly their tables."""

import re

import numpy as np
import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts import curves as module
from analysis.charts.curves import draw_arm_lines, draw_curves, draw_intervals, draw_onsets, draw_survival
from analysis.data.frames import StudyFrames
from analysis.sweep import series
from analysis.sweep.collapse import compute_survival
from tests.analysis.charts.specs import Layer, read_layers, read_spec

CURVE_LAYERS = ("thin", "thick", "single", "rings", "stops", "targets")


@pytest.fixture(scope="module")
def table(frames: StudyFrames) -> pd.DataFrame:
    return series.make_curves(frames, "val_success")


def read_curves(table: pd.DataFrame, means: pd.DataFrame, colors: dict[str, str]) -> dict[str, Layer]:
    layers = read_layers(draw_curves(table, means, colors, "success (fraction)"))
    return dict(zip(("band",) * (len(layers) - len(CURVE_LAYERS)) + CURVE_LAYERS, layers, strict=True))


def test_curves_have_every_run_the_mean_of_several_and_marks_where_runs_ended(
    table: pd.DataFrame, colors: dict[str, str]
) -> None:
    means = series.compute_mean_curves(table, carry_forward=True)
    layers = read_curves(table, means, colors)
    lines = pd.concat([layers["thin"].rows, layers["thick"].rows])
    # An arm of one run has its run in place of a mean.
    assert set(layers["thin"].rows["arm"]) == set(means["arm"]) == {"0"}
    assert layers["thin"].mark["strokeWidth"] < layers["thick"].mark["strokeWidth"]
    for run_id, rows in table.groupby("run_id"):
        drawn = lines[lines["run_id"] == run_id]
        assert (drawn["step"].to_list(), drawn["value"].to_list()) == (rows["step"].to_list(), rows["value"].to_list())
    drawn = lines[lines["run_id"] == "mean of 0"]
    assert (drawn["step"].to_list(), drawn["value"].to_list()) == (means["step"].to_list(), means["value"].to_list())
    assert layers["single"].rows.empty
    for name, arm, step in (("rings", "0.1", 6), ("stops", "0.3", 5)):
        (mark,) = layers[name].rows.to_dict("records")
        assert (mark["arm"], mark["step"]) == (arm, step)
        assert mark["value"] == table.loc[table["arm"] == arm, "value"].iloc[-1]
    assert layers["stops"].mark["color"] == charts.STOPPED_COLOR
    # The pointer finds every value, and no mean, which has no run.
    targets = layers["targets"]
    assert targets.rows["value"].to_list() == table["value"].to_list()
    assert [entry["field"] for entry in targets.encoding["tooltip"]] == ["arm", "seed", "step", "value", "status"]
    assert targets.encoding["y"]["axis"]["title"] == "success (fraction)"
    assert targets.encoding["x"]["axis"]["tickMinStep"] == 1  # steps are whole numbers in a short study, too
    assert targets.encoding["color"]["scale"] == {"domain": list(colors), "range": list(colors.values())}
    assert targets.encoding["color"]["legend"]["orient"] == "bottom"


def test_targets_of_the_pointer_are_not_in_pictures(table: pd.DataFrame, colors: dict[str, str]) -> None:
    means = series.compute_mean_curves(table)
    for chart in (
        draw_curves(table, means, colors, "success"),
        draw_curves(table.assign(panel=table["arm"]), means[:0], colors, "success", panel="panel", key="k"),
    ):
        spec = read_spec(chart)
        assert str(spec).count(f"'name': '{charts.TARGETS}") == 1
        svg = charts.draw_svg(spec)
        symbols = re.findall(r'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="point"', svg)
        assert len(symbols) == 2  # a ring and a cross
        assert svg.count('aria-roledescription="line mark"') >= table["run_id"].nunique()


def test_curves_of_one_point_have_a_mark(table: pd.DataFrame, colors: dict[str, str]) -> None:
    table = table.drop_duplicates("run_id")
    means = series.compute_mean_curves(table)
    layers = read_curves(table, means, colors)
    assert layers["single"].mark["type"] == "point"
    assert len(layers["single"].rows) == len(means) + len(table)
    assert layers["thin"].rows.empty
    assert layers["thick"].rows.empty


def test_a_mean_with_an_error_has_a_band(table: pd.DataFrame, colors: dict[str, str]) -> None:
    means = series.compute_mean_curves(table).assign(standard_error=0.125)
    band = read_curves(table, means, colors)["band"]
    assert band.mark["type"] == "area"
    assert (band.encoding["y"]["field"], band.encoding["y2"]["field"]) == ("low", "high")
    assert (means["value"] - band.rows["low"].to_numpy()).to_list() == pytest.approx([0.125] * len(means))
    assert (band.rows["high"].to_numpy() - means["value"]).to_list() == pytest.approx([0.125] * len(means))


def test_long_curves_are_thinned_and_keep_their_last_points(
    table: pd.DataFrame, colors: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = range(1, 12)
    long = pd.concat([rows.iloc[[-1] * 11].assign(step=steps, value=steps) for _, rows in table.groupby("run_id")])
    monkeypatch.setattr(module, "MAX_POINTS", len(long) // 4)
    layers = read_curves(long.reset_index(drop=True), series.compute_mean_curves(long)[:0], colors)
    for _, rows in layers["targets"].rows.groupby("run_id"):
        assert rows["step"].to_list() == [1, 6, 11]
    assert layers["rings"].rows["step"].to_list() == layers["stops"].rows["step"].to_list() == [11]


def test_panels_and_dashes_have_the_order_of_the_table(table: pd.DataFrame, colors: dict[str, str]) -> None:
    table = table.assign(panel="KL " + table["arm"], dash=np.where(table["seed"] == 0, "first", "other"))
    options = {"dash": "dash", "panel": "panel", "line_at": 0.25}
    spec = read_spec(draw_curves(table, table[:0][["arm", "step", "value"]], colors, "success", **options))  # type: ignore[arg-type]
    assert (spec["facet"]["field"], spec["facet"]["sort"]) == ("panel", list(dict.fromkeys(table["panel"])))
    assert (spec["columns"], spec["spec"]["width"]) == (3, 230)
    line, *_, targets = spec["spec"]["layer"]
    assert line["mark"]["type"] == "rule"
    assert spec["spec"]["layer"][1]["encoding"]["strokeDash"]["field"] == "dash"
    assert targets["encoding"]["tooltip"][-1]["field"] == "dash"
    one = draw_curves(table.assign(panel="one"), table[:0][["arm", "step", "value"]], colors, "success", **options)  # type: ignore[arg-type]
    assert "facet" not in read_spec(one)


def test_a_curve_chart_without_rows_can_be_drawn(table: pd.DataFrame, colors: dict[str, str]) -> None:
    chart = draw_curves(table[:0], series.compute_mean_curves(table[:0]), colors, "success")
    assert "<svg" in charts.draw_svg(read_spec(chart))


def test_survival_draws_its_table(frames: StudyFrames, colors: dict[str, str]) -> None:
    lines, targets = read_layers(draw_survival(compute_survival(frames), colors))
    for layer in (lines, targets):
        drawn = layer.rows.groupby("arm")[["step", "surviving_fraction"]].agg(list)
        assert drawn.loc["0"].to_list() == [[0, 10], [1, 1]]
        assert drawn.loc["0.3"].to_list() == [[0, 5], [1, 0]]
    assert lines.mark["interpolate"] == "step-after"
    assert lines.encoding["y"]["scale"]["domain"] == [0, 1]
    assert [entry["field"] for entry in targets.encoding["tooltip"]] == [
        "arm", "step", "surviving_fraction", "collapsed", "runs"
    ]  # fmt: skip


def test_lines_of_arms_have_a_panel_per_measure_with_chance(colors: dict[str, str]) -> None:
    rows = [(arm, "retrieval", step, value + step, 0.1) for arm, value in (("0", 1.0), ("0.1", 2.0)) for step in (0, 5)]
    table = pd.DataFrame([*rows, ("0", "entropy", 0, 3.0, None)], columns=["arm", "measure", "step", "value", "chance"])
    retrieval, guess, entropy, no_guess = read_layers(draw_arm_lines(table, colors))
    assert retrieval.rows["value"].to_list() == [1, 6, 2, 7]
    assert (retrieval.encoding["y"]["axis"]["title"], entropy.encoding["y"]["axis"]["title"]) == (
        "retrieval",
        "entropy",
    )
    assert guess.rows[["step", "chance"]].to_numpy().tolist() == [[0, 0.1], [5, 0.1]]
    assert guess.mark["strokeDash"]
    assert (len(entropy.rows), len(no_guess.rows)) == (1, 0)
    assert retrieval.encoding["color"]["scale"]["domain"] == ["0", "0.1"]


def test_onsets_are_points_in_rows_by_their_median(colors: dict[str, str]) -> None:
    values = {"late": (9, 7), "early": (2, 4), "never": (None, None), "once": (None, 5)}
    table = pd.DataFrame(
        [
            (
                label,
                run_id,
                "0",
                seed,
                onset,
                None if onset is None else onset - 1,
                None if onset is None else onset + 2,
            )
            for label, onsets in values.items()
            for seed, (run_id, onset) in enumerate(zip("ab", onsets, strict=True))
        ],
        columns=["label", "run_id", "arm", "seed", "onset", "low", "high"],
    )
    intervals, points, bars = read_layers(draw_onsets(table, colors))
    assert points.encoding["y"]["sort"] == ["early", "once", "late"]
    assert points.rows[["label", "onset"]].to_numpy().tolist() == [
        ["late", 9], ["late", 7], ["early", 2], ["early", 4], ["once", 5]
    ]  # fmt: skip
    assert (points.rows["onset"] - intervals.rows["low"]).eq(1).all()
    assert (intervals.encoding["x"]["field"], intervals.encoding["x2"]["field"]) == ("low", "high")
    # A run has the same place in every row.
    assert points.rows.groupby("run_id")["offset"].unique().map(list).to_dict() == {"a": [-0.25], "b": [0.25]}
    assert bars.rows.set_index("label")["onset"].to_dict() == {"early": 3, "once": 5, "late": 8}


def test_intervals_are_beside_zero_the_margin_and_their_pairs() -> None:
    columns = ["name", "difference", "difference_low", "difference_high"]
    table = pd.DataFrame([("up", 0.2, 0.1, 0.4), ("down", -0.3, None, None)], columns=columns)
    pairs = pd.DataFrame([("up", 0.15), ("up", 0.25)], columns=["name", "difference"])
    band, zero, rings, bounds, points = read_layers(draw_intervals(table, "label", margin=0.05, pairs=pairs))
    assert band.rows.to_numpy().tolist() == [[-0.05, 0.05]]
    assert zero.rows["at"].to_list() == [0]
    assert rings.rows["difference"].to_list() == [0.15, 0.25]
    assert bounds.rows[["name", "difference_low", "difference_high"]].to_numpy().tolist() == [["up", 0.1, 0.4]]
    assert (bounds.encoding["x"]["field"], bounds.encoding["x2"]["field"]) == ("difference_low", "difference_high")
    assert points.rows[["name", "difference"]].to_numpy().tolist() == [["up", 0.2], ["down", -0.3]]
    assert points.encoding["y"]["sort"] == ["up", "down"]
    assert points.encoding["x"]["axis"]["title"] == "label"
    assert len(read_layers(draw_intervals(table, "label"))) == 3

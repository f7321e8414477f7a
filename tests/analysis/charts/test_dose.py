"""Tests that the dose-response chart draws exactly its tables."""

import numpy as np
import pandas as pd
import pytest

from analysis.charts.chart import STOPPED_COLOR
from analysis.charts.dose import draw_dose_response
from analysis.data.frames import StudyFrames
from analysis.sweep import tables
from tests.analysis.charts.specs import Layer, read_layers

LAYERS = ("base", "intervals", "ticks", "dots", "points", "failed", "partly")


@pytest.fixture(scope="module")
def table(frames: StudyFrames) -> pd.DataFrame:
    # Recorded noise would give intervals to arms of one run, too.
    return tables.make_dose_response(frames).assign(low=lambda rows: rows["success"] - 0.1, high=0.9)


@pytest.fixture(scope="module")
def runs(frames: StudyFrames) -> pd.DataFrame:
    return tables.make_run_outcomes(frames)


def read_doses(table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str]) -> dict[str, Layer]:
    chart = draw_dose_response(table, runs, colors, "actor.kl_loss_coef")
    return dict(zip(LAYERS, read_layers(chart), strict=True))


def test_every_measure_of_an_arm_is_a_point_at_its_place(
    table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str]
) -> None:
    layers = read_doses(table, runs, colors)
    scored = table[table["scored"] > 0].set_index("arm")
    points = layers["points"].rows
    measures = {"success": "validation, sampled", "greedy": "validation, greedy", "test": "test, sampled"}
    for column, measure in measures.items():
        drawn = points[points["measure"] == measure].set_index("arm")["value"]
        assert drawn.to_dict() == scored[column].dropna().to_dict()
    # The measures of an arm stand side by side: test, sampled, greedy; intervals are those of sampled success alone.
    places = points.pivot_table(index="arm", columns="measure", values="x")[list(measures.values())]
    assert places["validation, sampled"].to_dict() == scored["x"].to_dict()
    assert (places["test, sampled"] < places["validation, sampled"]).all()
    assert (places["validation, sampled"] < places["validation, greedy"]).all()
    intervals = layers["intervals"].rows.set_index("arm")
    assert intervals["low"].to_dict() == scored["low"].to_dict()
    assert set(intervals["measure"]) == {"validation, sampled"}
    assert (layers["intervals"].encoding["y"]["field"], layers["intervals"].encoding["y2"]["field"]) == ("low", "high")
    assert layers["ticks"].rows[["x", "tick"]].to_numpy().tolist() == table[["x", "tick"]].to_numpy().tolist()
    encoding = layers["points"].encoding
    assert encoding["x"]["axis"]["title"].startswith("actor.kl_loss_coef  (")
    assert encoding["y"]["axis"]["title"] == "success (fraction of episodes)"
    assert encoding["shape"]["scale"]["domain"] == list(measures.values())
    assert [entry["field"] for entry in encoding["tooltip"]] == [
        "arm", "measure", "value", "low", "high", "scored", "outcome"
    ]  # fmt: skip


def test_horizontal_lines_are_the_policy_before_training(
    table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str]
) -> None:
    base = read_doses(table, runs, colors)["base"]
    assert base.rows.set_index("measure")["value"].to_dict() == {
        "before training, sampled": table["base"].iloc[0],
        "before training, greedy": table["base_greedy"].iloc[0],
    }
    assert base.encoding["strokeDash"]["scale"]["range"] == [[5, 4], [1, 3]]  # as the caption says: dashed and dotted


def test_only_what_was_measured_is_drawn(table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str]) -> None:
    missing = dict.fromkeys(("greedy", "test", "base", "base_greedy", "low"), np.nan)
    layers = read_doses(table.assign(**missing, early_stopped=0), runs, colors)
    assert layers["points"].encoding["shape"]["scale"]["domain"] == ["validation, sampled"]
    assert all(layers[name].rows.empty for name in ("base", "intervals", "failed", "partly"))


def test_single_runs_are_drawn_where_arms_have_several(
    table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str]
) -> None:
    assert len(runs) == len(table)
    assert read_doses(table, runs, colors)["dots"].rows.empty
    more = pd.concat([runs, runs.assign(outcome=0.5)])
    dots = read_doses(table, more, colors)["dots"].rows
    assert dots[["arm", "x", "value"]].to_numpy().tolist() == more[["arm", "x", "outcome"]].to_numpy().tolist()


@pytest.mark.parametrize(("more_runs", "name"), [(0, "failed"), (1, "partly")])
def test_a_stopped_arm_has_a_mark_of_its_own(
    table: pd.DataFrame, runs: pd.DataFrame, colors: dict[str, str], more_runs: int, name: str
) -> None:
    layers = read_doses(table.assign(scored=table["scored"] + more_runs), runs, colors)
    (mark,) = layers[name].rows.to_dict("records")
    stopped = table.set_index("arm").loc["0.3"]
    assert (mark["arm"], mark["x"], mark["value"]) == ("0.3", stopped["x"], stopped["success"])
    assert layers[name].mark["color"] == STOPPED_COLOR
    assert layers[name].mark["shape"] == {"failed": "cross", "partly": "circle"}[name]
    assert layers[{"failed": "partly", "partly": "failed"}[name]].rows.empty

"""Tests that the dose-response chart draws exactly its tables."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from analysis.charts.chart import STOPPED_COLOR
from analysis.charts.dose import draw_dose_response
from analysis.data.frames import StudyFrames
from analysis.sweep import tables
from tests.analysis.charts.specs import Layer, read_layers

LAYERS = ("base", "intervals", "ticks", "dots", "points", "failed", "partly")
MEASURES = {"test": "test, sampled", "success": "validation, sampled", "greedy": "validation, greedy"}
Draw = Callable[..., dict[str, Layer]]


@pytest.fixture(scope="module")
def table(frames: StudyFrames) -> pd.DataFrame:
    # Recorded noise would give intervals to arms of one run, too.
    return tables.make_dose_response(frames, tables.summarize_arms(frames)).assign(
        low=lambda rows: rows["success"] - 0.1, high=0.9
    )


@pytest.fixture(scope="module")
def draw(frames: StudyFrames, table: pd.DataFrame, colors: dict[str, str]) -> Draw:
    """Draws the table with columns of other values, and these runs or those of the study."""

    def draw(runs: pd.DataFrame | None = None, **columns: object) -> dict[str, Layer]:
        runs = tables.make_run_outcomes(frames) if runs is None else runs
        chart = draw_dose_response(table.assign(**columns), runs, colors, "actor.kl_loss_coef")
        return dict(zip(LAYERS, read_layers(chart), strict=True))

    return draw


def test_every_measure_of_an_arm_is_a_point_at_its_place(table: pd.DataFrame, draw: Draw) -> None:
    layers, scored = draw(), table[table["scored"] > 0].set_index("arm")
    points = layers["points"].rows
    for column, measure in MEASURES.items():
        drawn = points[points["measure"] == measure].set_index("arm")["value"]
        assert drawn.to_dict() == scored[column].dropna().to_dict()
    # The measures of an arm stand side by side, and intervals are those of sampled success alone.
    places = points.pivot_table(index="arm", columns="measure", values="x")
    assert places["validation, sampled"].to_dict() == scored["x"].to_dict()
    assert (places[list(MEASURES.values())].diff(axis=1).iloc[:, 1:] > 0).all(axis=None)
    intervals = layers["intervals"]
    assert intervals.rows.set_index("arm")["low"].to_dict() == scored["low"].to_dict()
    assert set(intervals.rows["measure"]) == {"validation, sampled"}
    assert (intervals.get_field("y"), intervals.get_field("y2")) == ("low", "high")
    assert layers["ticks"].list("x", "tick") == table[["x", "tick"]].to_numpy().tolist()
    encoding = layers["points"].encoding
    assert encoding["x"]["axis"]["title"].startswith("actor.kl_loss_coef  (")
    assert encoding["y"]["axis"]["title"] == "success (fraction of episodes)"
    assert set(encoding["shape"]["scale"]["domain"]) == set(MEASURES.values())
    assert {"arm", "measure", "value", "low", "high"} <= {entry["field"] for entry in encoding["tooltip"]}
    # As the caption says, lines are the policy before training: dashed sampled, and dotted greedy.
    base = layers["base"]
    assert base.rows["value"].to_list() == table[["base", "base_greedy"]].iloc[0].to_list()
    assert base.rows["measure"].to_list() == base.encoding["strokeDash"]["scale"]["domain"]
    assert base.encoding["strokeDash"]["scale"]["range"] == [[5, 4], [1, 3]]


def test_only_what_was_measured_is_drawn_and_single_runs_where_arms_have_several(
    frames: StudyFrames, draw: Draw
) -> None:
    layers = draw(early_stopped=0, **dict.fromkeys(("greedy", "test", "base", "base_greedy", "low"), np.nan))
    assert layers["points"].encoding["shape"]["scale"]["domain"] == ["validation, sampled"]
    assert all(layers[name].rows.empty for name in ("base", "intervals", "failed", "partly"))
    runs = tables.make_run_outcomes(frames)
    assert draw(runs)["dots"].rows.empty
    more = pd.concat([runs, runs.assign(outcome=0.5)])
    assert draw(more)["dots"].list("arm", "x", "value") == more[["arm", "x", "outcome"]].to_numpy().tolist()


@pytest.mark.parametrize(
    ("scored", "name", "other", "shape"), [(1, "failed", "partly", "cross"), (2, "partly", "failed", "circle")]
)
def test_a_stopped_arm_has_a_mark_of_its_own(
    table: pd.DataFrame, draw: Draw, scored: int, name: str, other: str, shape: str
) -> None:
    layers, stopped = draw(scored=scored), table.set_index("arm").loc["0.3"]
    assert layers[name].list("arm", "x", "value") == [["0.3", stopped["x"], stopped["success"]]]
    assert (layers[name].mark["color"], layers[name].mark["shape"]) == (STOPPED_COLOR, shape)
    assert layers[other].rows.empty

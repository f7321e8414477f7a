"""Charts against an axis: success at the end of each arm."""

from collections.abc import Mapping
from typing import NamedTuple

import altair as alt
import pandas as pd

from analysis.charts.chart import (
    HEIGHT,
    INK,
    STOPPED_COLOR,
    layer,
    make_color_scale,
    make_legend,
    make_opacity,
    make_tooltips,
    mark_stop,
)


class _Measure(NamedTuple):
    """A column of the dose-response table. place: right of the position of its arm, or left of it if negative."""

    name: str
    mark: str
    place: int


_MEASURES = {
    "success": _Measure("validation, sampled", "circle", 0),
    "greedy": _Measure("validation, greedy", "triangle-up", 1),
    "test": _Measure("test, sampled", "square", -1),
}
_SUCCESS = alt.Tooltip("value:Q", title="success", format=".3f")
_BASE_LINES = {"base": "before training, sampled", "base_greedy": "before training, greedy"}


def draw_dose_response(
    table: pd.DataFrame, runs: pd.DataFrame, colors: Mapping[str, str], setting: str
) -> alt.LayerChart:
    """Draw success at the end against the axis. A click on the legend leaves one measure, on a point its arm.

    table: from `tables.make_dose_response`. runs: from `tables.make_run_outcomes`. colors: by arm. setting: the name of
    the axis.
    """
    points = _make_points(table)
    legend_choice = alt.selection_point(name="measure", fields=["measure"], bind="legend")
    arm_choice = alt.selection_point(name="arm", fields=["arm"])
    opacity = make_opacity(legend_choice & arm_choice)
    note = "log scale; 0 and named arms stand apart" if table["scale"].iloc[0] == "log" else "evenly spaced by rank"
    x = alt.X(
        "x:Q",
        axis=alt.Axis(labels=False, ticks=False, grid=False, title=f"{setting}  ({note})", titlePadding=24),
        scale=alt.Scale(zero=False, nice=False, padding=24),
    )
    y_axis = alt.Axis(title="success (fraction of episodes)")
    y = alt.Y("value:Q", axis=y_axis)
    color = alt.Color("arm:N", legend=None, scale=make_color_scale(colors))
    measures = [measure for column, measure in _MEASURES.items() if (points["column"] == column).any()]
    shapes = alt.Scale(domain=[measure.name for measure in measures], range=[measure.mark for measure in measures])
    bounds = [
        alt.Tooltip("low:Q", title="95 % interval from", format=".3f"),
        alt.Tooltip("high:Q", title="to", format=".3f"),
    ]
    marks = (
        alt.Chart(points, name="points")
        .mark_point(size=90, filled=True)
        .encode(
            x=x,
            y=y,
            color=color,
            shape=alt.Shape("measure:N", legend=make_legend(), scale=shapes),
            opacity=opacity,
            tooltip=[
                *make_tooltips("arm:N", "measure:N"),
                _SUCCESS,
                *bounds,
                alt.Tooltip("scored:Q", title="runs"),
                alt.Tooltip("outcome:N"),
            ],
        )
        .add_params(legend_choice, arm_choice)
    )
    intervals = (
        alt.Chart(points.dropna(subset="low"))
        .mark_rule(strokeWidth=2)
        .encode(x=x, y=alt.Y("low:Q", axis=y_axis), y2=alt.Y2("high:Q"), color=color, opacity=opacity)
    )
    # With one run per arm, these points would repeat the means.
    single_runs = runs.rename(columns={"outcome": "value"}).iloc[: len(runs) if len(runs) > len(table) else 0]
    dots = (
        alt.Chart(single_runs[["arm", "x", "value"]])
        .mark_point(size=14, filled=True, color=INK, opacity=0.55)
        .encode(x=x, y=y, tooltip=[alt.Tooltip("arm:N"), _SUCCESS])
    )
    # Arms have positions of their own, in which 0 and words have a place, so their labels are texts below the axis.
    ticks = alt.Chart(table[["x", "tick"]]).mark_text(dy=12).encode(x=x, y=alt.value(HEIGHT), text=alt.Text("tick:N"))
    stopped = points[(points["column"] == "success") & (points["early_stopped"] > 0)]
    has_failed = stopped["early_stopped"] == stopped["scored"]
    edge = {"shape": "circle", "size": 120, "strokeWidth": 2, "color": STOPPED_COLOR}
    stops = [
        alt.Chart(rows)
        .mark_point(**mark)
        .encode(x=x, y=y, opacity=opacity, tooltip=[alt.Tooltip("arm:N"), _SUCCESS, alt.Tooltip("outcome:N")])
        for rows, mark in ((stopped[has_failed], mark_stop(240)), (stopped[~has_failed], edge))
    ]
    return layer(_draw_base_lines(table, y), intervals, ticks, dots, marks, *stops)


def _make_points(table: pd.DataFrame) -> pd.DataFrame:
    """Melt the dose-response table to a row per arm and measure: value, measure, x, outcome, and bounds if any."""
    columns = ["arm", "x", "low", "high", "scored", "early_stopped"]
    points = table.melt(columns, list(_MEASURES), var_name="column").dropna(subset="value")
    # Side by side: equal values would cover each other.
    offset = 0.012 * max(table["x"].max() - table["x"].min(), 1.0)
    return points.assign(
        # The interval is about sampled validation success alone.
        **points[["low", "high"]].where(points["column"] == "success"),
        measure=points["column"].map({column: measure.name for column, measure in _MEASURES.items()}),
        x=points["x"] + offset * points["column"].map({column: measure.place for column, measure in _MEASURES.items()}),
        outcome=points["early_stopped"].map(lambda count: f"{count or 'none'} stopped as a failure"),
    )


def _draw_base_lines(table: pd.DataFrame, y: alt.Y) -> alt.Chart:
    base = table[list(_BASE_LINES)].head(1).melt(var_name="column").dropna()
    dashes = alt.Scale(domain=list(_BASE_LINES.values()), range=[[5, 4], [1, 3]])
    return (
        alt.Chart(base.assign(measure=base["column"].map(_BASE_LINES)))
        .mark_rule(opacity=0.6)
        .encode(
            y=y,
            strokeDash=alt.StrokeDash("measure:N", legend=None, scale=dashes),
            tooltip=[alt.Tooltip("measure:N"), _SUCCESS],
        )
    )

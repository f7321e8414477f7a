"""Charts against an axis: success at the end of each arm."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from analysis.charts import chart as charts

_MEASURES = {"success": "validation, sampled", "greedy": "validation, greedy", "test": "test, sampled"}
"""Columns of the dose-response table."""
_MARKS = {"success": "circle", "greedy": "triangle-up", "test": "square"}
_PLACES = {"success": 0, "greedy": 1, "test": -1}
"""Right of the position of its arm, or left of it if negative."""
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
    choices = charts.choose("measure"), alt.selection_point(name="arm", fields=["arm"])
    opacity = charts.make_opacity(choices[0] & choices[1])
    x = alt.X(
        "x:Q",
        axis=alt.Axis(labels=False, ticks=False, grid=False, title=f"{setting}  (evenly spaced)", titlePadding=24),
        scale=alt.Scale(zero=False, nice=False, padding=24),
    )
    y_axis = alt.Axis(title="success (fraction of episodes)")
    y = alt.Y("value:Q", axis=y_axis)
    color = charts.make_color("arm", colors, None)
    shown = [column for column in _MEASURES if (points["column"] == column).any()]
    shapes = alt.Scale(domain=[_MEASURES[column] for column in shown], range=[_MARKS[column] for column in shown])
    shape = alt.Shape("measure:N", legend=charts.make_legend(), scale=shapes)
    arm, outcome = charts.make_tooltips("arm:N", "outcome:N")
    tooltips = [
        *(arm, alt.Tooltip("measure:N"), _SUCCESS),
        alt.Tooltip("low:Q", title="95 % interval from", format=".3f"),
        alt.Tooltip("high:Q", title="to", format=".3f"),
        *(alt.Tooltip("scored:Q", title="runs"), outcome),
    ]
    marks = alt.Chart(points, name="points").mark_point(size=90, filled=True).add_params(*choices)
    intervals = alt.Chart(points.dropna(subset="low")).mark_rule(strokeWidth=2)
    # With one run per arm, these points would repeat the means.
    single_runs = runs.rename(columns={"outcome": "value"}).iloc[: len(runs) if len(runs) > len(table) else 0]
    dots = alt.Chart(single_runs[["arm", "x", "value"]]).mark_point(
        size=14, filled=True, color=charts.INK, opacity=0.55
    )
    # Words have positions, too, so the labels of arms are texts below the axis.
    ticks = alt.Chart(table[["x", "tick"]]).mark_text(dy=12)
    stopped = points[(points["column"] == "success") & (points["early_stopped"] > 0)]
    has_failed = stopped["early_stopped"] == stopped["scored"]
    edge = {"shape": "circle", "size": 120, "strokeWidth": 2, "color": charts.STOPPED_COLOR}
    stops = [
        alt.Chart(rows).mark_point(**mark).encode(x, y, opacity=opacity, tooltip=[arm, _SUCCESS, outcome])
        for rows, mark in ((stopped[has_failed], charts.mark_stop(240)), (stopped[~has_failed], edge))
    ]
    base = table[list(_BASE_LINES)].head(1).melt(var_name="column").dropna()
    base_lines = alt.Chart(base.assign(measure=base["column"].map(_BASE_LINES))).mark_rule(opacity=0.6)
    dashes = alt.Scale(domain=list(_BASE_LINES.values()), range=[[5, 4], [1, 3]])
    dash = alt.StrokeDash("measure:N", legend=None, scale=dashes)
    return charts.layer(
        base_lines.encode(y, dash, tooltip=[alt.Tooltip("measure:N"), _SUCCESS]),
        intervals.encode(x, alt.Y("low:Q", axis=y_axis), alt.Y2("high:Q"), color, opacity=opacity),
        ticks.encode(x, y=alt.value(charts.HEIGHT), text=alt.Text("tick:N")),
        dots.encode(x, y, tooltip=[arm, _SUCCESS]),
        marks.encode(x, y, color, shape, opacity=opacity, tooltip=tooltips),
        *stops,
    )


def _make_points(table: pd.DataFrame) -> pd.DataFrame:
    """Melt the dose-response table to a row per arm and measure: value, measure, x, outcome, and bounds if any."""
    columns = ["arm", "x", "low", "high", "scored", "early_stopped"]
    points = table.melt(columns, list(_MEASURES), var_name="column").dropna(subset="value")
    # Side by side: equal values would cover each other.
    offset = 0.012 * max(table["x"].max() - table["x"].min(), 1.0)
    return points.assign(
        # The interval is about sampled validation success alone.
        **points[["low", "high"]].where(points["column"] == "success"),
        measure=points["column"].map(_MEASURES),
        x=points["x"] + offset * points["column"].map(_PLACES),
        outcome=points["early_stopped"].map(lambda count: f"{count or 'none'} stopped as a failure"),
    )

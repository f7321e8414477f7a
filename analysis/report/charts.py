"""Interactive charts: the figures of a report with values under the pointer, and with arms that can be switched off.

Each function draws a table of `tables`, `series` or `collapse` and computes no further numbers. A chart is as wide as
its page. Texts of a study, such as the names of arms, are data and scale domains, and never part of an expression.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from analysis.sweep.plots import STOPPED_COLOR, TEXT_COLOR, format_dose_label

MAX_ROWS = 5_000
"""Rows of a chart. A longer table would make a page of megabytes, and is drawn as a picture alone."""
MAX_ARMS = 12
"""Arms of a chart. In the picture each has a panel of its own; in one panel more cannot be told apart."""

_HEIGHT = 300
_FAINT_OPACITY = 0.08


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


def fits(table: pd.DataFrame) -> bool:
    """Whether the table of a figure has few enough rows and arms for a chart; otherwise a picture shows more."""
    return len(table) <= MAX_ROWS and table["arm"].nunique() <= MAX_ARMS


def chart_dose_response(
    table: pd.DataFrame, runs: pd.DataFrame, colors: Mapping[str, str], setting: str
) -> alt.LayerChart:
    """Success at the end against the axis. A click on the legend leaves one measure, a click on a point its arm.

    table: from `tables.make_dose_response`. runs: from `tables.make_run_outcomes`. colors: colors by arm. setting: the
    name of the axis.
    """
    points = _make_points(table)
    legend_choice = alt.selection_point(name="measure", fields=["measure"], bind="legend")
    arm_choice = alt.selection_point(name="arm", fields=["arm"])
    opacity = _make_opacity(legend_choice & arm_choice)
    title = format_dose_label(table, setting)
    x = alt.X(
        "x:Q",
        axis=alt.Axis(labels=False, ticks=False, grid=False, title=title, titlePadding=24),
        scale=alt.Scale(zero=False, nice=False, padding=24),
    )
    y_axis = alt.Axis(title="success (fraction of episodes)")
    y = alt.Y("value:Q", axis=y_axis)
    color = alt.Color("arm:N", legend=None, scale=_make_color_scale(colors))
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
            shape=alt.Shape("measure:N", legend=_make_legend(), scale=shapes),
            opacity=opacity,
            tooltip=[
                *_make_tooltips("arm:N", "measure:N"),
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
        .mark_point(size=10, filled=True, color=TEXT_COLOR, opacity=0.55)
        .encode(x=x, y=y, tooltip=[alt.Tooltip("arm:N"), _SUCCESS])
    )
    # Arms have positions of their own, in which 0 and words have a place, so their labels are texts below the axis.
    ticks = (
        alt.Chart(table[["x", "tick"]])
        .mark_text(dy=12, color=TEXT_COLOR)
        .encode(x=x, y=alt.value(_HEIGHT), text=alt.Text("tick:N"))
    )
    stops = [
        alt.Chart(rows)
        .mark_point(**mark)
        .encode(x=x, y=y, opacity=opacity, tooltip=[alt.Tooltip("arm:N"), _SUCCESS, alt.Tooltip("outcome:N")])
        for rows, mark in _select_stops(points)
    ]
    return _layer(_draw_base_lines(table, y), intervals, ticks, dots, marks, *stops)


def _make_points(table: pd.DataFrame) -> pd.DataFrame:
    """The dose-response table with a row per arm and measure: value, measure, x, outcome, and bounds if it has some."""
    columns = ["arm", "x", "low", "high", "scored", "early_stopped"]
    points = table.melt(columns, list(_MEASURES), var_name="column").dropna(subset="value")
    # Side by side, as in the picture: equal values would cover each other.
    offset = 0.012 * max(table["x"].max() - table["x"].min(), 1.0)
    return points.assign(
        # The interval is that of sampled validation success alone.
        **points[["low", "high"]].where(points["column"] == "success"),
        measure=points["column"].map({column: measure.name for column, measure in _MEASURES.items()}),
        x=points["x"] + offset * points["column"].map({column: measure.place for column, measure in _MEASURES.items()}),
        outcome=points["early_stopped"].map(lambda count: f"{count or 'none'} stopped as a failure"),
    )


def _select_stops(points: pd.DataFrame) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """The arms that a rule stopped with their marks: vermilion crosses where it stopped all runs, else edges."""
    stopped = points[(points["column"] == "success") & (points["early_stopped"] > 0)]
    has_failed = stopped["early_stopped"] == stopped["scored"]
    return [
        (stopped[has_failed], {"shape": "cross", "angle": 45, "size": 240, "filled": True, "color": STOPPED_COLOR}),
        (stopped[~has_failed], {"shape": "circle", "size": 120, "strokeWidth": 2, "color": STOPPED_COLOR}),
    ]


def _draw_base_lines(table: pd.DataFrame, y: alt.Y) -> alt.Chart:
    base = table[list(_BASE_LINES)].head(1).melt(var_name="column").dropna()
    return (
        alt.Chart(base.assign(measure=base["column"].map(_BASE_LINES)))
        .mark_rule(color="#777777")
        .encode(
            y=y,
            strokeDash=alt.StrokeDash(
                "measure:N", legend=None, scale=alt.Scale(domain=list(_BASE_LINES.values()), range=[[5, 4], [1, 3]])
            ),
            tooltip=[alt.Tooltip("measure:N"), _SUCCESS],
        )
    )


def chart_curves(table: pd.DataFrame, means: pd.DataFrame, colors: Mapping[str, str], label: str) -> alt.LayerChart:
    """The curves of all runs and the mean of each arm. A click on the legend leaves one arm, with Shift several.

    table: from `series.make_curves`. means: from `series.compute_mean_curves`. colors: colors by arm.
    """
    arm_choice = alt.selection_point(name="arm", fields=["arm"], bind="legend")
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False))
    # As the title of a channel, it would become a part of an expression.
    y = alt.Y("value:Q", axis=alt.Axis(title=label))
    color = alt.Color("arm:N", legend=_make_legend(), scale=_make_color_scale(colors, table["arm"]))
    # Arms without a mean have one run, which is the curve of the arm.
    single_runs, shared_runs = (table[table["arm"].isin(means["arm"]) == is_shared] for is_shared in (False, True))
    thin_lines = (
        alt.Chart(shared_runs)
        .mark_line(strokeWidth=1)
        .encode(x, y, color, detail=alt.Detail("run_id:N"), opacity=_make_opacity(arm_choice, 0.45))
    )
    thick_lines = (
        alt.Chart(pd.concat([means, single_runs[["arm", "step", "value"]]]))
        .mark_line(strokeWidth=2.5)
        .encode(x, y, color, opacity=_make_opacity(arm_choice))
    )
    # As a line, a curve of one point would be invisible.
    curves = pd.concat([means, table])
    single_points = (
        alt.Chart(curves[~curves.duplicated(["arm", "run_id"], keep=False)][["arm", "step", "value"]])
        .mark_point(size=50, filled=True)
        .encode(x, y, color, opacity=_make_opacity(arm_choice))
    )
    # Points are the targets of the pointer: a line has no value under it.
    targets = (
        alt.Chart(table[["arm", "seed", "status", "step", "value"]], name="values")
        .mark_point(size=60, filled=True, opacity=0)
        .encode(
            x,
            y,
            color,
            tooltip=[
                *_make_tooltips("arm:N", "seed:N", "step:Q"),
                alt.Tooltip("value:Q", format=".4g"),
                alt.Tooltip("status:N"),
            ],
        )
        .add_params(arm_choice)
    )
    last_rows = table.groupby("run_id", sort=False).tail(1)
    ends = [
        alt.Chart(last_rows[is_shown])
        .mark_point(size=90, **mark)
        .encode(
            x, y, opacity=_make_opacity(arm_choice), tooltip=_make_tooltips("arm:N", "seed:N", "step:Q", "status:N")
        )
        for is_shown, mark in (
            (
                last_rows["status"] == "early_stopped",
                {"shape": "cross", "angle": 45, "filled": True, "color": STOPPED_COLOR},
            ),
            (~last_rows["status"].isin(["early_stopped", "completed"]), {"shape": "circle", "color": TEXT_COLOR}),
        )
    ]
    return _layer(thin_lines, thick_lines, single_points, *ends, targets)


def chart_survival(table: pd.DataFrame, colors: Mapping[str, str]) -> alt.LayerChart:
    """Fraction of runs that have not collapsed, by step. A click on the legend leaves one arm, with Shift several.

    table: from `collapse.compute_survival`.
    """
    arm_choice = alt.selection_point(name="arm", fields=["arm"], bind="legend")
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("surviving_fraction:Q", title="fraction of runs not collapsed", scale=alt.Scale(domain=[0, 1]))
    color = alt.Color("arm:N", legend=_make_legend(), scale=_make_color_scale(colors, table["arm"]))
    opacity = _make_opacity(arm_choice)
    lines = (
        alt.Chart(table, name="lines")
        .mark_line(interpolate="step-after", strokeWidth=2.5)
        .encode(x, y, color, opacity=opacity)
        .add_params(arm_choice)
    )
    targets = (
        alt.Chart(table)
        .mark_point(size=60, filled=True)
        .encode(
            x,
            y,
            color,
            opacity=opacity,
            tooltip=[
                *_make_tooltips("arm:N", "step:Q"),
                alt.Tooltip("surviving_fraction:Q", title="not collapsed", format=".3f"),
                *_make_tooltips("collapsed:Q", "runs:Q"),
            ],
        )
    )
    return _layer(lines, targets)


def _make_color_scale(colors: Mapping[str, str], arms: "pd.Series[str] | None" = None) -> alt.Scale:
    """The scale of arms, with those of `arms` only if it is given."""
    names = [arm for arm in colors if arms is None or (arms == arm).any()]
    return alt.Scale(domain=names, range=[colors[name] for name in names])


# Channels are given as objects: for a text such as "arm:N" Altair looks for the class of the channel through the whole
# schema, which took a third of the time of a chart.
def _make_tooltips(*columns: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(column) for column in columns]


def _make_opacity(choice: alt.Parameter | alt.PredicateComposition, on: float = 1.0) -> alt.OpacityValue:
    """Faint where something else is chosen."""
    condition = alt.when(choice).then(alt.value(on)).otherwise(alt.value(_FAINT_OPACITY))
    return alt.OpacityValue(**condition)


def _make_legend() -> alt.Legend:
    return alt.Legend(title=None, orient="bottom", columns=4, symbolOpacity=1, labelLimit=140)


def _layer(*charts: alt.Chart) -> alt.LayerChart:
    """Charts above each other, as wide as their page, with the colors of the figures."""
    # In one call: each further method would copy the chart with all of its data.
    return alt.LayerChart(
        layer=charts,
        width="container",
        height=_HEIGHT,
        background="white",
        config=alt.Config(
            view=alt.ViewConfig(stroke=None),
            axis=alt.AxisConfig(
                gridColor="#ececec", domainColor="#888888", labelColor=TEXT_COLOR, titleColor=TEXT_COLOR
            ),
            legend=alt.LegendConfig(labelColor=TEXT_COLOR),
        ),
    )

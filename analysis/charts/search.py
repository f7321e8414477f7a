"""Charts of a search. Each draws a table of `SearchResults` and computes no outcomes."""

import math
from collections.abc import Iterable, Sequence

import altair as alt
import pandas as pd

from analysis.charts.chart import INK, POINT_COLOR, STOPPED_COLOR, layer, make_color, make_tooltips, mark_stop
from analysis.search.trials import Importance
from trainable.runs.study_record import Dimension

_BEST_FRACTION = 0.25
_PANEL_WIDTH = 150
_PANELS_PER_ROW = 4
_COLUMNS = ["arm", "number", "success", "low", "high", "is_feasible", "is_front"]
"""What marks need of a table of points."""
_OUTCOME = alt.Axis(title="outcome", tickCount=5)


def draw_history(table: pd.DataFrame, is_higher_better: bool) -> alt.LayerChart:
    """Draw outcomes by the number of the point, and the best one so far. table: `SearchResults.values`."""
    points = table.filter(_COLUMNS)
    feasible = points[points["is_feasible"]]
    best = feasible.assign(best=feasible["success"].cummax() if is_higher_better else feasible["success"].cummin())
    x = alt.X("number:Q", title="number of the point (0: default)", axis=alt.Axis(tickMinStep=1, grid=False))
    bounds = alt.Chart(points).mark_rule(strokeWidth=2.5, opacity=0.25)
    line = alt.Chart(best).mark_line(interpolate="step-after", color=INK, strokeWidth=1.2)
    return layer(
        bounds.encode(x, alt.Y("low:Q", axis=_OUTCOME), alt.Y2("high:Q")),
        line.encode(x, alt.Y("best:Q", axis=_OUTCOME)),
        *_draw_points(points, x),
    )


def draw_importances(importances: Sequence[Importance]) -> alt.LayerChart:
    """Draw a bar per setting, the largest at the top, with its interval."""
    table = pd.DataFrame(importances, columns=Importance._fields)
    table = table.assign(name=_shorten_dimensions(table["name"]))
    y = alt.Y("name:N", sort=table["name"].to_list(), axis=alt.Axis(title=None))
    axis, scale = alt.Axis(title="share of importance"), alt.Scale(domain=[0, 1])
    bars = alt.Chart(table).mark_bar(color=POINT_COLOR, opacity=0.7, height=14)
    bounds = alt.Chart(table).mark_rule(strokeWidth=1.5)
    tooltips = make_tooltips("name:N", "value:Q", "low:Q", "high:Q")
    return layer(
        bars.encode(alt.X("value:Q", axis=axis, scale=scale), y, tooltip=tooltips),
        bounds.encode(alt.X("low:Q", axis=axis), alt.X2("high:Q"), y),
        height=alt.Step(24),
    )


def draw_slices(table: pd.DataFrame, space: Sequence[Dimension]) -> alt.ConcatChart:
    """Draw a small panel per dimension: outcome against its value, on the scale on which it was searched."""
    panels = []
    titles = _shorten_dimensions([dimension.name for dimension in space])
    for dimension, title in zip(space, titles, strict=True):
        values = table[dimension.name]
        points = table.filter(_COLUMNS).assign(value=values)[_scale(values, dimension).notna()]
        if dimension.values:
            x = alt.X("value:N", sort=list(dimension.values), axis=alt.Axis(title=title, labelAngle=0))
        else:
            scale = alt.Scale(type="log" if dimension.is_log else "linear", domain=[dimension.low, dimension.high])
            x = alt.X("value:Q", axis=alt.Axis(title=title, tickCount=3, format="~g"), scale=scale)
        panels.append(layer(*_draw_points(points, x, shade=True), width=_PANEL_WIDTH, height=140))
    return alt.ConcatChart(concat=panels, columns=_PANELS_PER_ROW)


def draw_parallel(table: pd.DataFrame, space: Sequence[Dimension], is_higher_better: bool) -> alt.LayerChart:
    """Draw a line per point through its settings, each on its own scale from 0 to 1, to its outcome."""
    names = _shorten_dimensions([dimension.name for dimension in space])
    outcome = table["success"]
    span = outcome.max() - outcome.min()
    rank = outcome.rank(ascending=not is_higher_better, method="first")
    group = pd.Series("other", index=table.index).mask(rank <= max(1, _BEST_FRACTION * len(table)), "best quarter")
    base = table[["arm", "success"]].assign(group=group.mask(~table["is_feasible"].astype(bool), "collapsed or failed"))
    lines = [
        base.assign(axis=name, place=place, height=_scale(values, dimension), shown=values)
        for place, (name, dimension) in enumerate(zip(names, space, strict=True))
        for values in [table[dimension.name]]
    ]
    heights = (outcome - outcome.min()) / span if span > 0 else outcome * 0 + 0.5
    lines.append(base.assign(axis="outcome", place=len(names), height=heights, shown=outcome))
    data = pd.concat(lines, ignore_index=True).dropna(subset="height")
    data["shown"] = data["shown"].map(lambda value: f"{value:.3g}" if isinstance(value, float) else str(value))
    x = alt.X("axis:N", sort=[*names, "outcome"], axis=alt.Axis(title=None, labelAngle=-20, grid=True))
    y = alt.Y("height:Q", axis=alt.Axis(title="lowest to highest value", labels=False, ticks=False, grid=False))
    colors = {"best quarter": POINT_COLOR, "other": "#8a8a8a", "collapsed or failed": STOPPED_COLOR}
    color = make_color("group", colors, alt.Legend(title=None, orient="bottom"))
    curves = alt.Chart(data).mark_line(strokeWidth=1.4, opacity=0.7).encode(x, y, color, detail=alt.Detail("arm:N"))
    values = alt.Chart(data).mark_point(size=18, filled=True, opacity=0.9)
    numbers = alt.Tooltip("shown:N", title="value"), alt.Tooltip("success:Q", format=".4g")
    return layer(curves, values.encode(x, y, color, tooltip=[*make_tooltips("arm:N", "axis:N"), *numbers]))


def draw_pareto(table: pd.DataFrame) -> alt.LayerChart:
    """Draw outcome against cost. table: the points with `is_front`."""
    points = table.filter(_COLUMNS).assign(millions=table["cost"] / 1e6, label=table["arm"].str.removeprefix("point-"))
    front = points[points["is_front"]].sort_values("millions")
    x = alt.X("millions:Q", axis=alt.Axis(title="cost (million tokens per run)", tickCount=6))
    line = alt.Chart(front).mark_line(color=INK, strokeWidth=1.2)
    labels = alt.Chart(front).mark_text(dx=6, dy=-6, align="left")
    y = alt.Y("success:Q", axis=_OUTCOME)
    return layer(line.encode(x, y), *_draw_points(points, x), labels.encode(x, y, text=alt.Text("label:N")))


def _draw_points(points: pd.DataFrame, x: alt.X, *, shade: bool = False) -> list[alt.Chart]:
    """Draw points at their outcome: crosses where a run collapsed or failed, a diamond for the default."""
    y = alt.Y("success:Q", axis=_OUTCOME, scale=alt.Scale(zero=False))
    tooltip = [*make_tooltips("arm:N"), alt.Tooltip("success:Q", format=".4g"), alt.Tooltip(x["shorthand"])]
    opacity = [alt.Opacity("number:Q", scale=alt.Scale(range=[0.35, 1]), legend=None)] if shade else []
    is_default = points["number"] == 0
    marks = (
        (points["is_feasible"] & ~is_default, {"filled": True, "size": 45, "color": POINT_COLOR}),
        (points["is_feasible"] & is_default, {"filled": True, "size": 80, "shape": "diamond", "color": INK}),
        (~points["is_feasible"].astype(bool), mark_stop(80)),
    )
    return [
        alt.Chart(points[is_shown]).mark_point(**mark).encode(x, y, *opacity, tooltip=tooltip)
        for is_shown, mark in marks
    ]


def _scale(column: "pd.Series[object]", dimension: Dimension) -> "pd.Series[float]":
    """Return the values of a dimension as heights from 0 to 1; missing where a point has none or one outside."""
    if dimension.values:
        count = max(len(dimension.values) - 1, 1)
        return column.map({value: index / count for index, value in enumerate(dimension.values)}).astype(float)
    values, ends = column.astype(float), pd.Series([dimension.low, dimension.high], dtype=float)
    if dimension.is_log:
        values, ends = values.where(values > 0).map(math.log, na_action="ignore"), ends.map(math.log)
    heights = (values - ends[0]) / (ends[1] - ends[0])
    return heights.where(heights.between(-0.01, 1.01))


def _shorten_dimensions(names: Iterable[str]) -> list[str]:
    """Shorten names to the last part of the setting and the value of its condition: `rollout_filter_value (top_p)`.

    Names that would be equal then, such as actor.lr and critic.lr, stay whole: they are places on an axis.
    """
    names, shortened = list(names), []
    for name in names:
        setting, _, condition = name.partition(" if ")
        short, value = setting.rpartition(".")[2], condition.rpartition("=")[2]
        shortened.append(f"{short} ({value})" if value not in ("", "True", "False") else short)
    return [name if shortened.count(short) > 1 else short for name, short in zip(names, shortened, strict=True)]

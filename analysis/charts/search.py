"""Charts of a search. Each draws a table of its complete points and computes no outcomes."""

import altair as alt
import pandas as pd

from analysis.charts.chart import INK, POINT_COLOR, layer, make_tooltips, mark_stop

_COLUMNS = ["arm", "number", "success", "low", "high", "is_feasible", "is_front"]
"""What marks need of a table of points."""
_OUTCOME = alt.Axis(title="outcome", tickCount=5)


def draw_history(table: pd.DataFrame, is_higher_better: bool) -> alt.LayerChart:
    """Draw outcomes by the number of the point, and the best one so far."""
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


def draw_pareto(table: pd.DataFrame) -> alt.LayerChart:
    """Draw outcome against cost."""
    points = table.filter(_COLUMNS).assign(millions=table["cost"] / 1e6, label=table["arm"].str.removeprefix("point-"))
    front = points[points["is_front"]].sort_values("millions")
    x = alt.X("millions:Q", axis=alt.Axis(title="cost (million tokens per run)", tickCount=6))
    line = alt.Chart(front).mark_line(color=INK, strokeWidth=1.2)
    labels = alt.Chart(front).mark_text(dx=6, dy=-6, align="left")
    y = alt.Y("success:Q", axis=_OUTCOME)
    return layer(line.encode(x, y), *_draw_points(points, x), labels.encode(x, y, text=alt.Text("label:N")))


def _draw_points(points: pd.DataFrame, x: alt.X) -> list[alt.Chart]:
    """Draw points at their outcome: crosses where a run collapsed or failed, a diamond for the default."""
    y = alt.Y("success:Q", axis=_OUTCOME, scale=alt.Scale(zero=False))
    tooltip = [*make_tooltips("arm:N"), alt.Tooltip("success:Q", format=".4g"), alt.Tooltip(x["shorthand"])]
    is_default = points["number"] == 0
    marks = (
        (points["is_feasible"] & ~is_default, {"filled": True, "size": 45, "color": POINT_COLOR}),
        (points["is_feasible"] & is_default, {"filled": True, "size": 80, "shape": "diamond", "color": INK}),
        (~points["is_feasible"].astype(bool), mark_stop(80)),
    )
    return [alt.Chart(points[is_shown]).mark_point(**mark).encode(x, y, tooltip=tooltip) for is_shown, mark in marks]

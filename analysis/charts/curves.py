"""Charts over training steps: columns of runs, survival, and onsets of symptoms; and intervals of differences."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_

import altair as alt
import numpy as np
import pandas as pd

from analysis.charts import chart as charts

MAX_POINTS = 20_000
"""With more points, every curve has only each second, third, ... of them, and its last one."""
_PANEL_WIDTH = 230
_PANEL_HEIGHT = 150
_PANELS_PER_ROW = 3


def draw_curves(
    table: pd.DataFrame,
    means: pd.DataFrame,
    colors: Mapping[str, str],
    label: str,
    *,
    dash: str | None = None,
    panel: str | None = None,
    line_at: float | None = None,
    key: str = "",
) -> alt.TopLevelMixin:
    """Draw the curves of all runs and the mean of each arm. A click on the legend leaves one arm, with Shift several.

    table: from `series.make_curves`, with any columns named below. means: with arm, step and value, and
    `standard_error` if the mean has a band; an arm without one has one run, whose curve is drawn like a mean. label: of
    the vertical axis, with its unit. dash, panel: columns whose values have different dashes, or a panel each. line_at:
    a value at which a dashed line is drawn. key: beginning of the names of its layers and its selection, which differs
    between the charts of one picture.
    """
    data = _collect_points(table, means, ["run_id", *([panel] if panel else [])])
    choices = [charts.choose(column, key) for column in ("arm", *([dash] if dash else []))]
    is_chosen = reduce(and_, choices)
    opacity = charts.make_opacity(is_chosen)
    x, color, runs = charts.make_step_axis(), charts.make_arm_color(colors, table), alt.Detail("run_id:N")
    # As the title of a channel, the label would become a part of an expression.
    y = alt.Y("value:Q", axis=alt.Axis(title=label, tickCount=5), scale=alt.Scale(zero=True))
    dashes = alt.Scale(domain=list(dict.fromkeys(table[dash]))) if dash else alt.Undefined
    channels = [alt.StrokeDash(f"{dash}:N", legend=charts.make_legend(), scale=dashes)] if dash else []
    tooltips = charts.make_tooltips("arm:N", "seed:N", "step:Q", "value:Q", "status:N")
    tooltips[1:1] = [alt.Tooltip(f"{dash}:N", title="with")] if dash else []

    def select(condition: str) -> alt.Chart:
        return alt.Chart(data).transform_filter(condition)

    thin = select("datum.line == 'thin'").mark_line(strokeWidth=1).add_params(*choices)
    thick = select("datum.line == 'thick'").mark_line(strokeWidth=2.5)
    # As a line, a curve of one point would be invisible.
    points = select("datum.line == 'point'").mark_point(size=50, filled=True)
    # Points are the targets of the pointer: a line has no value under it.
    targets = select("isValid(datum.seed)").mark_point(size=60, filled=True, opacity=0)
    layers = [
        thin.encode(x, y, color, runs, *channels, opacity=charts.make_opacity(is_chosen, 0.5)),
        thick.encode(x, y, color, runs, *channels, opacity=opacity),
        points.encode(x, y, color, opacity=opacity),
        select("datum.end == 'other'").mark_point(size=60, color=charts.INK).encode(x, y, opacity=opacity),
        select("datum.end == 'early_stopped'").mark_point(**charts.mark_stop()).encode(x, y, opacity=opacity),
        targets.encode(x, y, color, tooltip=tooltips),
    ]
    if "low" in data:
        band = select("isValid(datum.low)").mark_area(opacity=0.2)
        layers.insert(0, band.encode(x, alt.Y("low:Q", axis=alt.Axis(title=label)), alt.Y2("high:Q"), color))
    if line_at is not None:
        layers.insert(0, charts.draw_line_at(y=line_at))
    # Names of its own would be counted through all charts of a process.
    for index, chart in enumerate(layers):
        chart.name = f"{charts.TARGETS}{key}" if index == len(layers) - 1 else f"{key} layer {index}"
    if panel is None or table[panel].nunique() < 2:
        return charts.layer(*layers)
    for chart in layers:
        chart.data = alt.Undefined
    order = list(dict.fromkeys(table[panel]))
    panels = alt.LayerChart(data=data, layer=layers, width=_PANEL_WIDTH, height=_PANEL_HEIGHT)
    return panels.facet(facet=alt.Facet(f"{panel}:N", title=None, sort=order), columns=_PANELS_PER_ROW)


def _collect_points(table: pd.DataFrame, means: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Put runs and means into one table. keys: the columns that tell curves apart.

    `line` says how a curve is drawn: thin, thick, or as a point. `end` is the status in the last row of a run that did
    not complete: early_stopped, or other.
    """
    stride = -(-len(table) // MAX_POINTS)  # rounded up
    is_last = ~table.duplicated(keys, keep="last")
    runs = table[(table.groupby(keys).cumcount() % max(stride, 1) == 0) | is_last]
    status = runs["status"].where(is_last.loc[runs.index])
    runs = runs.assign(
        line=np.where(runs["arm"].isin(means["arm"]), "thin", "thick"),
        end=np.select([status.isna() | (status == "completed"), status == "early_stopped"], ["", status], "other"),
    )
    curves = means.assign(run_id="mean of " + means["arm"].astype(str), line="thick")
    if "standard_error" in curves:
        error = curves.pop("standard_error")
        curves = curves.assign(low=curves["value"] - error, high=curves["value"] + error)
    data = pd.concat([curves, runs], ignore_index=True)
    is_single = ~data.duplicated(["arm", *keys], keep=False)
    return data.assign(line=data["line"].mask(is_single, "point"), end=data["end"].fillna(""))


def draw_survival(table: pd.DataFrame, colors: Mapping[str, str]) -> alt.LayerChart:
    """Draw the fraction of runs that have not collapsed, by step. A click on the legend leaves one arm.

    table: from `collapse.compute_survival`.
    """
    choice = charts.choose("arm")
    y = alt.Y("surviving_fraction:Q", title="fraction of runs not collapsed", scale=alt.Scale(domain=[0, 1]))
    channels = [charts.make_step_axis(), y, charts.make_arm_color(colors, table), charts.make_opacity(choice)]
    lines = alt.Chart(table, name="lines").mark_line(interpolate="step-after", strokeWidth=2.5).add_params(choice)
    fraction = alt.Tooltip("surviving_fraction:Q", title="not collapsed", format=".3f")
    tooltips = [*charts.make_tooltips("arm:N", "step:Q"), fraction, *charts.make_tooltips("collapsed:Q", "runs:Q")]
    targets = alt.Chart(table).mark_point(size=60, filled=True)
    return charts.layer(lines.encode(*channels), targets.encode(*channels, tooltip=tooltips))


def draw_onsets(table: pd.DataFrame, colors: Mapping[str, str]) -> alt.LayerChart:
    """Draw a row per symptom with a point per run at its onset, its interval as a line, and the median as a bar.

    table: from `symptoms.find_onsets`; the earliest median is at the top. colors: by arm.
    """
    changed = table.dropna(subset="onset")
    medians = changed.groupby("label", sort=False)["onset"].median().sort_values(kind="stable")
    runs = list(dict.fromkeys(table["run_id"]))
    # The runs of a symptom are side by side within the middle half of its row, always in the same order.
    offsets = dict(zip(runs, np.linspace(-0.25, 0.25, len(runs)) if len(runs) > 1 else [0.0], strict=True))
    changed = changed.assign(offset=changed["run_id"].map(offsets))
    x = alt.X("onset:Q", title="training step of the onset", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=True))
    labels = [str(label) for label in medians.index]
    y = alt.Y("label:N", sort=labels, axis=alt.Axis(title=None), scale=alt.Scale(padding=0.2))
    offset = alt.YOffset("offset:Q", scale=alt.Scale(domain=[-0.5, 0.5]))
    color = charts.make_arm_color(colors, changed)
    intervals = alt.Chart(changed).mark_rule(opacity=0.5)
    points = alt.Chart(changed).mark_point(filled=True, size=30, opacity=1)
    tooltips = charts.make_tooltips("arm:N", "seed:N", "label:N", "onset:Q", "low:Q", "high:Q")
    bars = alt.Chart(medians.rename("onset").reset_index()).mark_tick(color=charts.INK, thickness=2, size=20)
    return charts.layer(
        intervals.encode(alt.X("low:Q", axis=alt.Axis(title=None)), alt.X2("high:Q"), y, offset, color),
        points.encode(x, y, offset, color, tooltip=tooltips),
        bars.encode(x, y, tooltip=[alt.Tooltip("onset:Q", title="median")]),
        height=alt.Step(26),
    )


def draw_intervals(
    table: pd.DataFrame, label: str, *, margin: float | None = None, pairs: pd.DataFrame | None = None
) -> alt.LayerChart:
    """Draw differences with their intervals, a row per name, and a dashed line at 0.

    table: with name, difference, difference_low and difference_high. label: of the horizontal axis. margin: within
    which arms count as equal, drawn as a band. pairs: with name and difference, drawn as rings.
    """
    names: Sequence[str] = list(dict.fromkeys(table["name"]))
    y = alt.Y("name:N", sort=names, axis=alt.Axis(title=None, labelLimit=260))
    x_axis = alt.Axis(title=label, tickCount=6)
    x = alt.X("difference:Q", axis=x_axis)
    layers = []
    if margin is not None:
        band = alt.Chart(pd.DataFrame({"from": [-margin], "to": [margin]})).mark_rect(color=charts.INK, opacity=0.08)
        layers.append(band.encode(alt.X("from:Q", axis=x_axis), alt.X2("to:Q")))
    layers.append(charts.draw_line_at(x=0.0))
    if pairs is not None:
        rings = alt.Chart(pairs).mark_point(size=24, color=charts.INK, opacity=0.4)
        layers.append(rings.encode(x, y, tooltip=charts.make_tooltips("name:N", "difference:Q")))
    bounded = alt.Chart(table.dropna(subset=["difference_low", "difference_high"])).mark_rule(strokeWidth=2)
    points = alt.Chart(table).mark_point(filled=True, size=60, color=charts.INK, opacity=1)
    tooltips = charts.make_tooltips("name:N", "difference:Q", "difference_low:Q", "difference_high:Q")
    return charts.layer(
        *layers,
        bounded.encode(alt.X("difference_low:Q", axis=x_axis), alt.X2("difference_high:Q"), y),
        points.encode(x, y, tooltip=tooltips),
        height=alt.Step(28),
    )

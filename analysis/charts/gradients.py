"""Charts of gradient analyses. A loss component that is off has a panel that says so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.charts.chart import choose, draw_line_at, make_color, make_legend, make_opacity, make_tooltips
from analysis.stats.estimates import Floats

COMPONENT_COLORS: Mapping[str, str] = {
    "task": "#0072b2",
    "entropy": "#a6761d",
    "kl": "#00875f",
    "total": "#777777",
    "regularizer": "#7b61c4",
    "reward_std": "#2f86b5",
}
COMPONENT_LABELS: Mapping[str, str] = {
    "task": "task (policy)",
    "entropy": "entropy",
    "kl": "KL",
    "total": "total",
}
FILTER_LABELS: Mapping[bool, str] = {True: "before the filter", False: "after the filter"}
REWARD_STD_LABEL = "mean reward std of the bucket (reward)"
_WIDTH, _HEIGHT = 230, 160
_OFF = "{} is off: the loss has no such term"


# ---------------------------------------------------------------------- bars by bucket


def draw_buckets(table: pd.DataFrame, summary: pd.DataFrame, title: str) -> dict[str, alt.FacetChart]:
    """Draw bars for each component in each bucket, by the published name of the figure.

    `plots` has the published norms, with the reward std of the buckets in the title, `loss_plots` the losses,
    coefficients included, `reward_std` the mean reward stds, the smallest first, and `normed_grads` the norms per
    sequence and per trained token. table: from `make_bucket_table`. summary: from `make_summary_table`.
    """
    reward_stds = [
        f"{row.bucket}: mean {row.reward_std_mean:.3f}, {row.reward_std_min:.3f} to {row.reward_std_max:.3f}"
        for row in table.drop_duplicates("bucket").itertuples()
    ]
    lines = [";   ".join(reward_stds[start : start + 3]) for start in range(0, len(reward_stds), 3)]
    norms = _melt_components(table, ("kl", "entropy", "task"), {"norm": "gradient, published norm (1)"})
    losses = _melt_components(table, ("task", "entropy", "kl", "total"), {"loss": "loss (1)"})
    stds = summary.assign(component="reward_std", panel="mean reward std (reward)", note="")
    columns = {"norm_per_sample": "norm / sequences (1)", "norm_per_token": "norm / trained tokens (1)"}
    shares = _melt_components(table, ("kl", "entropy", "task"), columns)
    loss_title = ["Losses: means over micro-batches, coefficient included", title]
    return {
        "plots": _draw_bars(norms, ["Gradient norms", title], ["reward std of the groups in each bucket", *lines]),
        "loss_plots": _draw_bars(losses, loss_title, columns=2),
        "reward_std": _draw_bars(
            stds.rename(columns={"reward_std_mean": "value"}), ["Reward std, the smallest first", title]
        ),
        "normed_grads": _draw_bars(shares, ["Norms per sequence and per token", title]),
    }


def _melt_components(table: pd.DataFrame, components: Sequence[str], columns: Mapping[str, str]) -> pd.DataFrame:
    """Melt a bucket table to a row per bucket and panel: one panel per column and component, in this order."""
    panels = []
    for column, label in columns.items():
        for component in components:
            name, rows = COMPONENT_LABELS[component], table[table["component"] == component]
            note = "" if rows["on"].any() else _OFF.format(name)
            panels.append(rows.assign(panel=f"{name} {label}", value=rows[column], note=note))
    return pd.concat(panels, ignore_index=True)


def _draw_bars(
    rows: pd.DataFrame, title: Sequence[str], subtitle: Sequence[str] = (), columns: int = 3
) -> alt.FacetChart:
    """Draw a panel of bars by bucket, each with its own scale and with numbers above the bars."""
    data = rows[["panel", "component", "value", "note"]].assign(bucket=rows["bucket"].str.removeprefix("bucket_"))
    x = alt.X("bucket:N", sort=list(dict.fromkeys(data["bucket"])), axis=alt.Axis(title="bucket", labelAngle=0))
    y = alt.Y("value:Q", axis=alt.Axis(title=None, tickCount=5), scale=alt.Scale(padding=14))
    color = make_color("component", COMPONENT_COLORS, None)
    known = alt.Chart().transform_filter("isValid(datum.value)")
    number = alt.Text("value:Q", format=".3~g")
    above, below = (
        known.transform_filter(f"datum.value {sign} 0").mark_text(fontSize=9, dy=dy).encode(x, y, number)
        for sign, dy in ((">=", -7), ("<", 8))
    )
    layers = [known.mark_bar().encode(x, y, color), above, below, _draw_notes()]
    facet = alt.Facet("panel:N", title=None, sort=list(dict.fromkeys(data["panel"])))
    chart = alt.LayerChart(data=data, layer=layers, width=_WIDTH, height=_HEIGHT)
    panels = chart.facet(facet=facet, columns=columns, title=_make_title(title, subtitle))
    return panels.resolve_scale(y="independent")


def _draw_notes() -> alt.Chart:
    """Write the note of a panel into its middle."""
    notes = alt.Chart().transform_filter("datum.note != ''").transform_aggregate(groupby=["note"])
    middle = {"x": alt.value(_WIDTH / 2), "y": alt.value(_HEIGHT / 2)}
    return notes.mark_text(fontSize=10).encode(**middle, text=alt.Text("note:N"))


def _make_title(lines: Sequence[str], subtitle: Sequence[str] = ()) -> alt.TitleParams:
    return alt.TitleParams(text=list(lines), subtitle=list(subtitle), subtitleFontSize=9, offset=14)


# ---------------------------------------------------------------------- norms by reward std


def draw_summary(table: pd.DataFrame, groups: pd.DataFrame, title: str) -> alt.HConcatChart:
    """Draw the reward std of the groups in each bucket, and the norms of task and regularizer against it.

    table: from `make_summary_table`. groups: rows of `gradient_groups` of the same analysis. Without those of a bucket,
    each bucket has a bar from the minimum to the maximum instead of a box.
    """
    stds = groups.dropna(subset="reward_std").merge(table[["bucket", "label"]], on="bucket")
    boxes = stds[["label", "reward_std"]].assign(step="") if set(stds["label"]) == set(table["label"]) else None
    return _draw_norms_by_reward_std(table.assign(step=""), ["Summary", title], boxes)


def draw_steps(table: pd.DataFrame, title: str) -> alt.HConcatChart:
    """Draw a row of panels per step: reward std by bucket, and the norms of task and regularizer against it.

    table: from `make_steps_table`.
    """
    rows = table.assign(step="step " + table["step"].astype(str) + ", " + table["prefilter"].map(FILTER_LABELS))
    heading = "Comparison of steps; reward std: logarithmic above 0.1, linear below"
    # Reward stds are from 0 to several units: a log scale that can also show 0.
    return _draw_norms_by_reward_std(rows, [heading, title], symlog=0.1)


def _draw_norms_by_reward_std(
    table: pd.DataFrame, title: Sequence[str], boxes: pd.DataFrame | None = None, symlog: float | None = None
) -> alt.HConcatChart:
    """Draw a column of panels per measure, with one scale for all steps.

    table: with `step`, the row of a panel. boxes: with step, label and reward_std, to be drawn as boxes.
    """
    stds = table["reward_std_mean"]
    scale, axis = _make_scale(table[["reward_std_min", "reward_std_max"]].to_numpy(), symlog)
    bucket = alt.X("label:N", sort=list(dict.fromkeys(table["label"])), axis=alt.Axis(title="bucket", labelAngle=0))
    std_color = alt.value(COMPONENT_COLORS["reward_std"])
    y_axis = alt.Axis(title="reward std of a group (reward)", **axis)
    if boxes is None:
        y, mean = (alt.Y(f"reward_std_{end}:Q", axis=y_axis, scale=scale) for end in ("min", "mean"))
        ranges = [
            alt.Chart().mark_rule(strokeWidth=2).encode(bucket, y, alt.Y2("reward_std_max"), color=std_color),
            alt.Chart().mark_point(filled=True, size=40, opacity=1).encode(bucket, mean, color=std_color),
        ]
    else:
        box = alt.Chart().mark_boxplot(extent="min-max", color=COMPONENT_COLORS["reward_std"], size=14)
        ranges = [box.encode(bucket, alt.Y("reward_std:Q", axis=y_axis, scale=scale))]
    x_scale, x_axis = _make_scale(stds.to_numpy(), symlog)
    x = alt.X("reward_std_mean:Q", scale=x_scale, axis=alt.Axis(title=REWARD_STD_LABEL, **x_axis))
    columns = [(ranges, table if boxes is None else boxes, "reward std by bucket")]
    known = alt.Chart().transform_filter("isValid(datum.value)")
    labels = known.mark_text(fontSize=9, dx=8, dy=-7)
    y = alt.Y("value:Q", axis=alt.Axis(title="published norm (1)", tickCount=5), scale=alt.Scale(zero=True))
    for name in ("task", "regularizer"):
        terms = "; ".join(filter(None, dict.fromkeys(table["terms"]))) if name == "regularizer" else ""
        is_on = table.groupby("step")[name].transform("count") > 0
        rows = table.assign(value=table[name], note=np.where(is_on, "", _OFF.format(name)))
        color = COMPONENT_COLORS[name]
        lines = known.mark_line(color=color, point=alt.OverlayMarkDef(size=40, color=color))
        layers = [lines.encode(x, y), labels.encode(x, y, alt.Text("label:N")), _draw_notes()]
        columns.append((layers, rows, f"{name}{f' ({terms})' * bool(terms)} norm"))
    header = alt.Header(labelOrient="top", labelAnchor="start")
    row = alt.Row("step:N", title=None, sort=list(dict.fromkeys(table["step"])), header=header)
    return alt.HConcatChart(
        hconcat=[
            alt.LayerChart(data=rows, layer=layers, width=_WIDTH, height=_HEIGHT).facet(row=row, title=heading)
            for layers, rows, heading in columns
        ],
        title=_make_title(title),
    )


# ---------------------------------------------------------------------- lines of a report


def draw_lines(table: pd.DataFrame, colors: Mapping[str, str], label: str) -> alt.FacetChart:
    """Draw a curve against the reward std for each run and step; a panel per state of the filter. Probes are dashed.

    The vertical axis is linear from -1 to 1. table: from `make_signal_lines` or `make_share_lines`. colors: by line.
    label: of the vertical axis.
    """
    probes = {*table.loc[table["source"] == "probe", "line"]}
    columns = ["state", "line", "curve", "bucket", "reward_std", "value", "low", "high"]
    data = table.assign(
        curve=table["run_id"] + " " + table["step"].astype(str), state=table["prefilter"].map(FILTER_LABELS)
    )[columns]
    scale, axis = _make_scale(data[["value", "low", "high"]].to_numpy(dtype=float), 1.0)
    x_axis = alt.Axis(title=REWARD_STD_LABEL, tickCount=5)
    x = alt.X("reward_std:Q", axis=x_axis, scale=alt.Scale(zero=False, padding=8))
    y_axis = alt.Axis(title=label.split("\n"), **axis)
    y = alt.Y("value:Q", axis=y_axis, scale=scale)
    color = make_color("line", colors, make_legend())
    # One legend shows the color and the dashes of a line.
    dashes = alt.Scale(domain=list(colors), range=[[5, 3] if line in probes else [1, 0] for line in colors])
    dash = alt.StrokeDash("line:N", legend=make_legend(), scale=dashes)
    choice = choose("line")
    opacity = make_opacity(choice)
    tooltips = make_tooltips("line:N", "bucket:N", "reward_std:Q", "value:Q", "low:Q", "high:Q")
    points = alt.Chart().mark_point(filled=True, size=36, opacity=1).add_params(choice)
    intervals = alt.Chart().transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    layers = [
        draw_line_at(y=0.0),
        intervals.encode(x, alt.Y("low:Q", axis=y_axis, scale=scale), alt.Y2("high:Q"), color, opacity=opacity),
        alt.Chart().mark_line(strokeWidth=1.5).encode(x, y, color, dash, alt.Detail("curve:N"), opacity=opacity),
        points.encode(x, y, color, tooltip=tooltips, opacity=opacity),
    ]
    states = [FILTER_LABELS[state] for state in sorted(set(table["prefilter"]), reverse=True)]
    chart = alt.LayerChart(data=data, layer=layers, width=1.4 * _WIDTH, height=1.2 * _HEIGHT)
    return chart.facet(facet=alt.Facet("state:N", title=None, sort=states), columns=2)


def _make_scale(values: Floats, threshold: float | None) -> tuple[alt.Scale, dict[str, Any]]:
    """Make a scale that is linear up to a distance from 0 and logarithmic beyond, with the ticks of its axis.

    threshold: that distance; None: linear everywhere.
    """
    if threshold is None:
        return alt.Scale(zero=False), {"tickCount": 5}
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    scale = alt.Scale(type="symlog", constant=threshold, zero=False, nice=False, padding=10)
    largest, smallest = max(high, -low), max(low, threshold)
    # Below a factor of 5 there may be only one power of ten. From three decades on, 2 and 5 would crowd the axis.
    if largest <= 5 * smallest:
        return scale, {"tickCount": 5}
    exponents = range(math.ceil(math.log10(threshold)), math.floor(math.log10(largest)) + 1)
    steps = (1, 2, 5) if largest < 1e3 * threshold else (1,)
    sizes = [step * 10.0**exponent for exponent in exponents for step in steps]
    return scale, {"values": [*(-size for size in sizes), 0.0, *sizes], "labelExpr": "datum.value"}

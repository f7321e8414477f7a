"""Figures of gradient analyses, drawn from the tables of `analysis.gradients.tables`, and the sentences below them.

If a loss component is off, its panel says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, FormatStrFormatter, NullLocator, SymmetricalLogLocator

from analysis.sweep.findings import describe_span
from analysis.sweep.plots import STYLE, TEXT_COLOR, add_line_legend

COMPONENT_COLORS: Mapping[str, str] = {
    "total": "#555555",
    "regularizer": "#8c6d1f",
    "task": "#0072b2",
    "entropy": "#e69f00",
    "kl": "#009e73",
    "value": "#cc79a7",
    "reward_std": "#56748c",
}
COMPONENT_LABELS: Mapping[str, str] = {
    "task": "task (policy)",
    "entropy": "entropy",
    "kl": "KL",
    "value": "value",
    "total": "total",
    "regularizer": "regularizer: KL + entropy",
}
REWARD_STD_LABEL = "mean reward std of the bucket (reward)"
SHARE_LABELS: Mapping[str, str] = {
    "signal_share": "signed share of the expected step (fraction)",
    "share": "signed share of the sampled step (fraction)",
}
FILTER_LABELS: Mapping[bool, str] = {True: "before the filter", False: "after the filter"}


def draw_norms(table: pd.DataFrame, title: str) -> Figure:
    """The published norm of each component in each bucket, with the reward std of the buckets below the panels.

    table: from `make_bucket_table`.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(10.0, 3.8), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, name in zip(panels, ("kl", "entropy", "task"), strict=True):
            _draw_bars(axes, table, name, "norm")
        panels[0].set_ylabel("published norm (1)")
        figure.supxlabel(_format_reward_stds(table), fontsize=7)
        _set_title(figure, "Gradient norms", title)
    return figure


def draw_losses(table: pd.DataFrame, title: str) -> Figure:
    """The loss of each component in each bucket, coefficients included. table: from `make_bucket_table`."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.4, 5.6), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2).flat, ("task", "entropy", "kl", "total"), strict=True):
            _draw_bars(axes, table, name, "loss")
        figure.supylabel("mean over micro-batches, coefficient included (1)", fontsize=9)
        _set_title(figure, "Losses", title)
    return figure


def draw_reward_std(table: pd.DataFrame, title: str) -> Figure:
    """The mean reward std of each bucket. table: from `make_summary_table`."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(7.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.bar(_format_bucket_labels(table), table["reward_std_mean"], color=COMPONENT_COLORS["reward_std"])
        _label_bars(axes, bars, table["reward_std_mean"])
        axes.set_xlabel("bucket (smallest reward std first)")
        axes.set_ylabel("mean reward std (reward)")
        _set_title(figure, "Reward std", title)
    return figure


def draw_normalized_norms(table: pd.DataFrame, title: str) -> Figure:
    """The norm per sequence and per trained token of each component, each on its own scale.

    table: from `make_bucket_table`.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(10.0, 5.4), layout="constrained")
        rows = (("norm_per_sample", "norm / sequences (1)"), ("norm_per_token", "norm / trained tokens (1)"))
        for panels, (column, label) in zip(figure.subplots(2, 3), rows, strict=True):
            for axes, name in zip(panels, ("kl", "entropy", "task"), strict=True):
                _draw_bars(axes, table, name, column)
            panels[0].set_ylabel(label)
        _set_title(figure, "Norms per sequence and per token", title)
    return figure


def _set_title(figure: Figure, heading: str, title: str) -> None:
    figure.suptitle(f"{heading}\n{title}", fontsize=9)


def _draw_bars(axes: Any, table: pd.DataFrame, component: str, column: str) -> None:
    rows = table[table["component"] == component]
    axes.set_title(f"{COMPONENT_LABELS[component]} {'loss' if column == 'loss' else 'gradient'}", loc="left")
    if not rows["on"].any():
        _mark_as_off(axes, COMPONENT_LABELS[component])
        return
    bars = axes.bar(_format_bucket_labels(rows), rows[column], color=COMPONENT_COLORS[component])
    # Norms per sequence and token have exponents, so they get a digit less to fit above the bar.
    _label_bars(axes, bars, rows[column], digits=3 if column in ("norm", "loss") else 2)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_xlabel("bucket")
    axes.margins(y=0.12)  # room for the numbers above the highest bar


def _format_bucket_labels(rows: pd.DataFrame) -> list[str]:
    return [name.removeprefix("bucket_") for name in rows["bucket"]]


def _label_bars(axes: Any, bars: Any, values: "pd.Series[float]", digits: int = 3) -> None:
    texts = ["" if np.isnan(value) else f"{value:.{digits}g}" for value in values]
    axes.bar_label(bars, texts, fontsize=7, padding=2)


def _mark_as_off(axes: Any, name: str) -> None:
    _draw_text(axes, f"{name} is off:\nthe loss has no such term")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def _format_reward_stds(table: pd.DataFrame) -> str:
    """Mean, minimum and maximum reward std of every bucket, three buckets per line."""
    bucket_texts = [
        f"{row.bucket}: mean {row.reward_std_mean:.3f}, {row.reward_std_min:.3f} to {row.reward_std_max:.3f}"
        for row in table.drop_duplicates("bucket").itertuples()
    ]
    lines = [";   ".join(bucket_texts[start : start + 3]) for start in range(0, len(bucket_texts), 3)]
    return "reward std of the groups in each bucket\n" + "\n".join(lines)


def draw_summary(table: pd.DataFrame, groups: pd.DataFrame, title: str) -> Figure:
    """The reward std of the groups in each bucket, and the norms of task and regularizer against it.

    table: from `make_summary_table`. groups: rows of `gradient_groups` of the same analysis. Without them, each bucket
    has a bar from the minimum to the maximum instead of a box.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(10.0, 3.6), layout="constrained")
        std_axes, task_axes, regularizer_axes = figure.subplots(1, 3)
        boxes = [groups.loc[groups["bucket"] == bucket, "reward_std"].dropna().to_list() for bucket in table["bucket"]]
        # A box needs the groups of its bucket, which `groups` may lack.
        if all(boxes):
            std_axes.boxplot(
                boxes, tick_labels=table["label"].to_list(), showfliers=False, medianprops={"color": TEXT_COLOR}
            )
        else:
            _draw_ranges(std_axes, table)
        std_axes.set_ylabel("reward std of a group (reward)")
        std_axes.set_title("reward std by bucket", loc="left")
        _draw_against_reward_std(task_axes, table, "task")
        _draw_against_reward_std(regularizer_axes, table, "regularizer")
        _set_title(figure, "Summary", title)
    return figure


def _draw_ranges(axes: Any, table: pd.DataFrame) -> None:
    """The mean reward std of each bucket, with a bar from minimum to maximum."""
    mean = table["reward_std_mean"]
    # Rounding can put the mean of equal values slightly outside of them: error bars must not be negative.
    error_bars = [(mean - table["reward_std_min"]).clip(lower=0), (table["reward_std_max"] - mean).clip(lower=0)]
    axes.errorbar(
        table["label"], mean, yerr=error_bars, fmt="o", color=COMPONENT_COLORS["reward_std"], markersize=5, capsize=4
    )


def _draw_against_reward_std(axes: Any, table: pd.DataFrame, column: str) -> None:
    """A norm of the summary table against the reward std. Each point has the label of its bucket."""
    terms = f" ({table['terms'].iloc[0]})" if column == "regularizer" and table["terms"].iloc[0] else ""
    axes.set_title(f"{column}{terms} norm", loc="left")
    if table[column].isna().all():
        _mark_as_off(axes, column)
        return
    axes.plot(
        table["reward_std_mean"], table[column], "o-", color=COMPONENT_COLORS[column], markersize=5, linewidth=1.5
    )
    for row in table.itertuples():
        axes.annotate(
            row.label,
            (row.reward_std_mean, getattr(row, column)),
            xytext=(3, 3),
            fontsize=7,
            textcoords="offset points",
        )
    # 12 % above the largest norm for the labels; a limit above 0 even if all norms are 0.
    axes.set_ylim(0, 1.12 * max(table[column].max(), 1e-12))
    axes.set_xlabel(REWARD_STD_LABEL)
    axes.set_ylabel("published norm (1)")


def draw_steps(table: pd.DataFrame, title: str) -> Figure:
    """One row of panels per step: reward std by bucket, and the norms of task and regularizer against it.

    table: from `make_steps_table`.
    """
    steps = list(dict.fromkeys(table["step"]))
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(10.0, 0.6 + 2.6 * len(steps)), layout="constrained")
        panels = figure.subplots(len(steps), 3, squeeze=False, sharex="col").tolist()
        for (std_axes, task_axes, regularizer_axes), step in zip(panels, steps, strict=True):
            rows = table[table["step"] == step]
            _draw_ranges(std_axes, rows)
            # The reward std spans from 0 to several units: a log scale that can also show 0.
            std_axes.set_yscale("symlog", linthresh=0.1)
            std_axes.set_title(f"step {step}, {FILTER_LABELS[bool(rows['prefilter'].iloc[0])]}: reward std", loc="left")
            std_axes.set_ylabel("reward std (reward)")
            for axes, name in ((task_axes, "task"), (regularizer_axes, "regularizer")):
                _draw_against_reward_std(axes, rows, name)
                axes.set_xscale("symlog", linthresh=0.1)
                axes.set_title(f"step {step}: {axes.get_title(loc='left')}", loc="left")
        # The rows share their x axes: only the last row needs labels.
        for axes in (axes for row in panels[:-1] for axes in row):
            axes.set_xlabel("")
        for column, is_from_zero in enumerate((False, True, True)):
            _equalize_y_limits([row[column] for row in panels], is_from_zero)
        for std_axes, *others in panels:
            for axis in (std_axes.yaxis, *(axes.xaxis for axes in others)):
                _set_log_ticks(axis)
        _set_title(figure, "Comparison of steps; reward std: logarithmic above 0.1, linear below", title)
    return figure


def _set_log_ticks(axis: Any, linear_threshold: float = 0.1) -> None:
    """Ticks at 1, 2 and 5 times the powers of ten, or evenly spaced ticks if the range is too narrow for these.

    linear_threshold: the axis is linear up to this distance from 0.
    """
    low, high = axis.get_view_interval()
    # Below a factor of 5 there may be only one such tick. From three decades on, 2 and 5 would crowd the axis.
    is_wide = max(high, -low) > 5 * max(low, linear_threshold)
    subs = (1, 2, 5) if max(high, -low) < 1e3 * linear_threshold else (1,)
    locator = SymmetricalLogLocator(base=10, linthresh=linear_threshold, subs=subs) if is_wide else AutoLocator()
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FormatStrFormatter("%g"))


def _equalize_y_limits(panels: Sequence[Any], is_from_zero: bool) -> None:
    """Give the panels of a column the same y limits, so that steps can be compared. Panels that are off are skipped."""
    # A panel of a component that is off contains a text only, and its default limits would count otherwise.
    drawn_panels = [axes for axes in panels if axes.lines or axes.containers]
    y_limits = [axes.get_ylim() for axes in drawn_panels]
    for axes in drawn_panels:
        axes.set_ylim(0 if is_from_zero else min(low for low, _ in y_limits), max(high for _, high in y_limits))


def draw_signal(signal_table: pd.DataFrame, share_table: pd.DataFrame, title: str, label: str) -> Figure:
    """Signal-to-noise ratios with intervals, and signed shares, against the reward std; one column per filter state.

    Args:
        signal_table: from `make_signal_table`, for one run, source and step.
        share_table: from `make_share_table`, for the same run, source and step.
        title: of the figure.
        label: y label of the shares.
    """
    filter_states = sorted(set(signal_table["prefilter"]), reverse=True)
    with mpl.rc_context(dict(STYLE)):
        # A single column is 1.4 columns wide, because the legend needs that width.
        figure = Figure(figsize=(4.6 * max(len(filter_states), 1.4), 6.4), layout="constrained")
        ratio_panels, share_panels = figure.subplots(2, len(filter_states), squeeze=False, sharex="col", sharey="row")
        for axes, share_axes, prefilter in zip(ratio_panels, share_panels, filter_states, strict=True):
            rows = signal_table[(signal_table["prefilter"] == prefilter) & (signal_table["bucket"] != "all")]
            _draw_ratios(axes, rows)
            axes.set_title(FILTER_LABELS[bool(prefilter)], loc="left")
            _draw_shares(share_axes, share_table[share_table["prefilter"] == prefilter])
            share_axes.set_xlabel(REWARD_STD_LABEL)
        for axes in (ratio_panels[0], share_panels[0]):  # the panels of a row share the y axis
            _set_log_ticks(axes.yaxis, linear_threshold=1)
        ratio_panels[0].set_ylabel("signal / noise (1)")
        share_panels[0].set_ylabel(label)
        _set_title(figure, "Signal and shares", title)
        _add_component_legend(figure, signal_table, share_table)
    return figure


def _draw_text(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _draw_ratios(axes: Any, rows: pd.DataFrame) -> None:
    """The ratio of each component, with a bar for its interval if it has one."""
    if rows["snr"].isna().all():
        _draw_text(axes, "no ratio: a bucket needs\ntwo groups with a gradient")
        return
    for name, color in COMPONENT_COLORS.items():
        component_rows = rows[rows["component"] == name]
        if component_rows["snr"].notna().any():
            axes.plot(component_rows["reward_std_mean"], component_rows["snr"], "o-", color=color, linewidth=1.2)
            axes.vlines(
                component_rows["reward_std_mean"],
                component_rows["snr_low"],
                component_rows["snr_high"],
                color=color,
                linewidth=1.6,
                alpha=0.6,
            )
    axes.axhline(0, color="#888888", linewidth=0.8)
    # Ratios may be negative (the signal is an unbiased estimate) and may exceed 1 by far.
    axes.set_yscale("symlog", linthresh=1)


def _draw_shares(axes: Any, rows: pd.DataFrame) -> None:
    """The share of each component. The regularizer has a thick line, and a bar for its interval if it has one."""
    for name in ("regularizer", "task", "entropy", "kl", "value"):
        if rows[name].notna().any():
            linewidth = 2.4 if name == "regularizer" else 1.0
            axes.plot(rows["reward_std_mean"], rows[name], "o-", color=COMPONENT_COLORS[name], linewidth=linewidth)
    interval_bounds = (rows["regularizer_low"], rows["regularizer_high"])
    axes.vlines(
        rows["reward_std_mean"], *interval_bounds, color=COMPONENT_COLORS["regularizer"], linewidth=1.6, alpha=0.6
    )
    axes.set_yscale("symlog", linthresh=1)
    # Between 0 and 1 a component is part of the step; outside, components oppose each other.
    for height in (0, 1):
        axes.axhline(height, color="#888888", linewidth=0.8)


def _add_component_legend(figure: Figure, signal_table: pd.DataFrame, share_table: pd.DataFrame) -> None:
    """One legend for all panels, with the components that are on."""
    drawn_components = {
        *signal_table["component"],
        *(["regularizer"] if share_table["regularizer"].notna().any() else []),
    }
    handles = [
        Line2D([], [], color=COMPONENT_COLORS[name], marker="o", label=COMPONENT_LABELS[name])
        for name in COMPONENT_LABELS
        if name in drawn_components
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


def draw_lines(table: pd.DataFrame, colors: Mapping[str, str], label: str) -> Figure:
    """A curve against the reward std for each run and step of the report, with one panel per filter state.

    Probes are dashed. The y axis is linear between -1 and 1, and logarithmic beyond.

    Args:
        table: from `make_signal_lines` or `make_share_lines`.
        colors: colors by line.
        label: y label.
    """
    filter_states = sorted(set(table["prefilter"]), reverse=True)
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        panels = figure.subplots(1, len(filter_states), squeeze=False, sharey=True)[0]
        for axes, prefilter in zip(panels, filter_states, strict=True):
            axes.axhline(0, color="#888888", linewidth=0.8)
            curves = table[table["prefilter"] == prefilter].groupby(["line", "run_id", "step", "source"], sort=False)
            # A line of the legend is several curves: one per run, and one per step if an arm was probed at several.
            for (line, _, _, source), rows in curves:
                style = "o--" if source == "probe" else "o-"
                axes.plot(rows["reward_std"], rows["value"], style, color=colors[line], linewidth=1.3, markersize=4)
                axes.vlines(rows["reward_std"], rows["low"], rows["high"], color=colors[line], linewidth=1.4, alpha=0.5)
            axes.set_title(FILTER_LABELS[bool(prefilter)], loc="left")
            axes.set_xlabel(REWARD_STD_LABEL)
            axes.set_yscale("symlog", linthresh=1)
        _set_log_ticks(panels[0].yaxis, linear_threshold=1)
        panels[0].set_ylabel(label)
        add_line_legend(figure, colors)
    return figure


def describe_buckets(table: pd.DataFrame, name: str) -> str:
    """Between which buckets the values of a figure lie, and how many of them are clearly above 0, by filter state.

    A value is clearly above 0 if its whole interval is. table: from `tables.make_signal_lines` or `make_share_lines`.
    name: what the values are, such as `the ratio`.
    """
    return " ".join(
        _describe_filter_state(table[table["prefilter"] == prefilter], FILTER_LABELS[bool(prefilter)], name)
        for prefilter in sorted(set(table["prefilter"]), reverse=True)
    )


def _describe_filter_state(rows: pd.DataFrame, label: str, name: str) -> str:
    names = rows["line"] + ", " + rows["bucket"].str.replace("_", " ")
    span = describe_span(pd.Series(rows["value"].to_numpy(), index=names), "bucket")
    bounded = rows.dropna(subset=["low", "high"])
    num_above = int((bounded["low"] > 0).sum())
    interval_text = (
        f"the 95 % interval is above 0 in {num_above} of {len(bounded)} that have one"
        if len(bounded)
        else "no bucket has an interval"
    )
    buckets_text = "1 bucket" if len(rows) == 1 else f"{len(rows)} buckets"
    return f"{label[0].upper()}{label[1:]}, {name} is {span}, over {buckets_text}; {interval_text}."

"""Draw the figures of update-rule studies; their numbers come from sandboxes.toys.report and analysis.sweep.series."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.sweep.plots import STOPPED_COLOR, STYLE, TEXT_COLOR, make_arm_colors
from sandboxes.toys.report.descriptions import Panel

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#222222", "#8c6d31", "#7b61c4")
"""Rules have no order, so these are distinct hues, safe for color-blind readers; red is reserved for stopped runs."""


def make_rule_colors(arms: Sequence[str]) -> dict[str, str]:
    """A color for each arm: from `COLORS` if there are enough, otherwise from `make_arm_colors`."""
    return dict(zip(arms, COLORS, strict=False)) if len(arms) <= len(COLORS) else make_arm_colors(arms)


def draw_mean_curves(
    panel_curves: Sequence[tuple[Panel, pd.DataFrame, pd.DataFrame]],
    colors: Mapping[str, str],
    chance_error: float | None,
) -> Figure:
    """One panel per column: each arm's mean with a band of its standard error, and its runs as thin lines.

    Args:
        panel_curves: for each panel, the panel with the results of `series.make_curves` and
            `tables.compute_mean_curves` for its column.
        colors: by arm.
        chance_error: test error of random content tokens, drawn as a dashed line in panels of a test error; None: no
            line.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.8 if len(panel_curves) > 1 else 6.6, 4.2), layout="constrained")
        axes_row = figure.subplots(1, len(panel_curves), squeeze=False)[0]
        for axes, (panel, runs, means) in zip(axes_row, panel_curves, strict=True):
            _draw_curves(axes, runs, means, colors)
            if chance_error is not None and panel.column.startswith("test_error"):
                axes.axhline(chance_error, color="#888888", linestyle=(0, (4, 3)), linewidth=1, zorder=0)
            axes.set_xlabel("training step")
            axes.set_ylabel(panel.label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        shown_colors = {
            arm: color
            for arm, color in colors.items()
            if any((runs["arm"] == arm).any() for _, runs, _ in panel_curves)
        }
        # An arm without a row has no curve, so the legend leaves it out.
        handles: list[Any] = [
            Line2D([], [], color=color, linewidth=2, label=arm) for arm, color in shown_colors.items()
        ]
        if any((runs["status"] == "early_stopped").any() for _, runs, _ in panel_curves):
            handles.append(
                Line2D([], [], color=STOPPED_COLOR, marker="X", linestyle="none", label="a rule stopped the run")
            )
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _draw_curves(axes: Any, runs: pd.DataFrame, means: pd.DataFrame, colors: Mapping[str, str]) -> None:
    run_counts = runs.groupby("arm")["run_id"].nunique()
    for arm, color in colors.items():
        for _, run in runs[runs["arm"] == arm].groupby("run_id", sort=False):
            # The only run of an arm has no mean curve over it, so it is drawn like one.
            line_style = {"linewidth": 0.6, "alpha": 0.4} if run_counts[arm] > 1 else {"linewidth": 1.8}
            axes.plot(run["step"], run["value"], color=color, zorder=2, **line_style)
            if run["status"].iloc[-1] == "early_stopped":
                last_point = run.iloc[-1]
                axes.scatter(
                    last_point["step"],
                    last_point["value"],
                    marker="X",
                    s=30,
                    color=STOPPED_COLOR,
                    zorder=5,
                    clip_on=False,
                )
        mean_curve = means[(means["arm"] == arm) & (means["runs"] > 1)]
        if len(mean_curve):
            low = mean_curve["value"] - mean_curve["standard_error"]
            high = mean_curve["value"] + mean_curve["standard_error"]
            axes.fill_between(
                mean_curve["step"].astype(float), low, high, color=color, alpha=0.22, linewidth=0, zorder=3
            )
            axes.plot(mean_curve["step"], mean_curve["value"], color=color, linewidth=2, zorder=4)


def draw_contrasts(table: pd.DataFrame, pair_table: pd.DataFrame) -> Figure:
    """One panel per column, one row per contrast: its difference with the interval, and below it its pairs as rings.

    A dashed line marks 0. table: the result of `compute_contrasts`. pair_table: of `compute_pair_differences`.
    """
    columns = list(dict.fromkeys(table["column"]))
    names = list(dict.fromkeys(table["contrast"]))
    heights = {name: -index for index, name in enumerate(names)}
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.8, 0.9 + 0.45 * len(names)), layout="constrained")
        axes_row = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, column in zip(axes_row, columns, strict=True):
            axes.axvline(0, color="#888888", linestyle=(0, (4, 3)), linewidth=1, zorder=0)
            pair_rows = pair_table[pair_table["column"] == column]
            # 0.24 of a row below the contrast itself.
            axes.scatter(
                pair_rows["difference"],
                pair_rows["contrast"].map(heights) - 0.24,
                s=16,
                facecolor="none",
                edgecolor="#888888",
            )
            contrast_rows = table[table["column"] == column]
            axes.hlines(
                contrast_rows["contrast"].map(heights),
                contrast_rows["difference_low"],
                contrast_rows["difference_high"],
                color=TEXT_COLOR,
                linewidth=2,
                zorder=3,
            )
            axes.scatter(
                contrast_rows["difference"], contrast_rows["contrast"].map(heights), s=30, color=TEXT_COLOR, zorder=4
            )
            axes.set_xlabel(f"{column},\nfirst minus second")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes_row[0].set_yticks(list(heights.values()), [fill(name, 34) for name in names])
        axes_row[0].set_ylim(-len(names) + 0.4, 0.6)  # from 0.6 rows below the last contrast to 0.6 above the first
    return figure

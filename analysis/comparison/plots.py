"""Draw a comparison of studies; its numbers come from `tables.compare_arms`."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.data.compare import label_arm
from analysis.sweep.plots import STYLE, TEXT_COLOR


def draw_differences(table: pd.DataFrame, label: str) -> Figure:
    """One row per compared arm: the difference with its interval, a dashed line at 0, and a band of the margin.

    Args:
        table: the result of `compare_arms`.
        label: name of the outcome, for the horizontal axis.
    """
    names = [label_arm(row.study, row.other_arm) for row in table.itertuples()]
    heights = [-float(index) for index in range(len(names))]
    margin = float(table["margin"].iloc[0])
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(7.2, 1.0 + 0.36 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(-margin, margin, color="#eeeeee", zorder=0)
        axes.axvline(0, color="#888888", linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        axes.hlines(heights, table["difference_low"], table["difference_high"], color=TEXT_COLOR, linewidth=2, zorder=3)
        axes.scatter(table["difference"], heights, s=30, color=TEXT_COLOR, zorder=4)
        axes.set_yticks(heights, names)
        axes.set_ylim(-len(names) + 0.4, 0.6)
        axes.set_xlabel(f"{label}, other study minus the first")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    return figure

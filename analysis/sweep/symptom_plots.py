"""The figure of the order of symptoms: when each of them began in every run that collapsed."""

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.sweep.plots import STYLE, TEXT_COLOR, add_line_legend

ROW_HEIGHT = 0.34
"""Inches per symptom."""


def draw_onsets(table: pd.DataFrame, colors: Mapping[str, str]) -> Figure:
    """One row per symptom with a point per run at its onset, its interval as a line, and the median as a bar.

    table: from `symptoms.find_onsets`; the earliest median is at the top. colors: colors by arm.
    """
    changed_rows = table.dropna(subset="onset")
    medians = changed_rows.groupby("label", sort=False)["onset"].median().sort_values(kind="stable")
    positions = {label: index for index, label in enumerate(medians.index)}
    runs = list(dict.fromkeys(table["run_id"]))
    # The runs of a symptom are side by side within the middle half of its row, always in the same order.
    offsets = dict(zip(runs, np.linspace(-0.25, 0.25, len(runs)) if len(runs) > 1 else [0.0], strict=True))
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(8.4, 0.9 + ROW_HEIGHT * max(len(positions), 3)), layout="constrained")
        axes = figure.add_subplot()
        for row in changed_rows.itertuples():
            y = positions[str(row.label)] + offsets[str(row.run_id)]
            color = colors[str(row.arm)]
            axes.plot([row.low, row.high], [y, y], color=color, linewidth=0.8, alpha=0.5, zorder=1)
            axes.scatter([row.onset], [y], s=14, color=color, zorder=2)
        for label, median in medians.items():
            center = positions[str(label)]
            axes.plot([median, median], [center - 0.38, center + 0.38], color=TEXT_COLOR, linewidth=1.6, zorder=3)
        axes.set_yticks(list(positions.values()), list(positions))
        axes.set_ylim(len(positions) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("training step of the onset")
        add_line_legend(figure, {arm: color for arm, color in colors.items() if (changed_rows["arm"] == arm).any()})
    return figure

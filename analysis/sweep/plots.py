"""Figures of one-axis studies. Each function draws a table and computes no further numbers.

Colors come from an ordered map that is readable without color vision and in gray. A run stopped by a rule ends in a
vermilion cross in every figure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FuncFormatter, MaxNLocator

from analysis.sweep.verdicts import join_arms

STOPPED_COLOR = "#d55e00"
WORD_COLORS = ("#555555", "#a6761d", "#999999")
GHOST_COLOR = "#dcdcdc"
TEXT_COLOR = "#333333"
# More names would crowd a legend, so it shows this many of them.
MAX_LEGEND_NAMES = 12
# letters: in a legend, a longer list of arms would take the width of the panel
MAX_LEGEND_LETTERS = 60
STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": TEXT_COLOR,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": TEXT_COLOR,
    "axes.titlesize": 9,
    "axes.titley": 1.0,  # fixed: an automatic position above the ticks takes a fifth of the drawing time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.labelcolor": TEXT_COLOR,
    "ytick.labelcolor": TEXT_COLOR,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
}


def make_arm_colors(arms: Sequence[str], words: Sequence[str] = ()) -> dict[str, str]:
    """The color of each arm: along the map in the given order, and grays and browns for `words` such as nofilter.

    More words than there are grays and browns are colored along the map, too: no two arms have one color.
    """
    words = words if len(words) <= len(WORD_COLORS) else ()
    ordered_arms = [arm for arm in arms if arm not in words]
    # The last part of viridis is too bright a yellow for lines on white.
    shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.82, max(len(ordered_arms), 1)))
    colors = {arm: mpl.colors.to_hex(shade) for arm, shade in zip(ordered_arms, shades, strict=False)}
    return colors | {word: WORD_COLORS[index % len(WORD_COLORS)] for index, word in enumerate(words)}


def lighten_color(color: str, white_fraction: float) -> str:
    """Mix `color` with white. white_fraction: from 0 to 1."""
    return mpl.colors.to_hex([white_fraction + (1 - white_fraction) * channel for channel in mpl.colors.to_rgb(color)])


def draw_dose_response(table: pd.DataFrame, runs: pd.DataFrame, setting: str) -> Figure:
    """Success at the end against the axis.

    table: from `tables.make_dose_response`. runs: from `tables.make_run_outcomes`.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        _draw_base_lines(axes, table)
        colors = make_arm_colors(table["arm"].to_list(), table.loc[table["is_word"], "arm"].to_list())
        # The line connects the arms on the scale: words never, and 0 only if the scale is by rank.
        on_scale = table[~table["is_word"] & ((table["axis_value"] > 0) | (table["scale"] == "rank"))]
        axes.plot(on_scale["x"], on_scale["success"], color="#bbbbbb", linewidth=1, zorder=1)
        for row in table.itertuples():
            _draw_arm_point(axes, row, colors[str(row.arm)])
        # With one run per arm, these points would repeat the means.
        if len(runs) > len(table):
            axes.scatter(runs["x"], runs["outcome"], s=9, color=TEXT_COLOR, alpha=0.55, zorder=4, label="single runs")
        _draw_separators(axes, table)
        _set_dose_axes(axes, table, setting)
        _add_dose_legend(axes, table)
    return figure


def _draw_base_lines(axes: Any, table: pd.DataFrame) -> None:
    for column, style, label in (("base", "--", "base, sampled"), ("base_greedy", ":", "base, greedy")):
        value = float(table[column].iloc[0])
        if not np.isnan(value):
            axes.axhline(value, color="#777777", linestyle=style, linewidth=1.1, zorder=0, label=label)


def _draw_arm_point(axes: Any, row: Any, color: str) -> None:
    """Sampled success with its interval, and open marks for greedy and test success next to it."""
    # All scored runs stopped as failures. With only some stopped, just the edge of the mark changes color.
    has_failed = row.scored and row.early_stopped == row.scored
    color = STOPPED_COLOR if has_failed else color
    if not np.isnan(row.low):
        axes.plot([row.x, row.x], [row.low, row.high], color=color, linewidth=2, solid_capstyle="butt", zorder=2)
    edge_color = STOPPED_COLOR if row.early_stopped else color
    axes.scatter(
        row.x,
        row.success,
        s=52,
        marker="X" if has_failed else "o",
        color=color,
        edgecolor=edge_color,
        linewidth=1.6,
        zorder=3,
    )
    # Side by side, so that equal values do not cover each other.
    offset = 0.012 * max(axes.get_xlim()[1] - axes.get_xlim()[0], 1.0)
    axes.scatter(row.x + offset, row.greedy, s=34, marker="^", facecolor="none", edgecolor=color, zorder=3)
    axes.scatter(row.x - offset, row.test, s=30, marker="s", facecolor="none", edgecolor=color, zorder=3)


def _draw_separators(axes: Any, table: pd.DataFrame) -> None:
    """Dotted lines that separate 0 and words from the scale."""
    scale_rows, word_rows = table[~table["is_word"]], table[table["is_word"]]
    nonpositive_rows, positive_rows = (
        scale_rows[scale_rows["axis_value"] <= 0],
        scale_rows[scale_rows["axis_value"] > 0],
    )
    for left, right in ((nonpositive_rows, positive_rows), (scale_rows, word_rows)):
        if len(left) and len(right):
            axes.axvline((left["x"].max() + right["x"].min()) / 2, color="#aaaaaa", linestyle=(0, (1, 3)), linewidth=1)


def format_dose_label(table: pd.DataFrame, setting: str) -> str:
    """The name of the axis with its scale. table: from `tables.make_dose_response`."""
    note = "log scale; 0 and words are separate" if table["scale"].iloc[0] == "log" else "evenly spaced by rank"
    return f"{setting}  ({note})"


def _set_dose_axes(axes: Any, table: pd.DataFrame, setting: str) -> None:
    axes.set_xticks(table["x"].to_list(), table["tick"].to_list())
    axes.set_xlabel(format_dose_label(table, setting))
    axes.set_ylabel("success (fraction of episodes)")
    # A little below 0, so that the marks of collapsed arms are not cut off at the axis.
    axes.set_ylim(bottom=min(-0.01, -0.03 * axes.get_ylim()[1]))
    margin = 0.08 * max(table["x"].max() - table["x"].min(), 1.0)
    axes.set_xlim(table["x"].min() - margin, table["x"].max() + margin)


def _add_dose_legend(axes: Any, table: pd.DataFrame) -> None:
    """A legend of the marks that occur, each as (label, whether it occurs, style).

    Marks have the color of their arm, so the legend gets empty scatters in a neutral color.
    """
    hollow_style = {"facecolor": "none", "edgecolor": TEXT_COLOR}
    has_stopped = table["early_stopped"] > 0
    legend_entries: list[tuple[str, Any, dict[str, Any]]] = [
        ("validation, sampled", True, {"marker": "o", "color": TEXT_COLOR}),
        ("validation, greedy", table["greedy"].notna().any(), {"marker": "^", **hollow_style}),
        ("test, sampled", table["test"].notna().any(), {"marker": "s", **hollow_style}),
        (
            "every run stopped",
            (has_stopped & (table["early_stopped"] == table["scored"])).any(),
            {"marker": "X", "color": STOPPED_COLOR},
        ),
        (
            "some runs stopped",
            (has_stopped & (table["early_stopped"] < table["scored"])).any(),
            {"marker": "o", "facecolor": TEXT_COLOR, "edgecolor": STOPPED_COLOR, "linewidth": 1.6},
        ),
    ]
    for label, _, style in filter(lambda mark: mark[1], legend_entries):
        axes.scatter([], [], label=label, **style)
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=8)


def draw_curves(table: pd.DataFrame, means: pd.DataFrame, colors: Mapping[str, str], label: str) -> Figure:
    """The curves of all runs: one panel per arm, with runs of other arms in gray, and the mean of several runs on top.

    table: from `series.make_curves`. means: from `series.compute_mean_curves`. colors: colors by arm, in the order of
    the panels.
    """
    arms = [arm for arm in colors if (table["arm"] == arm).any()]
    # Up to four panels per row. Five or six fill two rows of three better than rows of four.
    columns = 3 if len(arms) in (5, 6) else min(max(len(arms), 1), 4)
    rows = -(-max(len(arms), 1) // columns)  # rounded up
    runs, point_arms = dict(list(table.groupby("arm"))), table["arm"].to_numpy(dtype=object)
    points = table[["step", "value"]].to_numpy(dtype=float)
    run_indices = pd.factorize(table["run_id"])[0]
    with mpl.rc_context(dict(STYLE)):
        figure_size = (8.4, 0.7 + 1.75 * rows)
        figure = Figure(figsize=figure_size)
        # Fixed margins: with many panels, an automatic layout takes longer than everything else.
        margins = {"left": 0.7 / figure_size[0], "right": 1 - 0.15 / figure_size[0], "bottom": 0.55 / figure_size[1]}
        spacing = {"top": 1 - 0.3 / figure_size[1], "wspace": 0.08, "hspace": 0.35}
        panels = figure.subplots(
            rows, columns, sharex=True, sharey=True, squeeze=False, gridspec_kw={**margins, **spacing}
        )
        # Width of a panel in points, divided by 0.66: the width of a letter relative to its font size.
        title_width = 72 * (figure_size[0] - 0.85) / columns / 0.66
        title_size = min(mpl.rcParams["axes.titlesize"], title_width / max((len(arm) for arm in arms), default=1))
        for panel, arm in zip(panels.flat, arms, strict=False):
            # The others as one line with a gap (NaN) between runs: a line object for each would take seconds to draw.
            is_other = point_arms != arm
            gaps = np.flatnonzero(np.diff(run_indices[is_other])) + 1
            ghost_line = np.insert(points[is_other], gaps, np.nan, axis=0).T
            panel.plot(*ghost_line, color=GHOST_COLOR, linewidth=0.8, zorder=1)
            _draw_runs(panel, runs[arm], means[means["arm"] == arm], colors[arm])
            panel.set_title(arm, loc="left", color=colors[arm], fontweight="bold", fontsize=title_size)
        # The last panel of each column needs tick labels, also if the last row is incomplete.
        for panel in panels.flat[max(len(arms) - columns, 0) : len(arms)]:
            panel.tick_params(labelbottom=True)
        for panel in panels.flat[len(arms) :]:
            panel.remove()
        if arms:
            # From 0, so that the heights of curves can be compared; a column such as the loss may be negative.
            panels[0, 0].set_ylim(bottom=min(0.0, 1.05 * table["value"].min()))
            panels[0, 0].xaxis.set_major_locator(MaxNLocator(4, integer=True))  # all panels share both axes
            panels[0, 0].yaxis.set_major_locator(MaxNLocator(4))
        figure.supxlabel("training step", y=0.1 / figure_size[1], va="bottom", fontsize=9)
        figure.supylabel(label, x=0.1 / figure_size[0], ha="left", fontsize=9)
    return figure


def _draw_runs(panel: Any, runs: pd.DataFrame, mean: pd.DataFrame, color: str) -> None:
    for _, run in runs.groupby("run_id", sort=False):
        # Without a mean on top, the single run is the curve of the arm.
        line_style = {"linewidth": 0.9, "alpha": 0.6} if len(mean) else {"linewidth": 1.8}
        panel.plot(run["step"], run["value"], color=color, zorder=2, **line_style, **_mark_single(run))
        _draw_end_mark(panel, run)
    if len(mean):
        panel.plot(mean["step"], mean["value"], color=color, linewidth=2.2, zorder=3, **_mark_single(mean))


def _mark_single(rows: pd.DataFrame) -> dict[str, Any]:
    """A mark for a curve of one point, which as a line would be invisible."""
    return {"marker": "o", "markersize": 4} if len(rows) == 1 else {}


def _draw_end_mark(panel: Any, run: pd.DataFrame) -> None:
    """Mark the end of a run that did not complete: a cross if a rule stopped it, otherwise a ring."""
    last_row = run.iloc[-1]
    cross = {"marker": "X", "s": 42, "color": STOPPED_COLOR, "clip_on": False}
    ring = {"marker": "o", "s": 26, "facecolor": "white", "edgecolor": TEXT_COLOR}
    if last_row["status"] != "completed":
        style = cross if last_row["status"] == "early_stopped" else ring
        panel.scatter(last_row["step"], last_row["value"], zorder=4, **style)


def draw_arm_lines(table: pd.DataFrame, colors: Mapping[str, str]) -> Figure:
    """One panel per measure with one line per arm, so that a hundred arms fit. The dashed line shows chance.

    table: from `series.make_arm_lines`. colors: colors by arm.
    """
    measures = list(dict.fromkeys(table["measure"]))
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.4, 0.6 + 2.2 * len(measures)), layout="constrained")
        panels = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
        for axes, measure in zip(panels, measures, strict=True):
            rows = table[table["measure"] == measure]
            for arm, arm_rows in rows.groupby("arm", sort=False):
                axes.plot(
                    arm_rows["step"], arm_rows["value"], color=colors[arm], linewidth=1.4, marker=".", markersize=3
                )
            # Chance is a mean over all runs, so every arm has the same value at a step.
            chance = rows.dropna(subset="chance").drop_duplicates("step").sort_values("step")
            if len(chance):
                axes.plot(chance["step"], chance["chance"], color="#777777", linestyle="--", linewidth=1.1, marker=".")
            axes.set_ylabel(measure)
            axes.set_ylim(bottom=0)
        panels[-1].set_xlabel("training step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        add_line_legend(figure, {arm: color for arm, color in colors.items() if (table["arm"] == arm).any()})
    return figure


def add_line_legend(figure: Figure, colors: Mapping[str, str]) -> None:
    """A legend of lines right of the panels. If there are many, it shows an evenly spaced selection."""
    names = list(colors)
    shown_names = names
    if len(names) > MAX_LEGEND_NAMES:
        shown_names = [names[index] for index in np.linspace(0, len(names) - 1, MAX_LEGEND_NAMES).round().astype(int)]
    handles = [Line2D([], [], color=colors[name], linewidth=2, label=name) for name in shown_names]
    title = "" if len(shown_names) == len(names) else f"{len(shown_names)} of {len(names)}"
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, title=title, title_fontsize=8)


def draw_survival(table: pd.DataFrame, colors: Mapping[str, str]) -> Figure:
    """Fraction of runs that have not collapsed, by step. Arms in which no run collapsed share a line.

    table: from `collapse.compute_survival`.
    """
    with mpl.rc_context(dict(STYLE)):
        num_arms = table["arm"].nunique()
        # Every arm may need a line of the legend, which is 0.19 inches high.
        figure = Figure(figsize=(8.0, max(2.8, 0.6 + 0.19 * num_arms)), layout="constrained")
        axes = figure.add_subplot()
        survivors = table[table["collapsed"] == 0]
        if len(survivors):
            names = join_arms(dict.fromkeys(survivors["arm"]))
            names = names if len(names) <= MAX_LEGEND_LETTERS else f"{survivors['arm'].nunique()} of {num_arms}"
            axes.plot(
                [0, survivors["step"].max()],
                [1, 1],
                color="#999999",
                linewidth=1.5,
                label=f"no collapse: {names}",
            )
        for arm, rows in table[table["collapsed"] > 0].groupby("arm", sort=False):
            label = f"{arm}: {rows['collapsed'].iloc[0]} of {rows['runs'].iloc[0]} collapsed"
            axes.step(
                rows["step"], rows["surviving_fraction"], where="post", color=colors[str(arm)], linewidth=2, label=label
            )
            drops = rows[rows["surviving_fraction"].diff() < 0]
            axes.scatter(
                drops["step"],
                drops["surviving_fraction"],
                marker="X",
                s=42,
                color=STOPPED_COLOR,
                zorder=4,
                clip_on=False,
            )
        # Beyond 0 and 1, so that lines and crosses at the ends are not cut in half.
        axes.set_ylim(-0.03, 1.06)
        axes.set_xlim(left=0)
        axes.set_xlabel("training step")
        axes.set_ylabel("fraction of runs not collapsed")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return figure


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
        # inches: 0.34 per symptom
        figure = Figure(figsize=(8.4, 0.9 + 0.34 * max(len(positions), 3)), layout="constrained")
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


_NAME_FORMATTERS = (FixedFormatter, FuncFormatter, StrCategoryFormatter)
"""Formatters of tick labels that we give. The others make labels of numbers, on a logarithmic axis with formulas."""


def save_figure(figure: Figure, target: Path | IO[bytes], **options: Any) -> None:
    """Save a figure with `Figure.savefig`, with every dollar sign in a label as it is.

    Matplotlib takes the text between two dollar signs for a formula, and raises an error if it is none. An arm or a
    study may have any name, also in a folder that comes from somebody else.

    The layout is computed once. `savefig` would compute it twice, and again for every other format of the figure.
    """
    artists = figure.findobj()
    number_labels = {
        id(label)
        for axis in artists
        if isinstance(axis, Axis) and not isinstance(axis.get_major_formatter(), _NAME_FORMATTERS)
        for label in axis.get_ticklabels(which="both")
    }
    for text in artists:
        if isinstance(text, Text) and id(text) not in number_labels:
            text.set_parse_math(False)
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # the axes stay where they are
    figure.savefig(target, **options)

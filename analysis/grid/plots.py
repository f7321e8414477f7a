"""Figures of a grid: heat maps of its cells and curves of its runs, with one subplot per panel of the grid.

All panels of a figure share one color scale (cividis, which is readable without color vision and in gray) and the
same axes, with values evenly spaced in order and 0 first. Each cell shows its number. A vermilion frame and a cross
mark runs stopped by a rule. Gray cells give the reason why there is no number. A point without a run stays blank.
"""

from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from analysis.grid.layout import Grid, label_value, list_panels
from analysis.sweep.plots import STOPPED_COLOR, STYLE, TEXT_COLOR, make_arm_colors
from analysis.sweep.verdicts import format_status
from trainable.config.aliases import shorten_setting

NO_VALUE_COLOR = "#e3e3e3"
MAX_COLUMNS = 3
FIGURE_WIDTH = 10.4  # inches
MIN_MAP_HEIGHT = 3.0  # inches, for the label of the color bar
_COLORMAP = "cividis"
_LINE_MARKERS = ("o", "s", "^", "D")


class PanelLayout(NamedTuple):
    """The positions of panels in a figure. positions: (row, column) by panel."""

    rows: int
    columns: int
    positions: dict[str, tuple[int, int]]


def arrange_panels(grid: Grid, member_table: pd.DataFrame) -> PanelLayout:
    """Put the values of the first text factor (such as the type of loss) side by side: one column per value.

    Without a text factor, or if it is the only factor, panels fill rows of three.
    """
    panel_rows = list_panels(grid, member_table)
    names = panel_rows["panel"].to_list()
    word_settings = [
        setting for setting in grid.panels if any(isinstance(value, str) for value in grid.factor_values[setting])
    ]
    if not word_settings or len(grid.panels) < 2:
        positions = {panel: divmod(index, MAX_COLUMNS) for index, panel in enumerate(names)}
        return PanelLayout(-(-len(names) // MAX_COLUMNS), min(len(names), MAX_COLUMNS), positions)
    column_of = {value: place for place, value in enumerate(grid.factor_values[word_settings[0]])}
    others = [setting for setting in grid.panels if setting != word_settings[0]]
    keys = list(panel_rows[others].itertuples(index=False, name=None))
    row_of = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    columns = panel_rows[word_settings[0]].map(column_of).to_list()
    positions = {panel: (row_of[key], column) for panel, key, column in zip(names, keys, columns, strict=True)}
    return PanelLayout(len(row_of), len(column_of), positions)


def draw_heat_maps(grid: Grid, table: pd.DataFrame, measure: str, label: str, *, log: bool = False) -> Figure:
    """Heat maps of `measure` over the plane of the grid, one per panel.

    table: from `layout.make_cell_table`. label: of the color bar, with a unit.
    """
    panel_layout = arrange_panels(grid, table)
    xs, ys = (sorted(table[axis].unique()) for axis in ("x", "y"))
    norm = _make_norm(table[measure], log)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        # inches: legend and axis labels; per row of panels its title, and 0.34 for each row of cells
        height = max(1.0 + panel_layout.rows * (0.5 + 0.34 * len(ys)), MIN_MAP_HEIGHT)
        figure = Figure(figsize=(FIGURE_WIDTH, height), layout="constrained")
        axes = figure.subplots(panel_layout.rows, panel_layout.columns, sharex=True, sharey=True, squeeze=False)
        _remove_unused(axes, panel_layout)
        for panel, position in panel_layout.positions.items():
            _draw_map(axes[position], table[table["panel"] == panel], (xs, ys), measure, norm)
            axes[position].set_title(panel, loc="left", fontweight="bold", fontsize=8.2)
            axes[position].tick_params(labelbottom=True, length=0)
        colors = mpl.cm.ScalarMappable(norm, _COLORMAP)
        used_axes = [axes[place] for place in panel_layout.positions.values()]
        figure.colorbar(colors, ax=used_axes, label=label, shrink=min(1.0, 3.2 / height), aspect=18, pad=0.015)
        figure.supxlabel(f"{shorten_setting(grid.x)} ({grid.x})", fontsize=9)
        figure.supylabel(f"{shorten_setting(grid.y)} ({grid.y})", fontsize=9)
        _add_map_legend(figure, table)
    return figure


def _make_norm(values: "pd.Series[float]", log: bool) -> Normalize:
    """One color scale for all panels. If all values are equal, the range is widened to be non-empty.

    A log scale leaves out values of 0 and less; `clip` then gives them the lowest color.
    """
    shown_values = values[values > 0] if log else values.dropna()
    low, high = (float(shown_values.min()), float(shown_values.max())) if len(shown_values) else (0.0, 1.0)
    if log:
        # low is 0 only if there is no positive value: then the scale is not used, but it must be valid.
        return LogNorm(low or 1e-12, high if high > low else 10 * low, clip=True)
    return Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)


def _remove_unused(axes: Any, panel_layout: PanelLayout) -> None:
    for position in np.ndindex(axes.shape):
        if position not in panel_layout.positions.values():
            axes[position].remove()


def _draw_map(
    axes: Any, cells: pd.DataFrame, axis_values: tuple[list[float], list[float]], measure: str, norm: Normalize
) -> None:
    """Draw one panel: a square for each cell with a run."""
    xs, ys = axis_values
    rows: Any = cells.itertuples()
    for row in rows:
        x, y, value = xs.index(row.x), ys.index(row.y), getattr(row, measure)
        color = NO_VALUE_COLOR if np.isnan(value) else mpl.colors.to_hex(mpl.colormaps[_COLORMAP](norm(value)))
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2))
        if row.early_stopped:
            # Inside the cell, so that neighboring cells do not cover the frame.
            axes.add_patch(
                Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor=STOPPED_COLOR, linewidth=1.8)
            )
        _write_cell(axes, x, y, row, value, color)
    axes.set_xlim(-0.5, len(xs) - 0.5)
    axes.set_ylim(-0.5, len(ys) - 0.5)
    axes.set_xticks(range(len(xs)), [label_value(value) for value in xs])
    axes.set_yticks(range(len(ys)), [label_value(value) for value in ys])
    axes.spines[["left", "bottom"]].set_visible(False)


def _write_cell(axes: Any, x: int, y: int, row: Any, value: float, color: str) -> None:
    """Write the number of a cell or the reason why it has none, with a cross if a rule stopped one of its runs."""
    text = format_cell(row.state, row.early_stopped, row.scored, row.runs, value)
    # Longer texts on one line need a smaller font to fit into the square.
    font_size = 7.6 if len(text) <= 6 or "\n" in text else 6.4
    annotation = axes.text(
        x, y, text, ha="center", va="center", fontsize=font_size, color=choose_text_color(color), linespacing=0.95
    )
    # The text stays inside its cell, so the layout needs no space for it.
    annotation.set_in_layout(False)


def choose_text_color(color: str) -> str:
    """White or black, whichever has the larger contrast ratio on `color` (relative luminance as in WCAG 2)."""
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in mpl.colors.to_rgb(color)
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def format_cell(state: str, num_stopped: int, num_scored: int, num_runs: int, value: float) -> str:
    """The text of a cell: its mean, or the status of its runs if none is scored.

    A prefix `✕` means that a rule stopped all runs, and `✕1/3` that it stopped one of three. A second line `2 of 3`
    means that only two of three runs are scored.
    """
    if not num_scored:
        return format_status(state).replace(" ", "\n")
    value_text = "–" if np.isnan(value) else format_short(value)
    cross = "" if not num_stopped else "✕ " if num_stopped == num_runs else f"✕{num_stopped}/{num_runs} "
    scored_text = "" if num_scored == num_runs else f"\n{num_scored} of {num_runs}"
    return cross + value_text + scored_text


def format_short(value: float) -> str:
    """A number with two to three digits that fits into a cell: .53 for 0.53, 1.24, 12.3, 4.1e-4."""
    if value == 0:
        return "0"
    if abs(value) < 0.0095:
        return f"{value:.1e}".replace("e-0", "e-")
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _add_map_legend(figure: Figure, table: pd.DataFrame) -> None:
    handles = [Patch(facecolor="white", edgecolor="#bbbbbb", label="blank: not in the study")]
    if table["early_stopped"].any():
        stopped_label = "✕ stopped by a rule as a failure: last value"
        handles.append(Patch(facecolor="white", edgecolor=STOPPED_COLOR, linewidth=1.8, label=stopped_label))
    if (table["scored"] == 0).any():
        handles.append(Patch(facecolor=NO_VALUE_COLOR, label="gray: no scored run, only its status"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8)


def draw_curves(grid: Grid, table: pd.DataFrame, label: str) -> Figure:
    """Every run of the grid as a thin line, colored by its x value. table: from `layout.make_panel_curves`."""
    panel_layout, xs = arrange_panels(grid, table), sorted(table["x"].unique())
    colors = dict(zip(xs, make_arm_colors([label_value(value) for value in xs]).values(), strict=True))
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.9 + 1.55 * panel_layout.rows), layout="constrained")
        axes = figure.subplots(panel_layout.rows, panel_layout.columns, sharex=True, sharey=True, squeeze=False)
        for panel, position in panel_layout.positions.items():
            _draw_lines(axes[position], table[table["panel"] == panel], colors)
            axes[position].set_title(panel, loc="left", fontweight="bold", fontsize=8.2)
            axes[position].tick_params(labelbottom=True)
        first_axes = axes[next(iter(panel_layout.positions.values()))]
        # LineCollection does not scale the axes by itself. "or 1.0": a constant curve at 0 has no height.
        margin = 0.04 * (table["value"].max() - min(0.0, table["value"].min()) or 1.0)
        first_axes.set_ylim(min(0.0, table["value"].min()) - margin, table["value"].max() + margin)
        first_axes.set_xlim(table["step"].min(), table["step"].max() + 0.5)  # room for half a mark at the end
        first_axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _remove_unused(axes, panel_layout)
        figure.supxlabel("training step", fontsize=9)
        figure.supylabel(label, fontsize=9)
        _add_line_legend(figure, grid, colors, "early_stopped" in set(table["status"]))
    return figure


def _draw_lines(axes: Any, table: pd.DataFrame, colors: dict[float, str]) -> None:
    """The curves of one panel. A cross marks the end of a run stopped by a rule, a ring any other incomplete run."""
    runs = [rows for _, rows in table.groupby("run_id", sort=False)]
    # One collection for all runs: hundreds of line objects would take seconds to draw.
    segments = [rows[["step", "value"]].to_numpy(dtype=float) for rows in runs]
    line_colors = [colors[rows["x"].iloc[0]] for rows in runs]
    axes.add_collection(LineCollection(segments, colors=line_colors, linewidths=0.9, alpha=0.85))
    statuses = [rows["status"].iloc[0] for rows in runs]
    for is_stopped, style in (
        (True, {"marker": "X", "s": 26, "color": STOPPED_COLOR}),
        (False, {"marker": "o", "s": 20, "facecolor": "white", "edgecolor": TEXT_COLOR}),
    ):
        ends = [
            segment[-1]
            for segment, status in zip(segments, statuses, strict=True)
            if status != "completed" and (status == "early_stopped") == is_stopped
        ]
        if ends:
            axes.scatter(*np.array(ends).T, zorder=4, linewidth=0.8, **style)


def _add_line_legend(figure: Figure, grid: Grid, colors: dict[float, str], has_stopped: bool) -> None:
    handles = [Line2D([], [], color=color, linewidth=2, label=label_value(value)) for value, color in colors.items()]
    if has_stopped:
        handles.append(Line2D([], [], color=STOPPED_COLOR, marker="X", linestyle="none", label="stopped"))
    figure.legend(
        handles=handles, loc="outside right upper", title=shorten_setting(grid.x), fontsize=8, title_fontsize=8
    )


def draw_edges(doses: pd.DataFrame, edges: pd.DataFrame, setting: str) -> Figure:
    """Collapsed runs and success at the end by dose, with the edge and the safe band of each line.

    doses: from `edge.summarize_doses`. edges: from `edge.summarize_edges`. setting: the short name of the dose.
    """
    lines = list(dict.fromkeys(doses["line"]))
    colors = make_arm_colors(lines)
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.4, 5.6 + 0.16 * len(lines)), layout="constrained")
        heights = [3, 0.5 + 0.3 * len(lines), 3]
        fraction_axes, edge_axes, success_axes = figure.subplots(3, 1, sharex=True, height_ratios=heights)
        for index, line in enumerate(lines):
            rows, marker = doses[doses["line"] == line], _LINE_MARKERS[index % len(_LINE_MARKERS)]
            style = {"color": colors[line], "marker": marker, "linewidth": 1.4, "markersize": 5}
            # A few percent apart, so that the intervals of lines with equal fractions do not cover each other.
            shifted_doses = rows["dose"] * 10 ** (0.012 * (index - (len(lines) - 1) / 2))
            spread = np.abs(rows[["fraction_low", "fraction_high"]].sub(rows["fraction"], axis=0)).to_numpy().T
            fraction_axes.errorbar(shifted_doses, rows["fraction"], yerr=spread, elinewidth=0.8, **style)
            success_axes.plot(rows["dose"], rows["success"], **style, label=line)
            for row in edges[edges["line"] == line].itertuples():
                _draw_edge(
                    edge_axes, row, len(lines) - 1 - index, colors[line], (doses["dose"].min(), doses["dose"].max())
                )
        success_axes.set_xscale("log")
        success_axes.set_xlabel(setting)
        success_axes.set_xticks(sorted(doses["dose"].unique()), map(label_value, sorted(doses["dose"].unique())))
        success_axes.minorticks_off()
        fraction_axes.set_ylabel("collapsed runs (fraction)")
        fraction_axes.set_ylim(-0.03, 1.03)
        edge_axes.set_ylabel("edge")
        edge_axes.set_yticks([])
        edge_axes.set_ylim(-0.6, len(lines) - 0.4)
        success_axes.set_ylabel("success (fraction)")
        success_axes.set_ylim(bottom=min(0.0, doses["success"].min()))
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw_edge(axes: Any, row: Any, height: float, color: str, dose_range: tuple[float, float]) -> None:
    """The edge of a line with its interval, and its safe band as a wide pale bar.

    A bound that is missing is an arrow that leaves the doses of the study on that side.
    """
    if not np.isnan(row.safe_low):
        axes.plot([row.safe_low, row.safe_high], [height, height], color=color, alpha=0.25, linewidth=7)
    if np.isnan(row.edge_low) and np.isnan(row.edge_high):
        axes.scatter(row.edge, height, color=color, marker="|", s=80, zorder=3)
        return
    ends = [
        bound if not np.isnan(bound) else outside
        for bound, outside in zip(
            (row.edge_low, row.edge_high), (dose_range[0] / 1.3, dose_range[1] * 1.3), strict=True
        )
    ]
    axes.plot(ends, [height, height], color=color, linewidth=1.8)
    for end, bound, marker in zip(ends, (row.edge_low, row.edge_high), "<>", strict=True):
        axes.scatter(end, height, color=color, marker=marker if np.isnan(bound) else "|", s=40, zorder=3)
    axes.scatter(row.edge, height, facecolor="white", edgecolor=color, marker="o", s=36, zorder=4)

"""Figures of a grid: heat maps of its cells and thin curves of its runs, a panel for each panel of the grid.

Every panel of a figure has one colour scale (cividis, told apart without colour vision and in grey) and the same axes,
whose values are evenly spaced in order, 0 first. A cell has its number; a vermilion frame and a cross mark what a rule
stopped; grey cells name why there is no number; a place without a run stays blank.
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

from analysis.grid.layout import Grid, level, name, panels
from analysis.sweep.plots import INK, STOPPED, STYLE, arm_colors
from analysis.sweep.verdicts import word

WITHOUT = "#e3e3e3"
MOST_COLUMNS = 3
WIDTH = 10.4
_MAP = "cividis"


class Layout(NamedTuple):
    """Where panels stand. places: panel -> (row, column)."""

    rows: int
    columns: int
    places: dict[str, tuple[int, int]]


def layout(grid: Grid, table: pd.DataFrame) -> Layout:
    """Panels side by side by the factor whose values are words, such as a loss's type; without one in rows of three."""
    found = panels(grid, table)
    names = found["panel"].to_list()
    words = [setting for setting in grid.panels if any(isinstance(value, str) for value in grid.levels[setting])]
    if not words or len(grid.panels) < 2:
        places = {panel: divmod(index, MOST_COLUMNS) for index, panel in enumerate(names)}
        return Layout(-(-len(names) // MOST_COLUMNS), min(len(names), MOST_COLUMNS), places)
    column_of = {value: place for place, value in enumerate(grid.levels[words[0]])}
    others = [setting for setting in grid.panels if setting != words[0]]
    keys = list(found[others].itertuples(index=False, name=None))
    row_of = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    columns = found[words[0]].map(column_of).to_list()
    places = {panel: (row_of[key], column) for panel, key, column in zip(names, keys, columns, strict=True)}
    return Layout(len(row_of), len(column_of), places)


def draw_heat_maps(grid: Grid, table: pd.DataFrame, measure: str, label: str, *, log: bool = False) -> Figure:
    """`measure` over the plane of the grid, a panel each. table: `grid.cells`. label: of the colours, with a unit."""
    placed = layout(grid, table)
    xs, ys = (sorted(table[axis].unique()) for axis in ("x", "y"))
    norm = _norm(table[measure], log)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        height = 1.0 + placed.rows * (0.5 + 0.34 * len(ys))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(placed.rows, placed.columns, sharex=True, sharey=True, squeeze=False)
        _remove_unused(axes, placed)
        for panel, place in placed.places.items():
            _map(axes[place], table[table["panel"] == panel], (xs, ys), measure, norm)
            axes[place].set_title(panel, loc="left", fontweight="bold", fontsize=8.2)
            axes[place].tick_params(labelbottom=True, length=0)
        colors = mpl.cm.ScalarMappable(norm, _MAP)
        used = [axes[place] for place in placed.places.values()]
        figure.colorbar(colors, ax=used, label=label, shrink=min(1.0, 3.2 / height), aspect=18, pad=0.015)
        figure.supxlabel(f"{name(grid.x)} ({grid.x})", fontsize=9)
        figure.supylabel(f"{name(grid.y)} ({grid.y})", fontsize=9)
        _map_legend(figure, table)
    return figure


def _norm(values: "pd.Series[float]", log: bool) -> Normalize:
    """One scale for every panel; a scale of one value is widened, so that it has a place in the middle."""
    shown = values[values > 0] if log else values.dropna()
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    if log:
        return LogNorm(low or 1e-12, high if high > low else 10 * low or 1.0, clip=True)
    return Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)


def _remove_unused(axes: Any, placed: Layout) -> None:
    for place in np.ndindex(axes.shape):
        if place not in placed.places.values():
            axes[place].remove()


def _map(
    axes: Any, cells: pd.DataFrame, levels: tuple[list[float], list[float]], measure: str, norm: Normalize
) -> None:
    """One panel: a square a cell that has a run."""
    xs, ys = levels
    rows: Any = cells.itertuples()
    for row in rows:
        x, y, value = xs.index(row.x), ys.index(row.y), getattr(row, measure)
        color = WITHOUT if np.isnan(value) else mpl.colors.to_hex(mpl.colormaps[_MAP](norm(value)))
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2))
        if row.early_stopped:
            axes.add_patch(Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor=STOPPED, linewidth=1.8))
        _write(axes, x, y, row, value, color)
    axes.set_xlim(-0.5, len(xs) - 0.5)
    axes.set_ylim(-0.5, len(ys) - 0.5)
    axes.set_xticks(range(len(xs)), [level(value) for value in xs])
    axes.set_yticks(range(len(ys)), [level(value) for value in ys])
    axes.spines[["left", "bottom"]].set_visible(False)


def _write(axes: Any, x: int, y: int, row: Any, value: float, color: str) -> None:
    """A cell's number, or why it has none; with a cross where a rule stopped one of its runs."""
    text = cell_text(row.state, row.early_stopped, row.scored, row.runs, value)
    size = 7.6 if len(text) <= 6 or "\n" in text else 6.4
    written = axes.text(x, y, text, ha="center", va="center", fontsize=size, color=ink_on(color), linespacing=0.95)
    written.set_in_layout(False)


def ink_on(color: str) -> str:
    """White or black, whichever has the larger contrast ratio on `color` (relative luminance as in WCAG 2)."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
                        for part in mpl.colors.to_rgb(color))  # fmt: skip
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def cell_text(state: str, stopped: int, scored: int, runs: int, value: float) -> str:
    """What is written into a cell: its mean; `✕` for a stop, `✕ 1/3` where some of three runs were; else a status."""
    if not scored:
        return word(state).replace(" ", "\n")
    number = "–" if np.isnan(value) else short(value)
    cross = "" if not stopped else "✕ " if stopped == runs else f"✕{stopped}/{runs} "
    part = "" if scored == runs else f"\n{scored} of {runs}"
    return cross + number + part


def short(value: float) -> str:
    """A number with two to three digits that fits into a cell: 0.53 as .53, 1.24, 12.3, 4.1e-4."""
    if value == 0:
        return "0"
    if abs(value) < 0.0095:
        return f"{value:.1e}".replace("e-0", "e-")
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _map_legend(figure: Figure, table: pd.DataFrame) -> None:
    handles = [Patch(facecolor="white", edgecolor="#bbbbbb", label="blank: not in the study")]
    if table["early_stopped"].any():
        told = "✕ stopped by a rule: failed regime, last value"
        handles.append(Patch(facecolor="white", edgecolor=STOPPED, linewidth=1.8, label=told))
    if (table["scored"] == 0).any():
        handles.append(Patch(facecolor=WITHOUT, label="no scored run: its status"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8)


def draw_curves(grid: Grid, table: pd.DataFrame, label: str) -> Figure:
    """Every run of the grid as a thin line, coloured by its value of x. table: `grid.curves`."""
    placed, xs = layout(grid, table), sorted(table["x"].unique())
    colors = dict(zip(xs, arm_colors([level(value) for value in xs]).values(), strict=True))
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(WIDTH, 0.9 + 1.55 * placed.rows), layout="constrained")
        axes = figure.subplots(placed.rows, placed.columns, sharex=True, sharey=True, squeeze=False)
        for panel, place in placed.places.items():
            _lines(axes[place], table[table["panel"] == panel], colors)
            axes[place].set_title(panel, loc="left", fontweight="bold", fontsize=8.2)
            axes[place].tick_params(labelbottom=True)
        first = axes[next(iter(placed.places.values()))]
        margin = 0.04 * (table["value"].max() - min(0.0, table["value"].min()) or 1.0)
        first.set_ylim(min(0.0, table["value"].min()) - margin, table["value"].max() + margin)
        first.set_xlim(table["step"].min(), table["step"].max() + 0.5)
        first.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _remove_unused(axes, placed)
        figure.supxlabel("training step", fontsize=9)
        figure.supylabel(label, fontsize=9)
        _line_legend(figure, grid, colors, "early_stopped" in set(table["status"]))
    return figure


def _lines(axes: Any, table: pd.DataFrame, colors: dict[float, str]) -> None:
    """The curves of one panel; a cross ends a run that a rule stopped, a ring one that ended otherwise."""
    runs = [rows for _, rows in table.groupby("run_id", sort=False)]
    segments = [rows[["step", "value"]].to_numpy(dtype=float) for rows in runs]
    shades = [colors[rows["x"].iloc[0]] for rows in runs]
    axes.add_collection(LineCollection(segments, colors=shades, linewidths=0.9, alpha=0.85))
    for status, style in (
        ("early_stopped", {"marker": "X", "s": 26, "color": STOPPED}),
        ("", {"marker": "o", "s": 20, "facecolor": "white", "edgecolor": INK}),
    ):
        ends = [end for end, rows in zip(segments, runs, strict=True) if _ending(str(rows["status"].iloc[0])) == status]
        if ends:
            axes.scatter(*np.array([end[-1] for end in ends]).T, zorder=4, linewidth=0.8, **style)


def _ending(status: str) -> str | None:
    """How a run's end is marked: "early_stopped", "" for any other than completion, None for completion."""
    return None if status == "completed" else status if status == "early_stopped" else ""


def _line_legend(figure: Figure, grid: Grid, colors: dict[float, str], stopped: bool) -> None:
    handles = [Line2D([], [], color=color, linewidth=2, label=level(value)) for value, color in colors.items()]
    if stopped:
        handles.append(Line2D([], [], color=STOPPED, marker="X", linestyle="none", label="stopped"))
    figure.legend(handles=handles, loc="outside right upper", title=name(grid.x), fontsize=8, title_fontsize=8)

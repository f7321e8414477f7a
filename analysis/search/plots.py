"""The figures of a search. Each function draws a table of `SearchResults` and computes no further outcomes."""

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from analysis.data.frames import to_records
from analysis.search.trials import Importance
from analysis.sweep.plots import GHOST_COLOR, STOPPED_COLOR, STYLE, TEXT_COLOR
from trainable.runs.study_record import Dimension

_POINT_COLOR = "#31688e"
_SLICES_PER_ROW = 4
_BEST_FRACTION = 0.25


def draw_history(table: pd.DataFrame, is_higher_better: bool) -> Figure:
    """Outcomes by number of the point, and the best one so far. table: `SearchResults.values`."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for row in to_records(table):
            axes.plot([row["number"]] * 2, [row["low"], row["high"]], color=GHOST_COLOR, linewidth=2.5, zorder=1)
        _scatter(axes, table["number"].to_numpy(dtype=float), table, zorder=3)
        feasible = table[table["is_feasible"]]
        best = feasible["success"].cummax() if is_higher_better else feasible["success"].cummin()
        axes.step(feasible["number"], best, where="post", color=TEXT_COLOR, linewidth=1.2, zorder=2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("number of the point (0: default)")
        axes.set_ylabel("outcome")
    return figure


def draw_importances(importances: Sequence[Importance]) -> Figure:
    """A bar per setting, the largest at the top."""
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(8.0, 0.9 + 0.34 * len(importances)), layout="constrained")
        axes = figure.add_subplot()
        positions = range(len(importances))
        axes.barh(positions, [entry.value for entry in importances], height=0.55, color=_POINT_COLOR, alpha=0.55)
        for position, entry in zip(positions, importances, strict=True):
            axes.plot([entry.low, entry.high], [position] * 2, color=TEXT_COLOR, linewidth=1.4)
        axes.set_yticks(list(positions), [_shorten(entry.name) for entry in importances])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of importance")
    return figure


def draw_slices(table: pd.DataFrame, space: Sequence[Dimension]) -> Figure:
    """A small panel per dimension: outcome against its value. table: `SearchResults.values`."""
    num_rows = math.ceil(len(space) / _SLICES_PER_ROW)
    with mpl.rc_context(dict(STYLE)):
        num_columns = min(len(space), _SLICES_PER_ROW)
        figure = Figure(figsize=(max(2.1 * num_columns, 4.0), 2.3 * num_rows), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
        for axes, dimension in zip(grid.flat, space, strict=False):
            rows = table[table[dimension.name].notna()]
            if dimension.values:
                positions = {value: index for index, value in enumerate(dimension.values)}
                rows = rows[rows[dimension.name].isin(positions)]
                x = np.array([positions[value] for value in rows[dimension.name]], dtype=float)
                axes.set_xticks(list(positions.values()), list(positions))
                axes.set_xlim(-0.6, len(positions) - 0.4)
            else:
                x = rows[dimension.name].to_numpy(dtype=float)
                if dimension.is_log:
                    rows, x = rows[x > 0], x[x > 0]
                    axes.set_xscale("log")
                    axes.xaxis.set_major_locator(LogLocator(numticks=4))
                    axes.xaxis.set_minor_locator(NullLocator())
                _set_limits(axes, dimension)
            _scatter(axes, x, rows, shade=True)
            axes.set_title(_wrap(_shorten(dimension.name)), fontsize=8)
        for axes in list(grid.flat)[len(space) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel("outcome")
    return figure


def _set_limits(axes: Axes, dimension: Dimension) -> None:
    """Show the whole interval of a dimension, with a margin of a twentieth on its own scale."""
    low, high = dimension.low, dimension.high
    if dimension.is_log:
        factor = (high / low) ** 0.05
        axes.set_xlim(low / factor, high * factor)
    else:
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def draw_parallel(table: pd.DataFrame, space: Sequence[Dimension], is_higher_better: bool) -> Figure:
    """A vertical axis per dimension and one for the outcome, and a line per point."""
    columns = [_scale(table, dimension) for dimension in space]
    outcome = table["success"].to_numpy(dtype=float)
    low, high = float(np.nanmin(outcome)), float(np.nanmax(outcome))
    columns.append((outcome - low) / (high - low) if high > low else np.full(len(outcome), 0.5))
    order = np.argsort(-outcome if is_higher_better else outcome, kind="stable")
    best = set(order[: max(1, math.ceil(_BEST_FRACTION * len(outcome)))].tolist())
    with mpl.rc_context({**STYLE, "axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for index, is_feasible in enumerate(table["is_feasible"]):
            heights = [float(column[index]) for column in columns]
            places = [place for place, height in enumerate(heights) if not math.isnan(height)]
            color = STOPPED_COLOR if not is_feasible else _POINT_COLOR if index in best else "#bbbbbb"
            axes.plot(
                places,
                [heights[place] for place in places],
                color=color,
                linewidth=1.3 if index in best else 0.8,
                alpha=0.9 if index in best else 0.6,
                zorder=2 if index in best else 1,
            )
        for place, dimension in enumerate(space):
            _draw_scale(axes, place, dimension)
        axes.plot([len(space)] * 2, [0, 1], color="#888888", linewidth=0.8)
        for height, value in ((0.0, low), (1.0, high)):
            axes.text(len(space) + 0.04, height, f"{value:.3g}", fontsize=7, va="center")
        names = [_wrap(_shorten(dimension.name)) for dimension in space]
        axes.set_xticks(range(len(space) + 1), [*names, "outcome"], fontsize=7, rotation=25, ha="right")
        axes.set_yticks([])
        axes.set_xlim(-0.2, len(space) + 0.4)
    return figure


def draw_pareto(table: pd.DataFrame) -> Figure:
    """Outcome against cost. table: the points with `is_front`."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        front = table[table["is_front"]].sort_values("cost")
        axes.plot(front["cost"] / 1e6, front["success"], color=TEXT_COLOR, linewidth=1.2, zorder=1)
        _scatter(axes, table["cost"].to_numpy(dtype=float) / 1e6, table)
        for row in to_records(front):
            label = row["arm"].removeprefix("point-")
            axes.annotate(label, (row["cost"] / 1e6, row["success"]), (4, 4), textcoords="offset points", fontsize=7)
        axes.set_xlabel("cost (million tokens per run)")
        axes.set_ylabel("outcome")
    return figure


def _scatter(axes: Axes, x: NDArray[np.float64], table: pd.DataFrame, *, shade: bool = False, zorder: int = 2) -> None:
    """The points of `table` at `x`: crosses where a run collapsed or failed, a diamond for the default."""
    is_feasible, is_default = table["is_feasible"].to_numpy(dtype=bool), (table["number"] == 0).to_numpy(dtype=bool)
    y, numbers = table["success"].to_numpy(dtype=float), table["number"].to_numpy(dtype=float)
    shades = mpl.colormaps["Blues"](0.35 + 0.6 * numbers / max(numbers.max(initial=1.0), 1.0))
    colors = shades if shade else np.array([mpl.colors.to_rgba(_POINT_COLOR)] * len(y))
    for mask, options in (
        (is_feasible & ~is_default, {"s": 22}),
        (is_feasible & is_default, {"s": 34, "marker": "D", "edgecolors": TEXT_COLOR}),
    ):
        axes.scatter(x[mask], y[mask], c=colors[mask], zorder=zorder, **options)
    broken = ~is_feasible
    axes.scatter(x[broken], y[broken], s=30, marker="x", color=STOPPED_COLOR, linewidths=1.4, zorder=zorder)


def _scale(table: pd.DataFrame, dimension: Dimension) -> NDArray[np.float64]:
    """The values of a dimension as heights from 0 to 1; NaN where a point has none or one outside."""
    column = table[dimension.name]
    if dimension.values:
        count = len(dimension.values)
        heights = {value: index / max(count - 1, 1) for index, value in enumerate(dimension.values)}
        return np.array([heights.get(value, math.nan) for value in column], dtype=float)
    values = column.to_numpy(dtype=float)
    low, high = dimension.low, dimension.high
    if dimension.is_log:
        values = np.log(np.where(values > 0, values, math.nan))
        low, high = math.log(low), math.log(high)
    heights_of_values = (values - low) / (high - low)
    return np.where((heights_of_values > -0.01) & (heights_of_values < 1.01), heights_of_values, math.nan)


def _draw_scale(axes: Axes, place: int, dimension: Dimension) -> None:
    """The vertical axis of a dimension with its ends or values."""
    axes.plot([place] * 2, [0, 1], color="#888888", linewidth=0.8, zorder=0)
    values = dimension.values
    labels = (
        {index / max(len(values) - 1, 1): value for index, value in enumerate(values)}
        if values
        else {0.0: f"{dimension.low:.3g}", 1.0: f"{dimension.high:.3g}"}
    )
    for height, label in labels.items():
        axes.text(place + 0.04, height, label, fontsize=7, va="center", zorder=4)


def _shorten(name: str) -> str:
    """The last part of a setting, and the value of its condition: `rollout_filter_value (top_p)`."""
    setting, _, condition = name.partition(" if ")
    value = condition.rpartition("=")[2]
    short = setting.rpartition(".")[2]
    return f"{short} ({value})" if value and value not in ("True", "False") else short


def _wrap(name: str) -> str:
    return name.replace(" (", "\n(")

"""Sentences made from the cells and curves of a grid."""

import pandas as pd

from analysis.grid.layout import Grid
from analysis.grid.measures import Measure
from analysis.sweep import findings


def describe_cells(grid: Grid, table: pd.DataFrame, measure: Measure) -> str:
    """Between which cells a measure lies, as the means of their scored runs; empty without a value.

    table: from `layout.make_cell_table`.
    """
    cells = table.dropna(subset=measure.name)
    if cells.empty:
        return ""
    points = cells["x"].map(lambda value: grid.format_factor(grid.x, value))
    heights = cells["y"].map(lambda value: grid.format_factor(grid.y, value))
    names = _add_panel(points + ", " + heights, cells["panel"])
    span = findings.describe_span(pd.Series(cells[measure.name].to_numpy(), index=names), "cell")
    return f"{measure.label[0].upper()}{measure.label[1:]}: {span}."


def describe_curves(grid: Grid, table: pd.DataFrame, label: str) -> str:
    """The first values of a column, and between which panels and values of x the last ones lie.

    A value is the mean over scored runs, whatever their y. table: from `layout.make_panel_curves`. label: of the
    column, with its unit.
    """
    names = _add_panel(table["x"].map(lambda value: grid.format_factor(grid.x, value)), table["panel"])
    return findings.describe_curves(table.assign(arm=names), label, "line")


def _add_panel(names: "pd.Series[str]", panels: "pd.Series[str]") -> "pd.Series[str]":
    """The names with the panel, if there are several."""
    return names + ", " + panels if panels.nunique() > 1 else names

"""Report sections for grid studies: tables and sentences of their figures, and the context of the grid templates."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.grid import kl_anchoring, layout
from analysis.grid.contrasts import compare_switch, list_switches
from analysis.sweep import findings
from trainable.config.aliases import shorten_setting


def group_arms_by_panel(frames: StudyFrames, grid: layout.Grid) -> StudyFrames:
    """The frames with arms renamed to their panel, so that all points of a panel are runs of one arm."""
    # Only home rows: a run without a KL loss is a member of several panels, but an arm needs one name.
    member_table = layout.make_member_table(frames, grid)
    home_rows = member_table[member_table["home"]]
    return layout.rename_arms(frames, dict(zip(home_rows["arm"], home_rows["panel"], strict=True)))


def make_tables(frames: StudyFrames, grid: layout.Grid) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables behind the heat maps by file name: every number that is drawn, with run counts and std."""
    member_table = layout.make_member_table(frames, grid)
    yield "grid_cells", layout.make_cell_table(grid, member_table).rename(columns={"x": grid.x, "y": grid.y})
    for setting in list_switches(grid):
        yield f"grid_{setting.rpartition('.')[2]}", compare_switch(grid, member_table, setting)
    kl_table = kl_anchoring.make_kl_table(frames)
    if len(kl_table):
        yield "grid_kl_to_reference", kl_table.drop(columns="match")


def make_context(frames: StudyFrames, grid: layout.Grid, arms: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The template context of a grid.

    arms: rows of `tables.summarize_arms` for frames whose arms have their grid labels. seed: of the permutation tests.
    """
    member_table = layout.make_member_table(frames, grid)
    labels = layout.make_arm_labels(frames, grid)
    kl_table = kl_anchoring.make_kl_table(frames)
    trends = kl_anchoring.summarize_anchoring(kl_table, np.random.default_rng(seed))
    differences = kl_anchoring.compare_to_k1(kl_table)
    cell_table = layout.make_cell_table(grid, member_table)
    return {
        "x": shorten_setting(grid.x),
        "y": shorten_setting(grid.y),
        "factors": [
            {
                "setting": setting,
                "name": shorten_setting(setting),
                "values": ", ".join(map(layout.label_value, grid.factor_values[setting])),
            }
            for setting in (grid.x, grid.y, *grid.panels)
        ],
        "panels": _make_panel_entries(grid, member_table, labels, arms),
        "cells": [(panel, to_records(rows)) for panel, rows in cell_table.groupby("panel", sort=False)],
        "measures": {name: label for name, label, *_ in layout.MEASURES if cell_table[name].notna().any()},
        "shared": int(member_table.loc[member_table["shared"], "run_id"].nunique()),
        "contrasts": [
            (setting, shorten_setting(setting), to_records(compare_switch(grid, member_table, setting)))
            for setting in list_switches(grid)
        ],
        "comparisons": sum(not np.isnan(arm["p"]) for arm in arms),
        "anchor": kl_anchoring.describe_anchoring(trends, differences),
        "trends": to_records(trends),
        "differences": to_records(differences),
        "files": [name for name, _ in make_tables(frames, grid)],
    }


def _make_panel_entries(
    grid: layout.Grid, member_table: pd.DataFrame, labels: dict[str, str], arms: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One entry per panel: the rows of its arms with their points, and the number of arms with each outcome."""
    rows = {row["arm"]: row for row in arms}
    entries = []
    for panel in layout.list_panels(grid, member_table)["panel"]:
        home_rows = member_table[member_table["home"] & (member_table["panel"] == panel)]
        points = home_rows.drop_duplicates("arm").sort_values([grid.y, grid.x])
        arm_rows = [
            {
                **rows[labels[point["arm"]]],
                "x": layout.label_value(point[grid.x]),
                "y": layout.label_value(point[grid.y]),
                "name": point["arm"],
            }
            for point in to_records(points)
        ]
        entries.append({"panel": panel, "arms": arm_rows, "outcomes": Counter(row["outcome"] for row in arm_rows)})
    # A panel may have only shared runs, whose verdicts are listed in their home panel.
    return [entry for entry in entries if entry["arms"]]


def describe_cells(grid: layout.Grid, table: pd.DataFrame, measure: layout.Measure) -> str:
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


def describe_curves(grid: layout.Grid, table: pd.DataFrame, label: str) -> str:
    """The first values of a column, and between which panels and values of x the last ones lie.

    A value is the mean over scored runs, whatever their y. table: from `layout.make_panel_curves`. label: of the
    column, with its unit.
    """
    names = _add_panel(table["x"].map(lambda value: grid.format_factor(grid.x, value)), table["panel"])
    return findings.describe_curves(table.assign(arm=names), label, "line")


def _add_panel(names: "pd.Series[str]", panels: "pd.Series[str]") -> "pd.Series[str]":
    """The names with the panel, if there are several."""
    return names + ", " + panels if panels.nunique() > 1 else names

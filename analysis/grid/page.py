"""What the report of a grid has instead of one axis: tables beside its figures, and what they show in words."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, records
from analysis.grid import anchor as grid_anchor
from analysis.grid import layout
from analysis.grid.contrasts import contrast, switches
from analysis.grid.measures import MEASURES


def by_panel(frames: StudyFrames, found: layout.Grid) -> StudyFrames:
    """The frames with each arm called by its panel: one arm a panel, its points being its runs."""
    members = layout.members(frames, found)
    home = members[members["home"]]
    return layout.renamed(frames, dict(zip(home["arm"], home["panel"], strict=True)))


def tables(frames: StudyFrames, found: layout.Grid) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables behind the heat maps, by the name of a file: every number that is coloured, with runs and spread."""
    members = layout.members(frames, found)
    yield "grid_cells", layout.cells(found, members).rename(columns={"x": found.x, "y": found.y})
    for setting in switches(found):
        yield f"grid_{setting.rpartition('.')[2]}", contrast(found, members, setting)
    measured = grid_anchor.measured(frames)
    if len(measured):
        yield "grid_kl_to_reference", measured.drop(columns="match")


def context(frames: StudyFrames, found: layout.Grid, arms: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What the page says of a grid. arms: rows of `tables.arm_summary` of the renamed frames. seed: of permutations."""
    members = layout.members(frames, found)
    labels = layout.arm_labels(frames, found)
    measured = grid_anchor.measured(frames)
    trends = grid_anchor.anchoring(measured, np.random.default_rng(seed))
    differences = grid_anchor.against_k1(measured)
    cells = layout.cells(found, members)
    return {
        "x": layout.name(found.x),
        "y": layout.name(found.y),
        "factors": [_factor(found, setting) for setting in (found.x, found.y, *found.panels)],
        "panels": _panels(found, members, labels, arms),
        "cells": [(panel, records(rows)) for panel, rows in cells.groupby("panel", sort=False)],
        "measures": {each.name: each.label for each in MEASURES if cells[each.name].notna().any()},
        "shared": int(members.loc[members["shared"], "run_id"].nunique()),
        "contrasts": [(setting, layout.name(setting), records(contrast(found, members, setting)))
                      for setting in switches(found)],
        "comparisons": sum(not np.isnan(arm["p"]) for arm in arms),
        "anchor": grid_anchor.sentences(trends, differences),
        "trends": records(trends),
        "differences": records(differences),
        "files": [name for name, _ in tables(frames, found)],
    }  # fmt: skip


def _factor(found: layout.Grid, setting: str) -> dict[str, str]:
    values = found.levels[setting]
    ordered = sorted(values) if setting in (found.x, found.y) else values
    return {
        "setting": setting,
        "name": layout.name(setting),
        "values": ", ".join(layout.level(value) for value in ordered),
    }


def _panels(
    found: layout.Grid, members: pd.DataFrame, labels: dict[str, str], arms: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One entry a panel: its arms' rows, each with its point, and how many arms have which outcome."""
    rows = {row["arm"]: row for row in arms}
    entries = []
    for panel in layout.panels(found, members)["panel"]:
        home = members[members["home"] & (members["panel"] == panel)]
        points = home.drop_duplicates("arm").sort_values([found.y, found.x])
        own = [{**rows[labels[point["arm"]]], "x": layout.level(point[found.x]), "y": layout.level(point[found.y]),
                "name": point["arm"]} for point in records(points)]  # fmt: skip
        counts: dict[str, int] = {}
        for row in own:
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        entries.append({"panel": panel, "arms": own, "outcomes": counts})
    return [entry for entry in entries if entry["arms"]]

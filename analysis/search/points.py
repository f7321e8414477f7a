"""The points of a search and their outcomes: one row per arm."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.data.compare import (
    collect_outcomes,
    estimate_mean,
    require_single_study,
    select_runs,
)
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, to_records
from analysis.sweep.collapse import count_collapses
from trainable.runs.run_ends import CENSORED

SUCCESS, COST = "success", "cost"
"""The objectives of a search: the primary outcome of its study, and the tokens that a run samples and trains on."""

_COST_COLUMNS = ("total_sampled_tokens", "total_trained_tokens")
COMPLETE, CENSORED_POINT, FAILED, OPEN = "complete", "censored", "failed", "open"
"""States of a point: every run has ended and some can be scored; successive halving stopped one or more, so that the
mean of the others would be too good; no run can be scored; runs have yet to end."""


def make_points(frames: StudyFrames) -> pd.DataFrame:
    """The points of a search, in the order in which they were drawn; empty for another study.

    Columns: arm, number (0 for the default), state (COMPLETE, CENSORED_POINT, FAILED or OPEN), seeds (scored runs),
    violations (runs that collapsed, or that failed and so have no outcome), is_feasible, success (mean of the primary
    outcome over scored runs) with low and high, cost (mean tokens per run; NaN for a family without them), and settings
    (text by dotted setting).

    The outcome of a censored point is that of its runs that were not censored, and is used nowhere.

    A run that a rule stopped counts with its outcome, and as a violation: a collapse is a result and never missing.
    """
    study = require_single_study(frames).studies[0]
    entry = study.get("search")
    if not entry:
        return pd.DataFrame()
    (family,) = frames.families
    points: Mapping[str, Mapping[str, str]] = study["points"]
    outcomes = collect_outcomes(frames, family.primary_column)
    collapses = count_collapses(frames) if family.is_fine_tuning else pd.DataFrame()
    collapsed = {row["arm"]: row["collapsed"] for row in to_records(collapses)}
    rows: list[Row] = []
    for number, arm in enumerate(points):
        runs = select_runs(frames, arm)
        scored_runs = select_runs(frames, arm, scored_only=True)
        num_failed = int((runs["status"] == "failed").sum())
        num_censored = int((runs["status"] == CENSORED).sum())
        is_over = len(scored_runs) + num_failed + num_censored == len(runs)
        violations = int(collapsed.get(arm, 0)) + num_failed
        estimate = estimate_mean(outcomes, arm)
        state = COMPLETE if len(scored_runs) else FAILED
        state = OPEN if not is_over else CENSORED_POINT if num_censored else state
        rows.append(
            {
                "arm": arm,
                "number": number,
                "state": state,
                "seeds": len(scored_runs),
                "violations": violations,
                "is_feasible": state == COMPLETE and not violations,
                "success": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "cost": _compute_cost(scored_runs),
                "settings": dict(points[arm]),
            }
        )
    return pd.DataFrame(rows)


def _compute_cost(runs: pd.DataFrame) -> float:
    """Mean tokens per run; NaN without the columns or without a run."""
    if not len(runs) or not set(_COST_COLUMNS) <= set(runs.columns):
        return math.nan
    return float(runs[list(_COST_COLUMNS)].sum(axis=1, min_count=len(_COST_COLUMNS)).mean())


def find_best_point(points: pd.DataFrame, is_higher_better: bool) -> Row | None:
    """The point whose mean outcome is best among those at which no run collapsed or failed; None if there is none.

    Of equal points it is the one that was drawn first.
    """
    feasible = points[points["is_feasible"] & points["success"].notna()]
    if feasible.empty:
        return None
    order = feasible.sort_values("success", ascending=not is_higher_better, kind="stable")
    return to_records(order.iloc[:1])[0]


def select_dimensions(entry: Mapping[str, Any], settings: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The dimensions of the space that a point has a value of: all, but those whose condition it does not meet.

    entry: `search` of study.json.
    """
    return [
        dimension
        for dimension in entry["space"]
        if (not dimension["condition"] or settings.get(dimension["condition"][0]) == dimension["condition"][1])
        and parse_value(dimension, settings.get(dimension["setting"])) is not None
    ]


def parse_value(dimension: Mapping[str, Any], text: str | None) -> Any:
    """The value of a dimension from its text: a number inside the interval, or one of the values.

    None for a missing text and for one that is neither: a folder may come from somebody else.
    """
    if text is None or (dimension["values"] and text not in dimension["values"]):
        return None
    if dimension["values"]:
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    # A rounded value may lie a little outside.
    value = min(max(value, dimension["low"]), dimension["high"])
    return int(value) if dimension["is_integer"] else value

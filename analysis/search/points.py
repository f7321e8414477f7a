"""The points of a search and their outcomes: one row per arm."""

import math
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from analysis.data.compare import (
    collect_outcomes,
    cut_interval,
    estimate_mean,
    find_failed_stops,
    require_single_study,
    select_runs,
)
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import Estimate
from analysis.sweep.collapse import find_run_ends
from trainable.config.aliases import flatten_settings
from trainable.runs.study_record import CENSORED, Dimension, Search

SUCCESS: Final = "success"
COST: Final = "cost"
"""The objectives of a search: its study's primary outcome, and the tokens that a run samples and trains on."""

_COST_COLUMNS = ("total_sampled_tokens", "total_trained_tokens")
COMPLETE, CENSORED_POINT, FAILED, OPEN = "complete", "censored", "failed", "open"
"""States of a point: all its runs ended and some are scored; successive halving stopped it; all runs failed; or runs
have yet to end. Only a complete point has an outcome."""


def make_points(frames: StudyFrames) -> pd.DataFrame:
    """Make a table of the points of a search, in the order in which they were drawn; empty for another study.

    Columns: arm, number (0 for the default), state (COMPLETE, CENSORED_POINT, FAILED or OPEN), seeds (scored runs),
    violations (runs that collapsed, that a rule stopped as failures, or that failed and so have no outcome),
    is_feasible, success (mean of the primary outcome over scored runs) with low and high, cost (mean tokens per run;
    NaN for a family without them), settings (text by dotted setting; for the default taken from the study), and values
    (of each dimension that the point has, by name; for the default where the space contains them).

    The outcome is NaN unless the point is complete. A run that a rule stopped counts with its outcome, and as a
    violation if it was stopped as a failure: a collapse is a result and never missing.
    """
    study = require_single_study(frames).studies[0]
    search, points = study.search, study.points
    if not search or not points:
        return pd.DataFrame()
    (family,) = frames.families
    outcomes = collect_outcomes(frames, family.primary_column)
    broken_ids = _find_broken_runs(frames)
    base = {name: str(value) for name, value in flatten_settings(study.settings).items()}
    rows: list[Row] = []
    for number, (arm, settings) in enumerate(points.items()):
        runs = select_runs(frames, arm)
        scored_runs = select_runs(frames, arm, scored_only=True)
        if not number:
            settings = {
                name: base[name] for dimension in _list_dimensions(search, base) if (name := dimension.setting) in base
            }
        violations = int(runs["run_id"].isin(broken_ids).sum())
        state = _find_state(runs, scored_runs)
        estimate = estimate_mean(outcomes, arm) if state == COMPLETE else Estimate()
        estimate = cut_interval(estimate, 0.0, 1.0) if outcomes.is_fraction else estimate
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
                "cost": _compute_cost(scored_runs) if state == COMPLETE else math.nan,
                "settings": dict(settings),
                "values": read_values(search, settings if number else base, is_exact=not number),
            }
        )
    return pd.DataFrame(rows)


def _find_broken_runs(frames: StudyFrames) -> set[str]:
    """Find the ids of the runs that collapsed, that a rule stopped as failures, or that failed."""
    (family,) = frames.families
    runs = frames.runs
    if not family.is_fine_tuning:
        return set(runs.loc[runs["status"].isin(("early_stopped", "failed")), "run_id"])
    ends = find_run_ends(frames)
    is_broken = find_failed_stops(runs) | (runs["status"] == "failed")
    return {*runs.loc[is_broken, "run_id"], *ends.loc[ends["is_collapse"], "run_id"]}


def _find_state(runs: pd.DataFrame, scored_runs: pd.DataFrame) -> str:
    if (runs["status"] == CENSORED).any():
        return CENSORED_POINT
    num_ended = len(scored_runs) + int((runs["status"] == "failed").sum())
    if num_ended < len(runs):
        return OPEN
    return COMPLETE if len(scored_runs) else FAILED


def _compute_cost(runs: pd.DataFrame) -> float:
    """Compute the mean number of tokens per run; NaN without the columns or without a run."""
    if not len(runs) or not set(_COST_COLUMNS) <= set(runs.columns):
        return math.nan
    return float(runs[list(_COST_COLUMNS)].sum(axis=1, min_count=len(_COST_COLUMNS)).mean())


def find_best_point(points: pd.DataFrame, is_higher_better: bool) -> Row | None:
    """Find the point with the best mean outcome among those at which no run collapsed or failed; None without any.

    Among equal points, the one drawn first wins.
    """
    feasible = points[points["is_feasible"] & points["success"].notna()]
    order = feasible.sort_values("success", ascending=not is_higher_better, kind="stable")
    return next(iter(to_records(order)), None)


def read_values(search: Search, settings: Mapping[str, str], *, is_exact: bool) -> dict[str, Any]:
    """Read the value of each dimension that a point has, by the name of the dimension.

    Skips dimensions whose condition the settings do not meet, and texts that are neither a number nor one of the
    dimension's values: a folder may come from an untrusted source.

    Args:
        search: the search that the study declares.
        settings: texts by dotted setting.
        is_exact: skip numbers outside the interval. Otherwise they are moved to its nearest end, since rounding may
            have moved a drawn value slightly outside.
    """
    return {
        dimension.name: value
        for dimension in _list_dimensions(search, settings)
        if (value := _parse_value(dimension, settings.get(dimension.setting), is_exact)) is not None
    }


def _list_dimensions(search: Search, settings: Mapping[str, str]) -> list[Dimension]:
    """List the dimensions of the space whose condition the settings meet."""
    return [
        dimension
        for dimension in search.space
        if not dimension.condition or settings.get(dimension.condition[0]) == dimension.condition[1]
    ]


def _parse_value(dimension: Dimension, text: str | None, is_exact: bool) -> Any:
    if text is None or dimension.values:
        return text if text in dimension.values else None
    try:
        value = float(text)
    except ValueError:
        return None
    inside = min(max(value, dimension.low), dimension.high)
    if math.isnan(value) or (is_exact and inside != value):
        return None
    return int(inside) if dimension.is_integer else inside

"""The points of a search and their outcomes: one row per arm."""

import math
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
from trainable.config.setting_types import flatten_settings
from trainable.runs.study_record import CENSORED, Dimension

SUCCESS: Final = "success"
COST: Final = "cost"
"""The objectives of a search: its study's primary outcome, and the tokens that a run samples and trains on."""

_COST_COLUMNS = ["total_sampled_tokens", "total_trained_tokens"]
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
        texts = settings if number else base
        # Those whose condition the settings meet.
        dimensions = [
            entry
            for entry in search.space
            if not entry.condition or texts.get(entry.condition[0]) == entry.condition[1]
        ]
        values = {
            entry.name: _parse_value(entry, texts.get(entry.setting), is_exact=not number) for entry in dimensions
        }
        if not number:
            settings = {entry.setting: base[entry.setting] for entry in dimensions if entry.setting in base}
        violations = int(runs["run_id"].isin(broken_ids).sum())
        if (runs["status"] == CENSORED).any():
            state = CENSORED_POINT
        elif len(scored_runs) + (runs["status"] == "failed").sum() < len(runs):
            state = OPEN
        else:
            state = COMPLETE if len(scored_runs) else FAILED
        estimate = estimate_mean(outcomes, arm) if state == COMPLETE else Estimate()
        estimate = cut_interval(estimate, 0.0, 1.0) if outcomes.is_fraction else estimate
        tokens = scored_runs.reindex(columns=_COST_COLUMNS).sum(axis=1, min_count=len(_COST_COLUMNS))
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
                "cost": float(tokens.mean()) if state == COMPLETE else math.nan,
                "settings": dict(settings),
                "values": {name: value for name, value in values.items() if value is not None},
            }
        )
    return pd.DataFrame(rows)


def _find_broken_runs(frames: StudyFrames) -> set[str]:
    """Find the ids of the runs that collapsed, that a rule stopped as failures, or that failed."""
    (family,) = frames.families
    runs = frames.runs
    if not family.has_symptoms:
        return set(runs.loc[runs["status"].isin(("early_stopped", "failed")), "run_id"])
    ends = find_run_ends(frames)
    is_broken = find_failed_stops(runs) | (runs["status"] == "failed")
    return {*runs.loc[is_broken, "run_id"], *ends.loc[ends["is_collapse"], "run_id"]}


def find_best_point(points: pd.DataFrame, is_higher_better: bool) -> Row | None:
    """Find the point with the best mean outcome among those at which no run collapsed or failed; None without any.

    Among equal points, the one drawn first wins.
    """
    feasible = points[points["is_feasible"] & points["success"].notna()]
    order = feasible.sort_values("success", ascending=not is_higher_better, kind="stable")
    return next(iter(to_records(order)), None)


def _parse_value(dimension: Dimension, text: str | None, is_exact: bool) -> Any:
    """Parse the value that a point has; None for a text that is none, since a folder may be from an untrusted source.

    is_exact: take no number outside the interval. Otherwise it is moved to the nearest end, since rounding may have
    moved a drawn value slightly outside.
    """
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

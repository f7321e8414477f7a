"""Tables over the course of training: curves, kept groups, equal budgets, and consistency of identical runs."""

from collections.abc import Mapping
from difflib import get_close_matches
from itertools import combinations

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, require_single_study
from analysis.data.frames import StudyFrames, diff_frames, to_records

BUDGETS: Mapping[str, str] = {
    "total_optimizer_steps": "optimizer steps",
    "total_env_steps": "environment steps",
    "total_sampled_tokens": "sampled tokens",
    "total_trained_tokens": "trained tokens",
    "seconds_total": "run time",
}
"""What a run costs, and how a report labels it."""


def make_curves(frames: StudyFrames, column: str) -> pd.DataFrame:
    """Collect the values of a step column, one row per run and step: arm, seed, run_id, status, step, value.

    If the column has a value before training, as val_success has, it is at step 0. ValueError if no family of the study
    has the column.
    """
    columns = {step_column.name for family in frames.families for step_column in family.step_columns}
    if column not in columns:
        nearest = get_close_matches(column, sorted(columns), n=3, cutoff=0.5)
        raise ValueError(
            f"There is no step column `{column}` in this study. docs/metrics.md lists all columns; try "
            f"{' or '.join(f'`{name}`' for name in nearest) or '`entropy`'}."
        )
    trials = require_single_study(frames).trials
    heads = frames.steps[["arm", "seed", "run_id", "step"]]
    table = heads.assign(value=frames.steps[column])
    if f"base_{column}" in columns:
        # The value before training is logged in the row of the first step, in a separate column.
        table = pd.concat([heads.assign(step=0, value=frames.steps[f"base_{column}"]), table])
    table = table.dropna(subset="value").assign(
        rank=lambda rows: rows["run_id"].map(dict(zip(trials["run_id"], range(len(trials)), strict=True))),
        status=lambda rows: rows["run_id"].map(dict(zip(trials["run_id"], trials["status"], strict=True))),
    )
    table = table.sort_values(["rank", "step"], kind="stable", ignore_index=True)
    return table[["arm", "seed", "run_id", "status", "step", "value"]]


def compute_mean_curves(table: pd.DataFrame, *, carry_forward: bool = False) -> pd.DataFrame:
    """Average scored runs at each step, for arms with several runs: arm, step, value. table: from `make_curves`.

    carry_forward: a run stopped by a rule keeps its last value to the end, as it is scored. Otherwise the mean is over
    the runs that have the step.
    """
    mean_frames = []
    for arm, rows in table[table["status"].isin(SCORED_STATUSES)].groupby("arm", sort=False):
        values_by_run = rows.pivot_table(index="step", columns="run_id", values="value")
        # The mean of a single run would only repeat its curve.
        if values_by_run.shape[1] < 2:
            continue
        stopped_runs = rows.loc[rows["status"] == "early_stopped", "run_id"].unique().tolist()
        if carry_forward:
            values_by_run[stopped_runs] = values_by_run[stopped_runs].ffill()
        mean_frames.append(
            pd.DataFrame({"arm": arm, "step": values_by_run.index, "value": values_by_run.mean(axis=1).to_numpy()})
        )
    return pd.concat(mean_frames, ignore_index=True) if mean_frames else pd.DataFrame(columns=["arm", "step", "value"])


def compare_at_equal_budget(frames: StudyFrames) -> pd.DataFrame:
    """Compare sampled validation success at equal amounts of each budget: budget, amount, arm, success, runs.

    The amount is the smallest that a completed run used. Success is interpolated between the validations of a run; a
    run stopped earlier by a rule keeps its last value. Means over scored runs. Empty without a completed run.
    """
    scored_runs = require_single_study(frames).trials.loc[
        frames.trials["status"].isin(SCORED_STATUSES), ["arm", "run_id", "status", *BUDGETS]
    ]
    # A stopped run used less of every budget, so it must not set the amount.
    completed_runs = scored_runs[scored_runs["status"] == "completed"]
    rows = []
    for budget in BUDGETS:
        amount = float(completed_runs[budget].min())
        if np.isnan(amount):  # no completed run has recorded this budget
            continue
        for arm in dict.fromkeys(scored_runs["arm"]):
            runs = scored_runs[scored_runs["arm"] == arm]
            values = [_interpolate_success(frames, run_id, budget, amount) for run_id in runs["run_id"]]
            rows.append({"budget": budget, "amount": amount, "arm": arm, "success": np.mean(values), "runs": len(runs)})
    return pd.DataFrame(rows, columns=["budget", "amount", "arm", "success", "runs"])


def _interpolate_success(frames: StudyFrames, run_id: str, budget: str, amount: float) -> float:
    """Interpolate a run's validation success after using `amount`: linear between validations, then constant."""
    steps = frames.get_run_steps(run_id)
    # The validation before training is the value at a budget of 0. np.interp is constant beyond the last point.
    base_values = steps["base_val_success"].dropna().to_list()[:1]
    points = steps[[budget, "val_success"]].to_numpy(dtype=float)
    curve = dict([*((0.0, value) for value in base_values), *points[~np.isnan(points).any(axis=1)].tolist()])
    return float(np.interp(amount, list(curve), list(curve.values()))) if curve else float("nan")


def check_consistency(frames: StudyFrames) -> pd.DataFrame:
    """Compare scored runs with the same configuration and seed, whose rows must be equal.

    One row per pair of such runs: a and b (named study/run_id), seed, agree, difference (text, empty if they agree).
    Runs may come from several studies: the run with KL 0 of one sweep is the run with entropy 0 of another.
    """
    # Unfinished runs and runs without a config_hash need not have equal rows.
    is_comparable = frames.trials["status"].isin(SCORED_STATUSES) & (frames.trials["config_hash"] != "")
    trials = frames.trials.loc[is_comparable, ["config_hash", "seed", "study", "run_id"]]
    rows = []
    for (_, seed), runs in trials.groupby(["config_hash", "seed"], sort=False):
        for pair in combinations(to_records(runs), 2):
            steps_a, steps_b = (
                frames.steps[(frames.steps["study"] == run["study"]) & (frames.steps["run_id"] == run["run_id"])]
                for run in pair
            )
            differences = diff_frames(steps_a, steps_b, ignored_columns=("run_id", "study", "arm"))
            names = (f"{run['study']}/{run['run_id']}" for run in pair)
            rows.append((*names, seed, not differences, "; ".join(differences)))
    return pd.DataFrame(rows, columns=["a", "b", "seed", "agree", "difference"])

"""Runs that are read where they have spent what the baseline spent: steps, updates, or trained or sampled tokens."""

from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.data.summaries import LATE_EVALUATIONS
from analysis.stats.estimates import Floats
from trainable.runs.study_record import DeclaredContrast

LONG, REFILLED = "-long", "-refilled"
"""Ends of the names of arms that train longer than the baseline, and that sample more in each step."""
BUDGETS: dict[str, tuple[str, str | None]] = {
    "training steps": (LONG, None),
    "optimizer steps": (LONG, "optimizer_steps"),
    "trained tokens": (LONG, "trained_tokens"),
    "sampled tokens": (REFILLED, "sampled_tokens"),
}
"""For each budget, the arms that are read at it, and the column of steps that adds up to it (None: their number)."""
TOTALS = ("optimizer_steps", "env_steps", "sampled_tokens", "trained_tokens")


def cut_at_budgets(frames: StudyFrames) -> StudyFrames:
    """Add for each budget runs that end where they have spent what the baseline spent, and drop the long runs.

    The baseline's run of the same seed sets the budget. A run that never reaches it, or whose baseline has not
    completed, has no such run. Contrasts compare each new arm, such as `0.9 at equal optimizer steps`, with the
    baseline. Of the outcomes only `late_val_success` is computed again; the others are missing in the new arms. It is
    the mean of the run's curve, interpolated where it has spent what the baseline had spent at its last validations:
    the last validations before the cut would lie too early in the curve of a run that makes fewer steps.
    """
    (study,) = frames.studies
    runs = to_records(frames.runs[frames.runs["status"] == "completed"])
    baselines = {run["seed"]: run["run_id"] for run in runs if run["arm"] == study.baseline}
    steps_by_run = dict(list(frames.steps.groupby("run_id", sort=False, observed=True)))
    levels_by_run = dict(list(frames.levels.groupby("run_id", sort=False, observed=True)))
    others = ~frames.trials["arm"].str.endswith(LONG)
    kept_ids = frames.trials.loc[others, "run_id"]
    trials = [frames.trials[others]]
    steps, levels = ([table[table["run_id"].isin(kept_ids)]] for table in (frames.steps, frames.levels))
    arms = []
    for budget, (ending, column) in BUDGETS.items():
        for run in runs:
            if not run["arm"].endswith(ending) or run["seed"] not in baselines:
                continue
            rows, baseline_rows = steps_by_run[run["run_id"]], steps_by_run[baselines[run["seed"]]]
            spent, limits = (spend(table, column) for table in (rows, baseline_rows))
            if spent[-1] < limits[-1]:
                continue
            cut_rows = rows[: int(np.searchsorted(spent, limits[-1])) + 1]
            arm = f"{run['arm'].removesuffix(LONG)} at equal {budget}"
            names = {"arm": arm, "run_id": f"{arm} {run['seed']}"}
            late_limits = limits[baseline_rows["val_success"].notna()][-LATE_EVALUATIONS:]
            curve = read_curve(rows, run["base_val_success"], late_limits, column)
            last_step = int(cut_rows["step"].iloc[-1])
            outcomes = {"late_val_success": curve.mean(), "steps_done": last_step}
            outcomes |= {f"total_{name}": cut_rows[name].sum() for name in TOTALS}
            trial = frames.trials[frames.trials["run_id"] == run["run_id"]]
            missing = {name: np.nan for name in study.outcomes if name != "late_val_success"}
            trials.append(trial.assign(**names, **missing, **outcomes, steps_total=last_step))
            steps.append(cut_rows.assign(**names))
            run_levels = levels_by_run[run["run_id"]]
            is_before = (run_levels["step"] <= last_step) & (run_levels["split"] == "val")
            levels.append(run_levels[is_before].assign(**names))
            arms.append(arm)
    new_arms = tuple(dict.fromkeys(arms))
    contrasts = tuple(DeclaredContrast(f"{arm}, against none", ((arm, study.baseline),)) for arm in new_arms)
    other_arms = tuple(arm for arm in study.axis.values if not arm.endswith(LONG))
    axis = replace(study.axis, values=(*other_arms, *new_arms))
    return replace(
        frames,
        trials=pd.concat(trials, ignore_index=True),
        steps=pd.concat(steps, ignore_index=True),
        levels=pd.concat(levels, ignore_index=True),
        study=replace(study, axis=axis, contrasts=(*study.contrasts, *contrasts)),
    )


def spend(rows: pd.DataFrame, column: str | None) -> Floats:
    """Add up what a run has spent after each of its steps (n,): a column of `rows`, or the steps themselves."""
    return np.arange(1.0, len(rows) + 1) if column is None else rows[column].to_numpy(dtype=float).cumsum()


def read_curve(rows: pd.DataFrame, success_before: float, places: Floats, column: str | None) -> Floats:
    """Interpolate a run's sampled validations (n,) where it has spent what `places` (n,) say (see `spend`)."""
    is_validated = rows["val_success"].notna()
    spent, values = spend(rows, column)[is_validated], rows.loc[is_validated, "val_success"]
    return np.interp(places, [0, *spent], [success_before, *values])

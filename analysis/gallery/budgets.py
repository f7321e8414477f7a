"""Runs that are read where they have spent what the baseline spent: training steps, optimizer steps or tokens."""

from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.data.summaries import compute_late_mean
from trainable.runs.study_record import DeclaredContrast

LONG = "-long"
"""The end of the name of an arm that trains longer than the baseline, to be read at its budgets."""
BUDGETS = {"training steps": None, "optimizer steps": "optimizer_steps", "trained tokens": "trained_tokens"}
"""For each budget, the column of steps that adds up to it; None for the number of steps."""


def cut_at_budgets(frames: StudyFrames) -> StudyFrames:
    """Replace each run of a long arm by one run per budget, which ends where it has spent what the baseline spent.

    The baseline's run of the same seed sets the budget. A long run that never reaches it, or whose baseline has not
    completed, is left out. Contrasts compare each new arm, such as `0.9 at equal optimizer steps`, with the baseline.
    Of the outcomes only `late_val_success` is computed again; the others are missing in the new arms.
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
    for budget, column in BUDGETS.items():
        for run in runs:
            if not run["arm"].endswith(LONG) or run["seed"] not in baselines:
                continue
            rows, baseline_rows = steps_by_run[run["run_id"]], steps_by_run[baselines[run["seed"]]]
            spent, limit = (
                np.arange(1, len(table) + 1) if column is None else table[column].to_numpy().cumsum()
                for table in (rows, baseline_rows)
            )
            if spent[-1] < limit[-1]:
                continue
            cut_rows = rows[: int(np.searchsorted(spent, limit[-1])) + 1]
            arm = f"{run['arm'].removesuffix(LONG)} at equal {budget}"
            names = {"arm": arm, "run_id": f"{arm} {run['seed']}"}
            curve = [(row["step"], row["val_success"]) for row in to_records(cut_rows.dropna(subset="val_success"))]
            last_step = int(cut_rows["step"].iloc[-1])
            outcomes = {"late_val_success": compute_late_mean(curve, None), "steps_done": last_step}
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

"""The tables that follow training: curves, kept groups, survival, equal budgets, and rows that must agree."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED, arms, runs_of, single
from analysis.data.frames import StudyFrames, records, same_rows
from analysis.stats.estimates import survival

BUDGETS = ("total_optimizer_steps", "total_env_steps", "total_sampled_tokens", "total_trained_tokens", "seconds_total")
RETRIEVALS = {
    "collapse_trajectory_retrieval_accuracy": "retrieval, all turns (share)",
    "collapse_first_turn_retrieval_accuracy": "retrieval, first turns (share)",
}


def curves(frames: StudyFrames, column: str) -> pd.DataFrame:
    """One row a run and step at which the step column `column` has a value: arm, seed, run_id, status, step, value.

    A column with a value before training (val_success and its like) has it at step 0.
    """
    columns = {each.name for family in frames.families for each in family.step_columns}
    if column not in columns:
        raise ValueError(f"There is no step column `{column}`; docs/metrics.md lists them all.")
    status = dict(zip(single(frames).trials["run_id"], frames.trials["status"], strict=True))
    names = ["arm", "seed", "run_id", "step"]
    parts = [frames.steps[[*names, column]].rename(columns={column: "value"})]
    if f"base_{column}" in columns:
        base = frames.steps[[*names, f"base_{column}"]].rename(columns={f"base_{column}": "value"})
        parts.insert(0, base.assign(step=0))
    table = pd.concat(parts, ignore_index=True).dropna(subset="value")
    rank = {run_id: index for index, run_id in enumerate(status)}
    table = table.assign(rank=table["run_id"].map(rank)).sort_values(["rank", "step"], kind="stable")
    table = table.assign(status=table["run_id"].map(status))
    return table[["arm", "seed", "run_id", "status", "step", "value"]].reset_index(drop=True)


def mean_curves(table: pd.DataFrame, *, carry: bool = False) -> pd.DataFrame:
    """Mean over scored runs at each step, for arms with several: arm, step, value. table: from `curves`.

    carry: a run that a rule stopped keeps its last value to the end, as it is scored; otherwise the mean is over the
    runs that have the step.
    """
    parts = []
    for arm, rows in table[table["status"].isin(SCORED)].groupby("arm", sort=False):
        wide = rows.pivot_table(index="step", columns="run_id", values="value")
        if wide.shape[1] < 2:
            continue
        stopped = rows.loc[rows["status"] == "early_stopped", "run_id"].unique().tolist()
        if carry:
            wide[stopped] = wide[stopped].ffill()
        parts.append(pd.DataFrame({"arm": arm, "step": wide.index, "value": wide.mean(axis=1).to_numpy()}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["arm", "step", "value"])


def arm_lines(frames: StudyFrames) -> pd.DataFrame:
    """Retrieval accuracy and entropy of every arm by step: arm, measure, step, value, chance. Means over an arm's runs.

    Retrieval: the share of thoughts that are likelier after their own prompt than after all others. chance is what
    thoughts that depend on no prompt would reach, a mean over all runs at the step (missing for entropy). Empty where
    no run measured a retrieval.
    """
    names = [*RETRIEVALS, "entropy"]
    found = {name: frames.steps[name] for name in names if name in frames.steps and frames.steps[name].notna().any()}
    columns = ["arm", "measure", "step", "value", "chance"]
    if not found.keys() & RETRIEVALS.keys():
        return pd.DataFrame(columns=columns)
    parts = []
    for name, values in found.items():
        level = name.replace("_accuracy", "_chance_level")
        chance = frames.steps[level] if name != "entropy" and level in frames.steps else np.nan
        rows = frames.steps[["arm", "step"]].assign(value=values, chance=chance).dropna(subset="value")
        rows["chance"] = rows.groupby("step")["chance"].transform("mean")
        means = rows.groupby(["arm", "step"], sort=False, as_index=False).mean().sort_values("step", kind="stable")
        parts.append(means.assign(measure=RETRIEVALS.get(name, "entropy (nats a token)")))
    return pd.concat(parts, ignore_index=True)[columns]


def kept_groups(frames: StudyFrames) -> pd.DataFrame:
    """One row an arm: groups collected a step, and kept and without spread in the first and last quarter of its steps.

    Columns: arm, groups, kept_first, kept_last, zero_std_first, zero_std_last. Means over steps and runs.
    """
    rows = []
    for arm in arms(single(frames)):
        steps = frames.steps[frames.steps["arm"] == arm]
        place = steps["step"] / steps.groupby("run_id")["step"].transform("max")
        first, last = steps[place <= 0.25], steps[place > 0.75]
        rows.append({
            "arm": arm, "groups": steps["groups"].mean(),
            "kept_first": first["groups_kept"].mean(), "kept_last": last["groups_kept"].mean(),
            "zero_std_first": first["zero_std_groups"].mean(), "zero_std_last": last["zero_std_groups"].mean(),
        })  # fmt: skip
    return pd.DataFrame(rows)


def stop_survival(frames: StudyFrames) -> pd.DataFrame:
    """Share of an arm's runs that no rule has stopped, by step (Kaplan-Meier): arm, step, share, runs, stopped.

    A run that failed or was interrupted counts as followed up to its last step. The last row of an arm is at its
    runs' last step. Arms without a step are left out.
    """
    parts = []
    for arm in arms(single(frames)):
        runs = runs_of(frames, arm)
        runs = runs[runs["steps_done"] > 0]
        if runs.empty:
            continue
        stopped = runs["status"] == "early_stopped"
        ends = runs["stop_step"].astype("float64").fillna(runs["steps_done"])
        steps, shares = survival(ends, stopped)
        end = [float(ends.max())] if ends.max() > steps[-1] else []
        table = pd.DataFrame(
            {"arm": arm, "step": [*steps, *end], "share": [*shares, *shares[len(shares) - len(end) :]]}
        )
        parts.append(table.assign(runs=len(runs), stopped=int(stopped.sum())))
    columns = ["arm", "step", "share", "runs", "stopped"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def equal_budget(frames: StudyFrames) -> pd.DataFrame:
    """Sampled validation success at the same amount of each budget: budget, amount, arm, success, runs.

    The amount is the smallest that a completed run used up. Success is interpolated between a run's validations; a run
    that a rule stopped before it keeps its last value. Means over scored runs. Without a completed run: empty.
    """
    scored = single(frames).trials.loc[frames.trials["status"].isin(SCORED), ["arm", "run_id", "status", *BUDGETS]]
    completed = scored[scored["status"] == "completed"]
    measured = frames.steps[["val_success", "base_val_success"]].notna().any(axis=1)
    frames = replace(frames, steps=frames.steps.loc[measured, ["run_id", "val_success", "base_val_success", *BUDGETS]])
    rows = []
    for budget in BUDGETS:
        amount = float(completed[budget].min()) if len(completed) else float("nan")
        if np.isnan(amount):
            continue
        for arm in dict.fromkeys(scored["arm"]):
            runs = scored[scored["arm"] == arm]
            values = [_success_at(frames, run_id, budget, amount) for run_id in runs["run_id"]]
            rows.append({"budget": budget, "amount": amount, "arm": arm, "success": np.mean(values), "runs": len(runs)})
    return pd.DataFrame(rows, columns=["budget", "amount", "arm", "success", "runs"])


def _success_at(frames: StudyFrames, run_id: str, budget: str, amount: float) -> float:
    """A run's validation success when it had used `amount`, linear between validations, flat after the last."""
    steps = frames.steps_of(run_id)
    base = steps["base_val_success"].dropna().to_list()[:1]
    points = steps[[budget, "val_success"]].to_numpy(dtype=float)
    curve = dict([*((0.0, value) for value in base), *points[~np.isnan(points).any(axis=1)].tolist()])
    return float(np.interp(amount, list(curve), list(curve.values()))) if curve else float("nan")


def consistency(frames: StudyFrames) -> pd.DataFrame:
    """Pairs of ended runs with one configuration and seed, which must have equal rows: a, b, seed, agree, difference.

    frames may hold several studies: KL 0 of one sweep is entropy 0 of another. A run is named study/run_id.
    """
    kept = frames.trials["status"].isin(SCORED) & (frames.trials["config_hash"] != "")
    trials = frames.trials.loc[kept, ["config_hash", "seed", "study", "run_id"]]
    rows = []
    for (_, seed), runs in trials.groupby(["config_hash", "seed"], sort=False):
        for a, b in combinations(records(runs), 2):
            ours, theirs = (_steps_of(frames, run["study"], run["run_id"]) for run in (a, b))
            found = same_rows(ours, theirs, leave_out=("run_id", "study", "arm"))
            names = {name: f"{run['study']}/{run['run_id']}" for name, run in (("a", a), ("b", b))}
            rows.append({**names, "seed": seed, "agree": not found, "difference": "; ".join(found)})
    return pd.DataFrame(rows, columns=["a", "b", "seed", "agree", "difference"])


def _steps_of(frames: StudyFrames, study: str, run_id: str) -> pd.DataFrame:
    return frames.steps[(frames.steps["study"] == study) & (frames.steps["run_id"] == run_id)]

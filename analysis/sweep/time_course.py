"""Time to collapse and learning curves of the arms of a sweep: secondary outcomes with an interval or a refusal."""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.data.compare import list_arms, make_estimate_columns, require_single_study, select_runs
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, to_records
from analysis.stats.curves import CurveEstimates, Validations, compare_curves, estimate_curve
from analysis.stats.estimates import Estimate, holm_adjust
from analysis.stats.events import EventTimes, compare_restricted_means, find_collapse, restricted_mean
from analysis.sweep.series import make_curves

COSTS: Mapping[str, str] = {"total_optimizer_steps": "optimizer steps", "total_sampled_tokens": "sampled tokens"}
"""The columns in which the cost of a validation is measured, with their units."""
NUM_DRAWS = 200
"""Bootstrap samples of seeds per arm: standard errors are then known to 5 %, in a second per arm."""
MIN_SEEDS_OF_INTERVAL = 6
"""A permutation test of fewer paired seeds cannot exclude any difference at 95 %."""


def make_validations(frames: StudyFrames) -> pd.DataFrame:
    """The sampled validations of all runs: arm, seed, run_id, status, step, value, episodes, and a column per cost.

    step 0 and cost 0 are before training. episodes: number of episodes of the validation; NaN if unknown.
    """
    table = make_curves(frames, "val_success")
    keys = list(zip(table["run_id"], table["step"], strict=True))
    is_sampled = (frames.levels["split"] == "val") & (frames.levels["mode"] == "sampled")
    episodes = Counter(frames.levels.loc[is_sampled, ["run_id", "step"]].itertuples(index=False, name=None))
    table = table.assign(episodes=[float(episodes.get(key, math.nan)) for key in keys])
    # Dictionaries instead of a join, which pandas cannot make of empty columns of text.
    step_keys = list(zip(frames.steps["run_id"], frames.steps["step"], strict=True))
    for cost in COSTS:
        costs = dict(zip(step_keys, frames.steps[cost].astype(float), strict=True))
        table[cost] = [0.0 if key[1] == 0 else costs.get(key, math.nan) for key in keys]
    return table


def summarize_collapse(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """One row per arm: how many of its scored runs collapsed, when, and the mean steps until then.

    A run collapses when a rule stops it, or when success is below half of its running maximum at two validations in a
    row (`stats.events.find_collapse`). mean_steps: mean steps without collapse of the planned ones (restricted mean).
    difference: minus that of the baseline over common seeds, with an interval from `MIN_SEEDS_OF_INTERVAL` seeds on; p:
    from exchanging the runs of each seed; p_holm: corrected over the arms. note: why there is no interval.
    """
    validations = make_validations(frames)
    baseline = require_single_study(frames).studies[0].get("baseline") or ""
    times = {arm: find_event_times(frames, arm, validations) for arm in list_arms(frames)}
    horizon = float(frames.trials["steps_total"].dropna().min()) if frames.trials["steps_total"].notna().any() else 0.0
    rows = []
    for arm, table in times.items():
        events = table.loc[table["is_event"], "end_step"].to_list()
        estimate, note = Estimate(), ""
        if arm != baseline and baseline in times and len(table):
            estimate, note = _compare_times(table, times[baseline], horizon, generator)
        rows.append(
            {
                "arm": arm,
                "runs": len(table),
                "collapsed": len(events),
                "collapse_steps": ", ".join(f"{step:g}" for step in sorted(events)),
                "mean_steps": restricted_mean(table["end_step"], table["is_event"], horizon),
                **make_estimate_columns("difference", estimate),
                "n": estimate.n,
                "p": estimate.p,
                "note": note,
            }
        )
    names = ["arm", "runs", "collapsed", "collapse_steps", "mean_steps", "difference", "difference_low"]
    result = pd.DataFrame(rows, columns=[*names, "difference_high", "n", "p", "note"])
    return result.assign(p_holm=holm_adjust(result["p"]))


def find_event_times(frames: StudyFrames, arm: str, validations: pd.DataFrame) -> pd.DataFrame:
    """The scored runs of an arm by seed: end_step and is_event."""
    rows = []
    for run in to_records(select_runs(frames, arm, scored_only=True)):
        own = validations[validations["run_id"] == run["run_id"]]
        collapse_step = find_collapse(own["step"], own["value"], own["episodes"].fillna(math.inf))
        stop_step = run["stop_step"] if run["status"] == "early_stopped" else math.nan
        if pd.isna(stop_step) and run["status"] == "early_stopped":
            stop_step = run["steps_done"]  # status.json may lack the step
        step = np.fmin(collapse_step, float(stop_step))
        is_event = not math.isnan(step)
        rows.append({"seed": run["seed"], "end_step": step if is_event else run["steps_done"], "is_event": is_event})
    return pd.DataFrame(rows, columns=["seed", "end_step", "is_event"]).set_index("seed")


def _compare_times(
    arm: pd.DataFrame, baseline: pd.DataFrame, horizon: float, generator: np.random.Generator
) -> tuple[Estimate, str]:
    seeds = arm.index.intersection(baseline.index)
    arm_times, baseline_times = (
        EventTimes(table.loc[seeds, "end_step"], table.loc[seeds, "is_event"]) for table in (arm, baseline)
    )
    estimate = compare_restricted_means(arm_times, baseline_times, horizon, generator)
    if not math.isnan(estimate.low):
        return estimate, ""
    if not len(seeds):
        return estimate, "no seed in common with the baseline"
    if not (np.any(arm_times.is_event) or np.any(baseline_times.is_event)):
        # The same end of all runs is no evidence of equal times beyond it.
        return estimate._replace(p=math.nan), "no run collapsed"
    if len(seeds) < MIN_SEEDS_OF_INTERVAL:
        return estimate, f"an interval needs {MIN_SEEDS_OF_INTERVAL} seeds"
    is_censored = any(
        np.any(~np.asarray(times.is_event) & (np.asarray(times.end_steps) < horizon))
        for times in (arm_times, baseline_times)
    )
    reason = "a run ended early without a collapse" if is_censored else "the differences of all seeds are equal"
    return estimate, reason


def summarize_curves(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """One row per cost of `COSTS` and arm: the ceiling of its success, and the cost of half of its gain.

    Columns: cost, arm, seeds, ceiling (success), midpoint (cost), ceiling_difference (minus the baseline),
    midpoint_ratio (divided by the baseline's; below 1 if the arm needs less), each with `_low` and `_high`; p_ceiling,
    p_midpoint, and both corrected together over all rows (`_holm`); refusal: why there is no curve or no comparison.
    Intervals need five seeds. A setting that moves the ceiling changes what is learned in the end, and one that moves
    the midpoint how fast. Empty if the outcomes of single levels are missing, which say how many episodes there were.
    """
    validations = make_validations(frames).dropna(subset="episodes")
    baseline = require_single_study(frames).studies[0].get("baseline") or ""
    rows = []
    for cost in COSTS:
        curves = {
            arm: estimate_curve(_select_validations(frames, arm, validations, cost), generator, NUM_DRAWS)
            for arm in list_arms(frames)
            if _select_scored(frames, arm, validations)[cost].notna().any()
        }
        rows += [_make_curve_row(cost, arm, curves, baseline) for arm in curves]
    names = ["cost", "arm", "seeds", "ceiling", "midpoint", "ceiling_difference", "midpoint_ratio", "refusal"]
    table = pd.DataFrame(rows, columns=list(rows[0]) if rows else [*names, "p_ceiling", "p_midpoint"])
    adjusted = holm_adjust(np.concatenate([table["p_ceiling"], table["p_midpoint"]]).astype(float))
    return table.assign(p_ceiling_holm=adjusted[: len(table)], p_midpoint_holm=adjusted[len(table) :])


def _select_scored(frames: StudyFrames, arm: str, validations: pd.DataFrame) -> pd.DataFrame:
    return validations[validations["run_id"].isin(select_runs(frames, arm, scored_only=True)["run_id"])]


def _select_validations(frames: StudyFrames, arm: str, validations: pd.DataFrame, cost: str) -> Validations:
    rows = _select_scored(frames, arm, validations).dropna(subset=cost)
    tables = [rows.pivot_table(index="seed", columns="step", values=name) for name in (cost, "value", "episodes")]
    # A cost is missing where a run has no validation: there its number does not matter, but it must be one.
    costs, values, episodes = (table.to_numpy(dtype=float) for table in tables)
    return Validations(np.nan_to_num(costs, nan=1.0), np.round(values * episodes), np.nan_to_num(episodes, nan=1.0))


def _make_curve_row(cost: str, arm: str, curves: Mapping[str, CurveEstimates], baseline: str) -> Row:
    own, difference, ratio, refusal = curves[arm], Estimate(), Estimate(), curves[arm].refusal
    if arm != baseline and baseline in curves:
        difference, ratio, comparison_refusal = compare_curves(own, curves[baseline])
        refusal = refusal or comparison_refusal
    return {
        "cost": cost,
        "arm": arm,
        "seeds": own.ceiling.n,
        **make_estimate_columns("ceiling", own.ceiling),
        **make_estimate_columns("midpoint", own.midpoint),
        **make_estimate_columns("ceiling_difference", difference),
        **make_estimate_columns("midpoint_ratio", ratio),
        "p_ceiling": difference.p,
        "p_midpoint": ratio.p,
        "refusal": refusal,
    }

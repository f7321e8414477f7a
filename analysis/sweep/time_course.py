"""Time to collapse and learning curves of the arms of a sweep: secondary outcomes, with an interval or a refusal."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.data import compare
from analysis.data.frames import StudyFrames
from analysis.stats.curves import Validations, compare_curves, estimate_curve
from analysis.stats.estimates import Estimate, holm_adjust
from analysis.stats.events import EventTimes, compare_restricted_means, restricted_mean
from analysis.sweep.collapse import find_run_ends, make_validations

COSTS: Mapping[str, str] = {"total_optimizer_steps": "optimizer steps", "total_sampled_tokens": "sampled tokens"}
"""The columns that measure the cost of a validation, with their units."""
NUM_DRAWS = 200
"""Bootstrap samples of seeds per arm: enough to know standard errors to 5 %, in a second per arm."""
MIN_SEEDS_OF_INTERVAL = 6
"""A permutation test of fewer paired seeds cannot exclude any difference at 95 %."""


def make_costs(frames: StudyFrames) -> pd.DataFrame:
    """Add a column per cost of `COSTS`, which is 0 before training, to `make_validations`."""
    table = make_validations(frames)
    keys = pd.MultiIndex.from_frame(table[["run_id", "step"]])
    costs = frames.steps.set_index(["run_id", "step"])[list(COSTS)].astype(float).reindex(keys)
    table[list(COSTS)] = np.where(table[["step"]] == 0, 0.0, costs)
    return table


def summarize_collapse(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """Summarize the collapses of each arm: how many of its scored runs that could learn collapsed, and when.

    `sweep.collapse.find_run_ends` defines a collapse. mean_steps: mean number of planned steps without collapse
    (restricted mean). difference: minus the baseline's over common seeds, with an interval from `MIN_SEEDS_OF_INTERVAL`
    seeds on; p: from exchanging the runs of each seed; p_holm: corrected over the arms. note: why there is no interval.
    """
    baseline = compare.require_single_study(frames).studies[0].baseline
    ends = find_run_ends(frames)
    ends = ends[ends["status"].isin(compare.SCORED_STATUSES) & (ends["signal_problem"] == "")]
    times = {arm: ends[ends["arm"] == arm].set_index("seed").sort_index() for arm in compare.list_arms(frames)}
    horizon = float(frames.trials["steps_total"].dropna().min()) if frames.trials["steps_total"].notna().any() else 0.0
    outcomes = compare.collect_outcomes(frames, "late_val_success")
    rows = []
    for arm, table in times.items():
        events = table.loc[table["is_collapse"], "end_step"].to_list()
        estimate, note = Estimate(), ""
        if arm != baseline and baseline in times and len(table):
            estimate, note = _compare_times(table, times[baseline], horizon, generator)
            if outcomes.has_equal_rows(arm, baseline):
                estimate, note = Estimate(estimate.value, n=estimate.n), "every row equals the baseline's"
        steps_text = ", ".join(f"{step:g}" for step in sorted(events))
        mean_steps = restricted_mean(table["end_step"], table["is_collapse"], horizon)
        rows.append((arm, len(table), len(events), steps_text, mean_steps, *estimate[:4], estimate.p, note))
    names = ["arm", "runs", "collapsed", "collapse_steps", "mean_steps", "difference", "difference_low"]
    result = pd.DataFrame(rows, columns=[*names, "difference_high", "n", "p", "note"])
    return result.assign(p_holm=holm_adjust(result["p"]))


def _compare_times(
    arm: pd.DataFrame, baseline: pd.DataFrame, horizon: float, generator: np.random.Generator
) -> tuple[Estimate, str]:
    seeds = arm.index.intersection(baseline.index)
    arm_times, baseline_times = (
        EventTimes(table.loc[seeds, "end_step"], table.loc[seeds, "is_collapse"]) for table in (arm, baseline)
    )
    estimate = compare_restricted_means(arm_times, baseline_times, horizon, generator)
    if not math.isnan(estimate.low):
        return estimate, ""
    if not len(seeds):
        return estimate, "no seed in common with the baseline"
    runs = pd.concat([table.loc[seeds] for table in (arm, baseline)])
    if not runs["is_collapse"].any():
        # That all runs end at the same step is no evidence that later times would be equal.
        return estimate._replace(p=math.nan), "no run collapsed"
    if len(seeds) < MIN_SEEDS_OF_INTERVAL:
        return estimate, f"an interval needs {MIN_SEEDS_OF_INTERVAL} seeds"
    is_censored = (~runs["is_collapse"] & (runs["end_step"] < horizon)).any()
    return estimate, "a run ended early without a collapse" if is_censored else "the differences of all seeds are equal"


def summarize_curves(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """Estimate, per cost of `COSTS` and arm, the ceiling of its success and the cost at half of the gain.

    Columns: cost, arm, seeds, ceiling (success), midpoint (cost), ceiling_difference (minus the baseline),
    midpoint_ratio (divided by the baseline's; below 1 if the arm needs less), each with `_low` and `_high`; p_ceiling,
    p_midpoint, and both corrected together over all rows (`_holm`); refusal: why there is no curve or no comparison.
    Intervals need five seeds. A setting that moves the ceiling changes what is finally learned, a setting that moves
    the midpoint changes how fast. Empty without outcomes of single levels, which give the number of episodes.
    """
    validations = make_costs(frames).dropna(subset="episodes")
    baseline = compare.require_single_study(frames).studies[0].baseline
    outcomes = compare.collect_outcomes(frames, "late_val_success")
    copies = {arm for arm in compare.list_arms(frames) if outcomes.has_equal_rows(arm, baseline)}
    scored = validations[validations["status"].isin(compare.SCORED_STATUSES)]
    rows = []
    for cost in COSTS:
        curves = {}
        for arm, arm_rows in scored.dropna(subset=cost).groupby("arm", sort=False):
            # A cost is missing where a run has no validation: any number will do, but NaN will not.
            costs, values, episodes = (
                arm_rows.pivot_table(index="seed", columns="step", values=name).to_numpy(dtype=float)
                for name in (cost, "value", "episodes")
            )
            trials = np.nan_to_num(episodes, nan=1.0)
            points = Validations(np.nan_to_num(costs, nan=1.0), np.round(values * episodes), trials)
            curves[str(arm)] = estimate_curve(points, generator, NUM_DRAWS)
        for arm, curve in curves.items():
            difference, ratio, refusal = Estimate(), Estimate(), curve.refusal
            if arm != baseline and baseline in curves and arm not in copies:
                difference, ratio, comparison_refusal = compare_curves(curve, curves[baseline])
                refusal = refusal or comparison_refusal
            row = {"cost": cost, "arm": arm, "seeds": curve.ceiling.n}
            estimates = {"ceiling": curve.ceiling, "midpoint": curve.midpoint, "ceiling_difference": difference}
            for name, estimate in (estimates | {"midpoint_ratio": ratio}).items():
                row |= compare.make_estimate_columns(name, estimate)
            rows.append(row | {"p_ceiling": difference.p, "p_midpoint": ratio.p, "refusal": refusal})
    names = ["cost", "arm", "seeds", "ceiling", "midpoint", "ceiling_difference", "midpoint_ratio", "refusal"]
    table = pd.DataFrame(rows, columns=list(rows[0]) if rows else [*names, "p_ceiling", "p_midpoint"])
    adjusted = holm_adjust(np.concatenate([table["p_ceiling"], table["p_midpoint"]]).astype(float))
    return table.assign(p_ceiling_holm=adjusted[: len(table)], p_midpoint_holm=adjusted[len(table) :])

"""Tables that compare the arms of one study, with one row per arm or per run."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.data.compare import (
    SCORED_STATUSES,
    compute_auc,
    compute_outcomes,
    describe_basis,
    estimate_difference,
    estimate_gain,
    estimate_success,
    list_arms,
    require_single_study,
    select_runs,
)
from analysis.data.families import Row
from analysis.data.frames import SCHEMAS, StudyFrames, to_records
from analysis.stats.estimates import (
    Estimate,
    Trend,
    holm_adjust,
    page_trend_p_value,
    probability_of_improvement,
    spearman_trend,
    wilson_interval,
)
from analysis.stats.power import find_detectable_difference
from analysis.sweep.verdicts import classify_outcome, describe_stops, describe_unfinished, format_verdict
from trainable.runs.records import STATUSES
from trainable.runs.run_ends import OPEN_STATUSES

COST_COLUMNS = (
    "total_optimizer_steps",
    "total_env_steps",
    "total_sampled_tokens",
    "total_trained_tokens",
    "seconds_total",
)
_MEAN_COLUMNS = (
    "base_val_success",
    "base_val_greedy_success",
    "final_val_greedy_success",
    "final_val_success_unseen",
    "peak_val_success",
    "test_success",
    "test_greedy_success",
)
# Fraction of the length of a log axis: the marks and labels of closer values would overlap.
MIN_GAP_FRACTION = 0.05


def summarize_arms(frames: StudyFrames) -> pd.DataFrame:
    """One row per arm: statuses, success before and after, difference from the baseline arm, stops, costs, verdict.

    * Success columns are means over scored runs (completed, or stopped by a rule). Three of them have an interval:
      `final_val_success` (`final_low`, `final_high`), `gain` (minus the base policy) and `difference` (minus the
      baseline arm). `basis` says whether the interval is over seeds or levels.
    * `p_holm` is corrected over all compared arms. `detectable` is the smallest true difference that the test would
      probably have found.
    * `stopped_fraction` is the fraction of scored runs that a rule stopped, with Wilson's interval.
      `final_stopped_as_zero` is the mean final success with stopped runs counted as 0; `final_survivors` is the mean
      without them.
    * Costs are means over scored runs, or over all runs if none is scored.
    """
    baseline = require_single_study(frames).studies[0].get("baseline", "")
    # The columns of settings are not needed, and copying them for every arm takes time.
    frames = replace(frames, trials=frames.trials[list(SCHEMAS["trials"])])
    table = pd.DataFrame([_summarize_arm(frames, arm, baseline) for arm in list_arms(frames)])
    if table.empty:
        return table
    table["p_holm"] = holm_adjust(table["p"])
    comparisons = int(table["p"].notna().sum())
    table["detectable"] = [
        find_detectable_difference(se, df, comparisons) for se, df in zip(table["se"], table["df"], strict=True)
    ]
    rows = to_records(table)
    return table.assign(outcome=[classify_outcome(row) for row in rows], verdict=[format_verdict(row) for row in rows])


def _summarize_arm(frames: StudyFrames, arm: str, baseline: str) -> Row:
    runs, scored_runs = select_runs(frames, arm), select_runs(frames, arm, scored_only=True)
    counts = {status: int((runs["status"] == status).sum()) for status in (*STATUSES, *OPEN_STATUSES)}
    return {
        "arm": arm,
        "axis_value": float(runs["axis_value"].iloc[0]),
        "baseline": baseline,
        "is_baseline": arm == baseline,
        "runs": len(runs),
        **counts,
        **_summarize_success(frames, scored_runs),
        **_compare_to_baseline(frames, arm, scored_runs, baseline),
        **_summarize_stops(scored_runs),
        **_summarize_cost(frames, scored_runs if len(scored_runs) else runs),
        "stops": describe_stops(scored_runs),
        "unfinished": describe_unfinished(runs),
    }


def _summarize_success(frames: StudyFrames, scored_runs: pd.DataFrame) -> Row:
    final_success, sampled_gain, greedy_gain = (
        estimate_success(frames, scored_runs),
        estimate_gain(frames, scored_runs),
        estimate_gain(frames, scored_runs, "greedy"),
    )
    return {
        **{name: _mean(scored_runs[name]) for name in _MEAN_COLUMNS},
        "final_val_success": final_success.value,
        "final_low": final_success.low,
        "final_high": final_success.high,
        **_make_estimate_columns("gain", sampled_gain),
        "gain_basis": describe_basis(len(scored_runs)),
        **_make_estimate_columns("gain_greedy", greedy_gain),
        "auc": _mean(compute_auc(frames, scored_runs)),
    }


def _make_estimate_columns(name: str, estimate: Estimate) -> Row:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _mean(values: "pd.Series[float]") -> float:
    return float(values.mean()) if values.notna().any() else float("nan")


def _compare_to_baseline(frames: StudyFrames, arm: str, scored_runs: pd.DataFrame, baseline: str) -> Row:
    """Compare an arm with the baseline arm. Values are missing for the baseline itself."""
    baseline_runs = select_runs(frames, baseline, scored_only=True)
    estimate, seeds = (Estimate(), 0) if arm == baseline else estimate_difference(frames, scored_runs, baseline_runs)
    # Indexed by seed, so that the subtraction below pairs runs of one seed.
    arm_auc, baseline_auc = (compute_auc(frames, runs).set_axis(runs["seed"]) for runs in (scored_runs, baseline_runs))
    return {
        **_make_estimate_columns("difference", estimate),
        "se": estimate.se,
        "df": estimate.df,
        "p": estimate.p,
        "paired_seeds": seeds,
        "basis": describe_basis(seeds),
        "auc_difference": float("nan") if arm == baseline else _mean(arm_auc - baseline_auc),
        "improvement": float("nan") if arm == baseline else _compute_improvement(scored_runs, baseline_runs),
        "baseline_failed": bool(len(baseline_runs)) and bool((baseline_runs["status"] == "early_stopped").all()),
    }


def _compute_improvement(scored_runs: pd.DataFrame, baseline_runs: pd.DataFrame) -> float:
    return probability_of_improvement(compute_outcomes(scored_runs), compute_outcomes(baseline_runs))


def _summarize_stops(scored_runs: pd.DataFrame) -> Row:
    is_stopped = scored_runs["status"] == "early_stopped"
    estimate = wilson_interval(int(is_stopped.sum()), len(scored_runs)) if len(scored_runs) else Estimate()
    return {
        "stopped_fraction": estimate.value,
        "stopped_low": estimate.low,
        "stopped_high": estimate.high,
        "final_stopped_as_zero": _mean(compute_outcomes(scored_runs).mask(is_stopped, 0.0)),
        "final_survivors": _mean(compute_outcomes(scored_runs)[~is_stopped]),
    }


def _summarize_cost(frames: StudyFrames, runs: pd.DataFrame) -> Row:
    steps = frames.steps[frames.steps["run_id"].isin(runs["run_id"])]
    return {**{name: _mean(runs[name]) for name in COST_COLUMNS}, "kept_ratio": _mean(steps["kept_ratio"])}


def make_run_outcomes(frames: StudyFrames) -> pd.DataFrame:
    """One row per scored run: arm, seed, run_id, status, x (position in `make_dose_response`), outcome."""
    scored_runs = require_single_study(frames).trials[frames.trials["status"].isin(SCORED_STATUSES)]
    positions = dict(zip(*compute_axis_positions(frames)[:2], strict=True))
    table = scored_runs[["arm", "seed", "run_id", "status"]].reset_index(drop=True)
    return table.assign(x=[positions[arm] for arm in table["arm"]], outcome=compute_outcomes(scored_runs).to_numpy())


def compute_axis_positions(frames: StudyFrames) -> tuple[list[str], list[float], str]:
    """Arms, their positions on the x axis of a figure, and the scale: "log" or "rank".

    log: log10 of the value, with values of 0 or less separate on the left, and words such as nofilter on the right.
    rank: evenly spaced in the order of values. This scale is used if two values would be closer than a twentieth of the
    log axis, as 0.98 and 1.0 are, or if fewer than two values are positive.
    """
    names = list_arms(frames)
    values = [float(select_runs(frames, arm)["axis_value"].iloc[0]) for arm in names]
    positive = sorted({math.log10(value) for value in values if value > 0})
    span = positive[-1] - positive[0] if positive else 0.0
    gaps = np.diff(positive)
    scale = "log" if len(positive) > 1 and gaps.min() >= MIN_GAP_FRACTION * span else "rank"
    if scale == "rank":
        positive = [float(rank) for rank in range(len(positive))]
        span = float(max(len(positive) - 1, 1))
    # 0 and words are one mean gap away from the scale and from each other, but at least half a decade (or one rank).
    offset = max(span / max(len(positive) - 1, 1), 0.5 if scale == "log" else 1.0)
    return names, _compute_positions(values, positive, offset), scale


def _compute_positions(values: list[float], positive_positions: list[float], offset: float) -> list[float]:
    """The position of each value. positive_positions: those of the distinct positive values, in ascending order."""
    # Without a positive value, the scale shrinks to the position 0.
    left, right = (positive_positions[0] - offset, positive_positions[-1]) if positive_positions else (-offset, 0.0)
    positive_values = sorted({value for value in values if value > 0})
    nonpositive_values = sorted({value for value in values if value <= 0}, reverse=True)
    word_indices = [index for index, value in enumerate(values) if math.isnan(value)]

    def compute_position(index: int, value: float) -> float:
        if math.isnan(value):  # a word: right of the scale
            return right + offset * (1 + word_indices.index(index))
        if value > 0:
            return positive_positions[positive_values.index(value)]
        return left - offset * nonpositive_values.index(value)  # 0 and less: left of the scale

    return [compute_position(index, value) for index, value in enumerate(values)]


def make_dose_response(frames: StudyFrames) -> pd.DataFrame:
    """The table of the dose-response figure: one row per arm, with its position x and the interval of its success.

    Columns: arm, axis_value, x, scale, is_word (the arm is named by a word), runs, scored, early_stopped, success, low,
    high, basis, greedy, test, base, base_greedy (the policy before training: means over all runs of the study).
    """
    names, positions, scale = compute_axis_positions(require_single_study(frames))
    base, base_greedy = (_mean(frames.trials[name]) for name in ("base_val_success", "base_val_greedy_success"))
    rows = []
    for arm, x in zip(names, positions, strict=True):
        runs, scored_runs = select_runs(frames, arm), select_runs(frames, arm, scored_only=True)
        estimate, value = estimate_success(frames, scored_runs), float(runs["axis_value"].iloc[0])
        rows.append(
            {
                "arm": arm,
                "axis_value": value,
                "x": x,
                "scale": scale,
                "is_word": math.isnan(value),
                "runs": len(runs),
                "scored": len(scored_runs),
                "early_stopped": int((scored_runs["status"] == "early_stopped").sum()),
                "success": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "basis": describe_basis(len(scored_runs)),
                "greedy": _mean(scored_runs["final_val_greedy_success"]),
                "test": _mean(scored_runs["test_success"]),
                "base": base,
                "base_greedy": base_greedy,
            }
        )
    return pd.DataFrame(rows)


def compute_trend(frames: StudyFrames, generator: np.random.Generator) -> tuple[Trend, float]:
    """Spearman's trend of the outcome over the ordered axis, and Page's p if all arms have the same 2 or more seeds.

    Only scored runs count. Arms named by words such as nofilter have no position in the order and are left out.
    """
    runs = require_single_study(frames).trials
    runs = runs[runs["status"].isin(SCORED_STATUSES) & runs["axis_value"].notna()]
    runs = runs.assign(outcome=compute_outcomes(runs)).dropna(subset="outcome")
    table = runs.pivot_table(index="seed", columns="axis_value", values="outcome").sort_index(axis=1)
    # Page's test needs complete rows: every seed in every arm.
    page_p_value = (
        page_trend_p_value(table.to_numpy()) if len(table) and not table.isna().to_numpy().any() else float("nan")
    )
    return spearman_trend(runs["axis_value"], runs["outcome"], runs["seed"], generator), page_p_value

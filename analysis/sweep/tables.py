"""The tables of one study that compare its arms: one row an arm, or one a run."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED, arms, auc, basis, difference, gain, level, outcomes, runs_of, single
from analysis.data.families import Row
from analysis.data.frames import SCHEMAS, StudyFrames, records
from analysis.stats.estimates import (
    Estimate,
    Trend,
    detectable_difference,
    holm,
    page_trend,
    probability_of_improvement,
    spearman_trend,
    wilson,
)
from analysis.sweep.verdicts import outcome, stops, unfinished, verdict
from trainable.runs.records import STATUSES

COSTS = ("total_optimizer_steps", "total_env_steps", "total_sampled_tokens", "total_trained_tokens", "seconds_total")
_MEANS = (
    "base_val_success",
    "base_val_greedy_success",
    "final_val_greedy_success",
    "final_val_success_unseen",
    "peak_val_success",
    "test_success",
    "test_greedy_success",
)
CLOSE = 0.05


def arm_summary(frames: StudyFrames) -> pd.DataFrame:
    """One row an arm: statuses, success before and after, difference to the baseline arm, stops, costs, verdict.

    Success columns are means over scored runs (completed, or stopped by a rule). `final_val_success` has an interval
    (`final_low`, `final_high`), and so have `gain` (minus the base policy) and `difference` (minus the baseline arm);
    `basis` says over what. `p_holm` is adjusted over all arms that are compared. `stopped_share` is the share of scored
    runs that a rule stopped, with Wilson's interval. `final_stopped_as_zero` and `final_survivors` are the sensitivity
    of the mean to how a stopped run is scored: as 0, or left out. Costs are means over the scored runs.
    """
    baseline = single(frames).studies[0].get("baseline", "")
    frames = replace(frames, trials=frames.trials[list(SCHEMAS["trials"])])  # settings cost time and are not asked for
    table = pd.DataFrame([_arm(frames, arm, baseline) for arm in arms(frames)])
    if table.empty:
        return table
    table["p_holm"] = holm(table["p"])
    comparisons = int(table["p"].notna().sum())
    table["detectable"] = [detectable_difference(se, df, comparisons)
                           for se, df in zip(table["se"], table["df"], strict=True)]  # fmt: skip
    rows = records(table)
    return table.assign(outcome=[outcome(row) for row in rows], verdict=[verdict(row) for row in rows])


def _arm(frames: StudyFrames, arm: str, baseline: str) -> Row:
    runs, scored = runs_of(frames, arm), runs_of(frames, arm, scored=True)
    counts = {status: int((runs["status"] == status).sum()) for status in (*STATUSES, "running")}
    return {
        "arm": arm,
        "axis_value": float(runs["axis_value"].iloc[0]),
        "baseline": baseline,
        "is_baseline": arm == baseline,
        "runs": len(runs),
        **counts,
        **_success(frames, scored),
        **_compared(frames, arm, scored, baseline),
        **_stopped(scored),
        **_cost(frames, scored if len(scored) else runs),
        "stops": stops(scored),
        "unfinished": unfinished(runs),
    }


def _success(frames: StudyFrames, scored: pd.DataFrame) -> Row:
    final, learned, greedy = level(frames, scored), gain(frames, scored), gain(frames, scored, "greedy")
    return {
        **{name: _mean(scored[name]) for name in _MEANS},
        "final_val_success": final.value,
        "final_low": final.low,
        "final_high": final.high,
        **_named("gain", learned),
        "gain_basis": basis(len(scored)),
        **_named("gain_greedy", greedy),
        "auc": _mean(auc(frames, scored)),
    }


def _named(name: str, estimate: Estimate) -> Row:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _mean(values: "pd.Series[float]") -> float:
    return float(values.mean()) if values.notna().any() else float("nan")


def _compared(frames: StudyFrames, arm: str, scored: pd.DataFrame, baseline: str) -> Row:
    """The arm against the baseline arm; nothing for the baseline itself."""
    others = runs_of(frames, baseline, scored=True)
    found, seeds = (Estimate(), 0) if arm == baseline else difference(frames, scored, others)
    areas, theirs = (auc(frames, runs).set_axis(runs["seed"]) for runs in (scored, others))
    return {
        **_named("difference", found),
        "se": found.se,
        "df": found.df,
        "p": found.p,
        "paired_seeds": seeds,
        "basis": basis(seeds),
        "auc_difference": float("nan") if arm == baseline else _mean(areas - theirs),
        "improvement": float("nan") if arm == baseline else _improvement(scored, others),
        "baseline_failed": bool(len(others)) and bool((others["status"] == "early_stopped").all()),
    }


def _improvement(scored: pd.DataFrame, others: pd.DataFrame) -> float:
    return probability_of_improvement(outcomes(scored), outcomes(others))


def _stopped(scored: pd.DataFrame) -> Row:
    stopped = scored["status"] == "early_stopped"
    found = wilson(int(stopped.sum()), len(scored)) if len(scored) else Estimate()
    return {
        "stopped_share": found.value,
        "stopped_low": found.low,
        "stopped_high": found.high,
        "final_stopped_as_zero": _mean(outcomes(scored).mask(stopped, 0.0)),
        "final_survivors": _mean(outcomes(scored)[~stopped]),
    }


def _cost(frames: StudyFrames, runs: pd.DataFrame) -> Row:
    steps = frames.steps[frames.steps["run_id"].isin(runs["run_id"])]
    return {**{name: _mean(runs[name]) for name in COSTS}, "kept_ratio": _mean(steps["kept_ratio"])}


def run_outcomes(frames: StudyFrames) -> pd.DataFrame:
    """One row a scored run: arm, seed, run_id, status, x (its place in `dose_response`), outcome."""
    scored = single(frames).trials[frames.trials["status"].isin(SCORED)]
    places = dict(zip(*axis_places(frames)[:2], strict=True))
    table = scored[["arm", "seed", "run_id", "status"]].reset_index(drop=True)
    return table.assign(x=[places[arm] for arm in table["arm"]], outcome=outcomes(scored).to_numpy())


def axis_places(frames: StudyFrames) -> tuple[list[str], list[float], str]:
    """Arms, where each stands on the horizontal axis of a figure, and the scale: "log" or "rank".

    log: at log10 of the value, 0 (or less) apart to the left, words such as nofilter apart to the right. rank: evenly
    spaced by value, where two values would be closer than a twentieth of the axis, as 0.98 and 1.0 are.
    """
    names = arms(frames)
    values = [float(runs_of(frames, arm)["axis_value"].iloc[0]) for arm in names]
    positive = sorted({math.log10(value) for value in values if value > 0})
    span = positive[-1] - positive[0] if positive else 0.0
    gaps = np.diff(positive)
    scale = "log" if len(positive) > 1 and gaps.min() >= CLOSE * span else "rank"
    if scale == "rank":
        positive = [float(rank) for rank in range(len(positive))]
        span = float(max(len(positive) - 1, 1))
    apart = max(span / max(len(positive) - 1, 1), 0.5 if scale == "log" else 1.0)
    return names, _places(values, positive, apart, scale), scale


def _places(values: list[float], positive: list[float], apart: float, scale: str) -> list[float]:
    left, right = (positive[0] - apart, positive[-1]) if positive else (-apart, 0.0)
    rising = sorted({value for value in values if value > 0})
    below = sorted({value for value in values if value <= 0}, reverse=True)
    words = [index for index, value in enumerate(values) if math.isnan(value)]
    return [
        right + apart * (1 + words.index(index)) if math.isnan(value)
        else positive[rising.index(value)] if value > 0
        else left - apart * below.index(value)
        for index, value in enumerate(values)
    ]  # fmt: skip


def dose_response(frames: StudyFrames) -> pd.DataFrame:
    """The table behind the dose-response figure: one row an arm, with its place x and the interval of its success.

    Columns: arm, axis_value, x, scale, named, runs, scored, early_stopped, success, low, high, basis, greedy, test,
    base, base_greedy (means over all runs of the study: the policy before training).
    """
    names, places, scale = axis_places(single(frames))
    base, base_greedy = (_mean(frames.trials[name]) for name in ("base_val_success", "base_val_greedy_success"))
    rows = []
    for arm, x in zip(names, places, strict=True):
        runs, scored = runs_of(frames, arm), runs_of(frames, arm, scored=True)
        found, value = level(frames, scored), float(runs["axis_value"].iloc[0])
        rows.append({
            "arm": arm, "axis_value": value, "x": x, "scale": scale, "named": math.isnan(value), "runs": len(runs),
            "scored": len(scored), "early_stopped": int((scored["status"] == "early_stopped").sum()),
            "success": found.value, "low": found.low, "high": found.high, "basis": basis(len(scored)),
            "greedy": _mean(scored["final_val_greedy_success"]), "test": _mean(scored["test_success"]),
            "base": base, "base_greedy": base_greedy,
        })  # fmt: skip
    return pd.DataFrame(rows)


def trend(frames: StudyFrames, generator: np.random.Generator) -> tuple[Trend, float]:
    """Spearman's trend of the outcome over the ordered axis, and Page's p where every arm has the same 2 or more seeds.

    Over scored runs; words such as nofilter have no place in the order and are left out.
    """
    runs = single(frames).trials
    runs = runs[runs["status"].isin(SCORED) & runs["axis_value"].notna()]
    runs = runs.assign(outcome=outcomes(runs)).dropna(subset="outcome")
    table = runs.pivot_table(index="seed", columns="axis_value", values="outcome").sort_index(axis=1)
    page = page_trend(table.to_numpy()) if len(table) and not table.isna().to_numpy().any() else float("nan")
    return spearman_trend(runs["axis_value"], runs["outcome"], runs["seed"], generator), page

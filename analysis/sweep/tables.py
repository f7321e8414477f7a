"""Tables that compare the arms of one study, with one row per arm or per run."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import numpy as np
import pandas as pd
from scipy import special

from analysis.data import compare
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import Estimate, holm_adjust, spearman_trend
from analysis.sweep.planned_power import find_recorded_deviation, find_resolved_difference
from analysis.sweep.series import BUDGETS
from analysis.sweep.verdicts import (
    classify_outcome,
    describe_stops,
    describe_unfinished,
    describe_verdict,
    name_verdict,
)
from trainable.runs.records import STATUSES
from trainable.runs.study_record import OPEN_STATUSES, StudyRecord

_MEAN_COLUMNS = (
    *("base_val_success", "base_val_greedy_success", "final_val_success", "final_val_greedy_success"),
    *("mean_val_success", "final_val_success_unseen", "peak_val_success", "test_success", "test_greedy_success"),
)


def summarize_arms(frames: StudyFrames) -> pd.DataFrame:
    """Summarize each arm in a row: statuses, success before and after, difference from the baseline, stops, costs.

    * Success columns are means over scored runs (completed, or stopped by a rule). Three of them have an interval:
      `late_val_success` (`late_low`, `late_high`), `gain` (minus the base policy) and `difference` (minus the baseline
      arm). All intervals are about settings: their noise is the noise of runs with other seeds, estimated from all arms
      together (`analysis.stats.noise`). `basis` says which runs.
    * `p_holm` and `p_equal_holm` are corrected over all compared arms, as separate families. `margin` is the difference
      within which arms are equal. `detectable` is the smallest true difference that the test would probably find.
    * `levels_low` and `levels_high` are the interval of the difference for other levels, too.
    * `failed_stops` is the number of scored runs that a rule stopped as failures (`compare.find_failed_stops`).
      `other_scoring` says if the outcome would change with them scored 0 or left out.
    * Costs are means over scored runs, or over all runs if none is scored.
    """
    (study,) = compare.require_single_study(frames).studies
    baseline = study.baseline
    names = ("late_val_success", "base_val_success", "final_val_greedy_success", "base_val_greedy_success")
    late, base, greedy, base_greedy = (compare.collect_outcomes(frames, name) for name in names)
    base = replace(base, min_variances=compare.estimate_evaluation_variances(frames, before_training=True))
    margin = compare.get_margin(study, "late_val_success")
    level_variances = compare.estimate_level_variances(frames, baseline)
    baseline_stops = compare.find_failed_stops(compare.select_runs(frames, baseline, scored_only=True))
    baseline_failed = len(baseline_stops) > 0 and bool(baseline_stops.all())
    rows = []
    for arm in compare.list_arms(frames):
        gain, gain_greedy = compare.estimate_gain(late, base, arm), compare.estimate_gain(greedy, base_greedy, arm)
        row = {**_summarize_arm(frames, late, arm, baseline), **compare.make_estimate_columns("gain", gain)}
        row |= compare.make_estimate_columns("gain_greedy", gain_greedy)
        row |= _compare_to_baseline(late, arm, baseline, margin, level_variances.get(arm, math.nan))
        rows.append(row | {"baseline_failed": baseline_failed})
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    table["p_holm"], table["p_equal_holm"] = holm_adjust(table["p"]), holm_adjust(table["p_equal"])
    table["detectable"] = [_find_detectable_difference(study, late, row) for row in to_records(table)]
    table["outcome"] = [classify_outcome(row) for row in to_records(table)]
    table["other_scoring"] = _describe_other_scorings(frames, table, baseline)
    return table.assign(notes=[describe_verdict(row) for row in to_records(table)])


def _describe_other_scorings(frames: StudyFrames, table: pd.DataFrame, baseline: str) -> list[str]:
    """Describe, for each arm, how its outcome would change if failed runs were scored 0, or left out."""
    texts: dict[str, list[str]] = {arm: [] for arm in table["arm"]}
    if not table["failed_stops"].any():
        return [""] * len(table)
    scorings: tuple[compare.StopScoring, ...] = ("scored 0", "left out")
    for scoring in scorings:
        outcomes = compare.collect_outcomes(frames, "late_val_success", scoring)
        rows = [compare.compare_with_baseline(outcomes, arm, baseline, table["margin"].iloc[0]) for arm in table["arm"]]
        other = pd.DataFrame(rows).assign(outcome=table["outcome"], arm=table["arm"])
        other = other.assign(p_holm=holm_adjust(other["p"]), p_equal_holm=holm_adjust(other["p_equal"]))
        for row in to_records(other):
            outcome = compare.classify_difference(row, below="worse", above="better")
            if row["outcome"] in ("better", "worse", "equal", "open") and outcome != row["outcome"]:
                word = outcome.replace("no comparison", "without a comparison")
                texts[row["arm"]].append(f"{word} with the stopped runs of all arms {scoring}")
    return [" and ".join(clauses) for clauses in texts.values()]


def _find_detectable_difference(study: StudyRecord, outcomes: compare.Outcomes, row: Row) -> float:
    """Find the true difference from the baseline that an arm's seeds would resolve; NaN if unknown.

    As planned, with the noise of recorded runs, or else of the study; if one of the two arms stands out, with the noise
    of their difference.
    """
    pool, num_seeds = outcomes.noise.paired, int(row["seeds"])
    is_testable = row["se"] > 0 and compare.is_paired(outcomes, row["arm"], row["baseline"])
    # With a test at every look, the detectable difference depends on how many looks follow.
    if outcomes.num_comparisons or pool is None or not is_testable:
        return math.nan
    deviation = find_recorded_deviation(study)
    if max(outcomes.get_doubts(row["arm"], row["baseline"])) > 0:
        deviation = row["se"] * math.sqrt(num_seeds / 2)
    elif math.isnan(deviation):
        deviation = math.sqrt(pool.variance)
    return find_resolved_difference(study, num_seeds, deviation)


def compare_outcomes(frames: StudyFrames, columns: Iterable[str]) -> pd.DataFrame:
    """Compare each arm with the baseline in several outcomes: a row each; empty without the baseline.

    Columns: arm, column, baseline, those of a test (`compare.TEST_COLUMNS`), n, basis (what the interval is over),
    p_holm, p_equal_holm, verdict. p is corrected over the arms for the primary outcome, and over all other rows
    together.
    """
    (study,), (family,) = compare.require_single_study(frames).studies, frames.families
    arms = compare.list_arms(frames)
    rows = []
    for column in columns if study.baseline in arms else ():
        outcomes, margin = compare.collect_outcomes(frames, column), compare.get_margin(study, column)
        for arm in [name for name in arms if name != study.baseline]:
            row = compare.compare_with_baseline(outcomes, arm, study.baseline, margin)
            rows.append({"arm": arm, "column": column, "baseline": study.baseline, **row, "n": row["seeds"]})
    table = pd.DataFrame(rows, columns=["arm", "column", "baseline", *compare.TEST_COLUMNS, "n", "basis"])
    table = compare.add_adjusted_p_values(table, family.primary_column)
    return table.assign(verdict=[name_verdict(row, family) for row in to_records(table)])


def _summarize_arm(frames: StudyFrames, outcomes: compare.Outcomes, arm: str, baseline: str) -> Row:
    runs, scored_runs = compare.select_runs(frames, arm), compare.select_runs(frames, arm, scored_only=True)
    paid_runs = scored_runs if len(scored_runs) else runs
    late = compare.cut_interval(compare.estimate_mean(outcomes, arm), 0.0, 1.0)
    return {
        "arm": arm,
        "axis_value": float(runs["axis_value"].iloc[0]),
        "baseline": baseline,
        "is_baseline": arm == baseline,
        "runs": len(runs),
        **{status: int((runs["status"] == status).sum()) for status in (*STATUSES, *OPEN_STATUSES)},
        **{name: scored_runs[name].mean() for name in _MEAN_COLUMNS},
        "late_val_success": late.value,
        "late_low": late.low,
        "late_high": late.high,
        "late_basis": compare.describe_basis(outcomes, late, outcomes.get_doubt(outcomes.noise.unpaired, arm)),
        "failed_stops": int(compare.find_failed_stops(scored_runs).sum()),
        **{name: paid_runs[name].mean() for name in BUDGETS},
        "kept_ratio": frames.steps.loc[frames.steps["run_id"].isin(paid_runs["run_id"]), "kept_ratio"].mean(),
        "stops": describe_stops(scored_runs),
        "unfinished": describe_unfinished(runs),
    }


def _compare_to_baseline(
    outcomes: compare.Outcomes, arm: str, baseline: str, margin: float, level_variance: float
) -> Row:
    """Compare an arm with the baseline arm. Values are missing for the baseline itself."""
    row = compare.compare_with_baseline(outcomes, arm, baseline, margin)
    # A test at every look has no standard error to which the variance of levels could be added.
    level_variance = math.nan if outcomes.num_comparisons else level_variance
    half_width = special.stdtrit(row["df"], 0.975) * math.sqrt(row["se"] ** 2 + level_variance)
    return {
        **row,
        "levels_low": float(np.maximum(row["difference"] - half_width, -1.0)),
        "levels_high": float(np.minimum(row["difference"] + half_width, 1.0)),
    }


def make_run_outcomes(frames: StudyFrames) -> pd.DataFrame:
    """Make a row per scored run: arm, seed, run_id, status, x (position in `make_dose_response`), outcome."""
    scored_runs = compare.require_single_study(frames).trials[frames.trials["status"].isin(compare.SCORED_STATUSES)]
    positions = dict(zip(compare.list_arms(frames), compute_axis_positions(frames), strict=True))
    table = scored_runs[["arm", "seed", "run_id", "status"]].reset_index(drop=True)
    return table.assign(x=[positions[arm] for arm in table["arm"]], outcome=scored_runs["late_val_success"].to_numpy())


def compute_axis_positions(frames: StudyFrames) -> list[float]:
    """Compute the position of each arm on the x axis of a figure: evenly spaced in the order of values, then words."""
    values = [float(compare.select_runs(frames, arm)["axis_value"].iloc[0]) for arm in compare.list_arms(frames)]
    known = sorted({value for value in values if not math.isnan(value)})
    word_places = count(len(known))
    return [float(next(word_places) if math.isnan(value) else known.index(value)) for value in values]


def make_dose_response(frames: StudyFrames, summary: pd.DataFrame) -> pd.DataFrame:
    """Make the table of the dose-response figure: a row per arm, with its position x and an interval of its success.

    Columns: arm, tick (the label of x), axis_value, x, is_word (the arm is named by a word), runs, scored,
    early_stopped (as failures), success, low, high, basis, greedy, test, base, base_greedy (the policy before training:
    means over all runs of the study). summary: from `summarize_arms`, with a row per arm in the same order.
    """
    if summary.empty:
        return summary
    is_word = summary["axis_value"].isna()
    names = {"failed_stops": "early_stopped", "late_val_success": "success", "late_low": "low", "late_high": "high"}
    names |= {"late_basis": "basis", "final_val_greedy_success": "greedy", "test_success": "test"}
    return (
        summary[["arm", "axis_value", "runs", *names]]
        .rename(columns=names)
        .assign(
            # The name of a numeric arm may be preceded by the name of its setting.
            tick=summary["arm"].where(is_word, summary["arm"].str.rpartition(" ")[2]),
            x=compute_axis_positions(compare.require_single_study(frames)),
            is_word=is_word,
            scored=summary["completed"] + summary["early_stopped"],
            base=frames.trials["base_val_success"].mean(),
            base_greedy=frames.trials["base_val_greedy_success"].mean(),
        )
    )


def compute_trend(frames: StudyFrames, generator: np.random.Generator) -> Estimate:
    """Compute Spearman's trend of the outcome over the axis, with p from exchanging the runs of each seed.

    Only scored runs count. Arms named by words such as nofilter have no position in the order and are left out.
    """
    runs = compare.require_single_study(frames).trials
    runs = runs[runs["status"].isin(compare.SCORED_STATUSES)].dropna(subset=["axis_value", "late_val_success"])
    return spearman_trend(runs["axis_value"], runs["late_val_success"], runs["seed"], generator)

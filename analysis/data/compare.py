"""Scoring: the outcome of a run, the scored runs of an arm, and the difference between two sets of runs."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.stats.estimates import (
    Estimate,
    area_under_curve,
    difference_over_levels,
    fraction_over_levels,
    mean_over_seeds,
)

SCORED_STATUSES = ("completed", "early_stopped")
# From this many seeds on, intervals are over seeds; below, over levels (see `analysis.stats.estimates`).
MIN_SEEDS = 3


class EvalPoint(NamedTuple):
    """An evaluation of a run after `step` training steps. Step 0 is the policy before training."""

    run_id: str
    step: int


def require_single_study(frames: StudyFrames) -> StudyFrames:
    """Return `frames` if they contain exactly one study. Otherwise raise a ValueError that lists the studies."""
    study_names = [study["name"] for study in frames.studies]
    if len(study_names) != 1:
        raise ValueError(
            f"These frames contain {len(study_names)} studies ({', '.join(study_names)}). Select one: "
            "frames.select_study(NAME)."
        )
    return frames


def list_arms(frames: StudyFrames) -> list[str]:
    """The arms of the study, in the order of study.json."""
    return list(dict.fromkeys(frames.trials["arm"]))


def select_runs(frames: StudyFrames, arm: str, *, scored_only: bool = False) -> pd.DataFrame:
    """Rows of `trials` of one arm, without settings.

    scored_only: leave out runs that neither completed nor were stopped by a rule.
    """
    runs = frames.runs[frames.runs["arm"] == arm]
    return runs[runs["status"].isin(SCORED_STATUSES)] if scored_only else runs


def compute_outcomes(runs: pd.DataFrame) -> "pd.Series[float]":
    """The estimand of each run: sampled success at its last validation.

    A run stopped by a rule keeps its last value; a run stopped before its first validation has the base policy's value.
    """
    return runs["final_val_success"].fillna(runs["base_val_success"])


def describe_basis(num_seeds: int) -> str:
    """The population that an interval covers, in words: seeds, or the levels of these runs. Empty without a seed."""
    if num_seeds >= MIN_SEEDS:
        return f"over {num_seeds} seeds"
    runs_text = "this one run" if num_seeds == 1 else f"these {num_seeds} runs"
    return f"over the levels of {runs_text}; says nothing about other seeds" if num_seeds else ""


def collect_level_outcomes(
    frames: StudyFrames, runs: pd.DataFrame, mode: str = "sampled"
) -> dict[EvalPoint, pd.DataFrame]:
    """Success on each level at the first and last validation of each run; see `StudyFrames.validations`."""
    return {
        EvalPoint(run_id, step): levels
        for run_id in sorted(runs["run_id"])
        for step, levels in frames.validations.get((run_id, mode), {}).items()
    }


def find_last_points(points: Iterable[EvalPoint]) -> dict[str, EvalPoint]:
    """The last evaluation of each run."""
    # Points sort by run and step, so the last step of a run overwrites its earlier ones.
    return {point.run_id: point for point in sorted(points)}


def estimate_success(frames: StudyFrames, runs: pd.DataFrame) -> Estimate:
    """Mean outcome of an arm's scored runs.

    With 3 or more seeds, the interval is a t interval over seeds, cut to [0, 1]. With fewer, it is Wilson's over
    levels.
    """
    if len(runs) >= MIN_SEEDS:
        estimate = mean_over_seeds(compute_outcomes(runs))
        # Near 0 or 1 a t interval exceeds the range that a success rate can have.
        return estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))
    level_outcomes = collect_level_outcomes(frames, runs)
    final_points = find_last_points(level_outcomes)
    # A run without outcomes of single levels would be missing from the interval: report the mean alone.
    if not final_points or len(final_points) < len(runs):
        return Estimate(float(compute_outcomes(runs).mean()))
    episodes = pd.concat([level_outcomes[point] for point in final_points.values()])
    return fraction_over_levels(episodes["success"], episodes["cluster"])


def estimate_difference(frames: StudyFrames, runs: pd.DataFrame, baseline_runs: pd.DataFrame) -> tuple[Estimate, int]:
    """Outcome of `runs` minus that of `baseline_runs`, paired by seed, and the number of seeds that both have.

    With 3 or more common seeds the interval is over seeds, with fewer over the levels of the paired runs. Without a
    common seed the estimate is empty. Without outcomes of single levels it has no interval.
    """
    # Runs of one seed share levels and random streams, so their difference is less noisy than that of two means.
    paired_runs, paired_baseline_runs = runs.set_index("seed"), baseline_runs.set_index("seed")
    seeds = [seed for seed in paired_runs.index if seed in paired_baseline_runs.index]
    paired_runs, paired_baseline_runs = paired_runs.loc[seeds], paired_baseline_runs.loc[seeds]
    per_seed = compute_outcomes(paired_runs) - compute_outcomes(paired_baseline_runs)
    if len(seeds) >= MIN_SEEDS:
        return mean_over_seeds(per_seed), len(seeds)
    all_runs = pd.concat([paired_runs, paired_baseline_runs])
    level_outcomes = collect_level_outcomes(frames, all_runs)
    final_points = find_last_points(level_outcomes)
    # Levels of only some of the pairs would give an interval for another difference: report the mean alone.
    if any(run_id not in final_points for run_id in all_runs["run_id"]):
        return Estimate(float(per_seed.mean())), len(seeds)
    pairs = [
        (final_points[a], final_points[b])
        for a, b in zip(paired_runs["run_id"], paired_baseline_runs["run_id"], strict=True)
    ]
    return estimate_paired_difference(level_outcomes, pairs), len(seeds)


def estimate_gain(frames: StudyFrames, runs: pd.DataFrame, mode: str = "sampled") -> Estimate:
    """Validation success at the end minus before training, for the same runs.

    With 3 or more seeds the interval is over seeds, with fewer over levels. Without outcomes of single levels the
    estimate has no interval.
    """
    final_success = compute_outcomes(runs) if mode == "sampled" else runs["final_val_greedy_success"]
    base_success = runs["base_val_success" if mode == "sampled" else "base_val_greedy_success"]
    per_seed = (final_success - base_success).dropna()
    if len(per_seed) >= MIN_SEEDS:
        return mean_over_seeds(per_seed)
    # Each run is paired with itself before training (step 0), level by level.
    level_outcomes = collect_level_outcomes(frames, runs.loc[per_seed.index], mode)
    pairs = [(point, EvalPoint(point.run_id, step=0)) for point in find_last_points(level_outcomes).values()]
    # As in `estimate_difference`: without levels of every run, before and after training, there is no interval.
    if len(per_seed) == 0 or len(pairs) < len(per_seed) or any(base not in level_outcomes for _, base in pairs):
        return Estimate(float(per_seed.mean()) if len(per_seed) else float("nan"))
    return estimate_paired_difference(level_outcomes, pairs)


def estimate_paired_difference(
    level_outcomes: Mapping[EvalPoint, pd.DataFrame], pairs: list[tuple[EvalPoint, EvalPoint]]
) -> Estimate:
    """Difference between the evaluations of each pair, first minus second, over their levels.

    level_outcomes: from `collect_level_outcomes`. Levels that one evaluation of a pair lacks are left out. Pairs share
    clusters: a level that two seeds play is one level, not two independent ones.
    """
    if not pairs:
        return Estimate()
    # Subtraction aligns the two evaluations by level; a level that only one of them has becomes NaN.
    differences = pd.concat([(level_outcomes[a]["success"] - level_outcomes[b]["success"]).dropna() for a, b in pairs])
    clusters = pd.concat([level_outcomes[a]["cluster"] for a, _ in pairs])
    # A level occurs once per pair but has one cluster: keep one entry per level, then look up every difference.
    return difference_over_levels(differences, clusters[~clusters.index.duplicated()].loc[differences.index])


def compute_auc(frames: StudyFrames, runs: pd.DataFrame) -> "pd.Series[float]":
    """The secondary estimand of each run: mean height of its validation curve from step 0 to `steps_total`.

    A run stopped by a rule keeps its last value up to `steps_total`.
    """
    run_rows = to_records(runs[["run_id", "base_val_success", "steps_total"]])
    areas = [
        _compute_run_auc(frames.get_run_steps(run["run_id"])[["step", "val_success"]].dropna(), run) for run in run_rows
    ]
    return pd.Series(areas, index=runs.index, dtype="float64")


def _compute_run_auc(validations: pd.DataFrame, run: Mapping[str, Any]) -> float:
    # Validation before training is optional. Without it the curve starts at the first validation.
    base_values = [] if np.isnan(run["base_val_success"]) else [run["base_val_success"]]
    eval_steps = [0] * len(base_values) + validations["step"].to_list()
    # Without a recorded length, the curve ends at its last validation.
    end_step = max(eval_steps, default=0) if pd.isna(run["steps_total"]) else run["steps_total"]
    return area_under_curve(eval_steps, base_values + validations["val_success"].to_list(), end_step)

"""Compute what a number of seeds can resolve, for both the plan of a study and its report.

The power of a verdict has no formula, because the noise of a comparison is estimated from all arms as far as they agree
(`analysis.stats.noise`). So studies are simulated, and each is judged as the report does. The same draws serve every
difference and every noise, since scaling all outcomes of a study does not change its verdict.
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from scipy import special

from analysis.data.compare import SIGNIFICANCE_LEVEL, get_margin
from analysis.data.replicates import find_recorded_values
from analysis.data.schemas import Row, get_family
from analysis.stats.estimates import MIN_SEEDS, Estimate
from analysis.stats.noise import ARM_DOUBT, blend_variances, compute_doubt
from analysis.stats.sequential import find_fewest_seeds
from trainable.runs.study_record import StudyRecord

MAX_SUGGESTED_SEEDS = 20
POWER = 0.8
_NUM_STUDIES = 4000
_MAX_ARMS = 24
"""Maximum number of arms of a simulated study: more would change Holm's factor, but hardly the noise estimate."""


def find_recorded_deviation(study: StudyRecord) -> float:
    """Compute the standard deviation of the baseline's recorded runs in the primary outcome; NaN if there are none."""
    values = find_recorded_values(study, get_family(study).primary_column)
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


@cache
def compute_resolved_ratio(num_arms: int, num_seeds: int) -> float:
    """Simulate which difference is resolved with a probability of `POWER`, in standard deviations of runs.

    One arm of `num_arms` differs from the baseline by it, all runs are equally noisy, and the test is the first and
    strictest step of Holm's method. Infinite below `MIN_SEEDS`, where nothing is resolved, and NaN with fewer than two
    arms.
    """
    if num_arms < 2:
        return math.nan
    if num_seeds < MIN_SEEDS:
        return math.inf
    drawn_arms = min(num_arms, _MAX_ARMS)
    y = np.random.default_rng(0).normal(size=(_NUM_STUDIES, drawn_arms, num_seeds))
    differences = y[:, 1] - y[:, 0]
    own_variance = differences.var(axis=1, ddof=1) / 2
    # In place, since these are the largest arrays.
    residuals = y - y.mean(axis=1, keepdims=True)
    residuals -= y.mean(axis=2, keepdims=True)
    residuals += y.mean(axis=(1, 2), keepdims=True)
    residuals *= residuals
    squares, df = residuals.sum(axis=(1, 2)), (drawn_arms - 1) * (num_seeds - 1)
    doubts = [
        compute_doubt(_compute_prominence(y, arm, squares, df), *limits) for arm, limits in ((0, ()), (1, (ARM_DOUBT,)))
    ]
    variance, dfs = blend_variances(own_variance, num_seeds - 1, squares / df, df, np.maximum(*doubts))
    critical_t = -special.stdtrit(dfs, SIGNIFICANCE_LEVEL / 2 / (num_arms - 1))
    # For each study, the smallest true difference that it would resolve.
    needed = critical_t * np.sqrt(2 * variance / num_seeds) - differences.mean(axis=1)
    return float(np.quantile(needed, POWER))


def _compute_prominence(y: Any, arm: int, squares: Any, df: int) -> Any:
    """Compute `Pool.prominence` of an arm in complete studies (N, A, S), given their sums of squared residuals (N,)."""
    _, num_arms, num_seeds = y.shape
    if num_arms < 3:
        return np.zeros(len(y))
    deviation = y[:, arm] - np.delete(y, arm, axis=1).mean(axis=1)
    extra_df = num_seeds - 1
    extra = deviation.var(axis=1, ddof=1) * extra_df / (1 + 1 / (num_arms - 1))
    return special.fdtr(extra_df, df - extra_df, extra / extra_df / ((squares - extra) / (df - extra_df)))


def find_resolved_difference(study: StudyRecord, num_seeds: int, deviation: float | None = None) -> float:
    """Find the smallest true difference from the baseline that is resolved with a probability of `POWER`.

    num_seeds: per arm, common to arm and baseline. deviation: standard deviation between runs; None takes it from the
    recorded runs. NaN if the noise is unknown or nothing is compared, and infinite below `MIN_SEEDS` seeds.
    """
    sd = find_recorded_deviation(study) if deviation is None else deviation
    return sd * compute_resolved_ratio(len(study.axis.values), num_seeds)


def find_noise_floors(deviation: Estimate, seed_counts: Iterable[int]) -> list[Row]:
    """Find the least difference of two arms that each number of seeds resolves with a probability of `POWER`.

    deviation: of one run, with its interval (`estimate_deviation`), from which `low` and `high` follow; all three are
    infinite below `MIN_SEEDS`.
    """
    ratios = {count: compute_resolved_ratio(2, count) for count in seed_counts}
    return [
        {
            "seeds": count,
            "difference": ratio * deviation.value,
            "low": ratio * deviation.low,
            "high": ratio * deviation.high,
        }
        for count, ratio in ratios.items()
    ]


def describe_power(study: StudyRecord) -> str:
    """Describe in one line what the planned seeds resolve; empty if the study has nothing to compare."""
    num_seeds, num_arms = len(study.seeds), len(study.axis.values)
    if num_arms < 2 or not study.baseline:
        return ""
    if study.max_seeds is not None:
        return (
            f"Power: seeds are added to open arms, up to {study.max_seeds} per arm; the test at every look can "
            f"decide from {find_fewest_seeds(num_arms - 1)} seeds on"
        )
    column = get_family(study).primary_column
    if num_seeds < MIN_SEEDS:
        few = "one seed is" if num_seeds == 1 else "two seeds are"
        text = f"Power: {few} too few to call an arm better, worse or equal"
    elif math.isnan(difference := find_resolved_difference(study, num_seeds)):
        return "Power: not known before the runs, because no similar runs are recorded; it is estimated from the runs"
    else:
        text = (
            f"Power: {num_seeds} seeds per arm detect a difference of {difference:.2g} in {column} with a probability "
            f"of {100 * POWER:.0f} % ({num_arms - 1} comparison{'s' if num_arms > 2 else ''}, noise of recorded runs)"
        )
    margin = get_margin(study, column)
    counts = range(MIN_SEEDS, MAX_SUGGESTED_SEEDS + 1)
    enough = next((count for count in counts if find_resolved_difference(study, count) <= margin), None)
    if enough is None or enough <= num_seeds:
        return text
    return f"{text}; to detect {margin:g}, type --seeds {enough}"

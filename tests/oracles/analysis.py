"""Slow, literal versions of what analysis/stats and analysis/sweep/contrasts.py compute."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats

from analysis.stats.noise import Noise


def holm(p: Sequence[float]) -> list[float]:
    """The smallest overall level at which Holm's step-down procedure rejects each hypothesis."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    adjusted = [0.0] * len(p)
    for rank, index in enumerate(order):
        needed = [(len(p) - earlier) * p[order[earlier]] for earlier in range(rank + 1)]
        adjusted[index] = min(1.0, max(needed))
    return adjusted


def area(steps: Sequence[float], values: Sequence[float], until: float, cells: int = 20_000) -> float:
    """Mean of the piecewise linear curve, constant after its last point, over the midpoints of many cells."""
    midpoints = steps[0] + (until - steps[0]) * (np.arange(cells) + 0.5) / cells
    return float(np.mean(np.interp(midpoints, steps, values)))


def survival(ends: Sequence[int], stopped: Sequence[bool], step: int) -> float:
    """Product over every step up to `step` of the share of runs still followed that are not stopped at it."""
    survival_fraction = 1.0
    for current_step in range(1, step + 1):
        n_followed = sum(end >= current_step for end in ends)
        n_stopped = sum(end == current_step and stop for end, stop in zip(ends, stopped, strict=True))
        survival_fraction *= 1 - n_stopped / n_followed if n_followed else 1.0
    return survival_fraction


def compute_contrast(
    values: dict[tuple[str, int], float], pairs: list[list[str]], noise: Noise, confidence_level: float = 0.95
) -> dict[str, float]:
    """Compute a contrast seed by seed. `values` has the outcome of a scored run by arm and seed, or NaN."""
    by_seed: dict[int, list[float]] = {}
    weights: dict[int, dict[str, int]] = {}
    used_pairs: set[tuple[str, str]] = set()
    for first, second in pairs:
        for seed in sorted({seed for _, seed in values}):
            difference = values.get((first, seed), math.nan) - values.get((second, seed), math.nan)
            if difference == difference:
                used_pairs.add((first, second))
                by_seed.setdefault(seed, []).append(difference)
                arm_weights = weights.setdefault(seed, {})
                arm_weights[first] = arm_weights.get(first, 0) + 1
                arm_weights[second] = arm_weights.get(second, 0) - 1
    seed_differences = [round(statistics.fmean(numbers), 9) for numbers in by_seed.values()]
    n = len(seed_differences)
    center = statistics.fmean(seed_differences) if seed_differences else math.nan
    expected: dict[str, float] = {
        "difference": center,
        "difference_low": math.nan,
        "difference_high": math.nan,
        "p": math.nan,
        "seeds": n,
        "pairs_used": len(used_pairs),
    }
    # The variance of a seed's number is that of a run, times the sum of the squared weights of the arms.
    norms = [
        sum((count / len(by_seed[seed])) ** 2 for count in arm_weights.values())
        for seed, arm_weights in weights.items()
    ]
    if not sum(norms):
        return expected
    norm = statistics.fmean(norms)
    own_variance = statistics.variance(seed_differences) / norm if n > 1 else 0.0
    # The arms that take part, and how far the one that stands out most is doubted.
    involved = {name for pair in pairs for name in pair if any((name, seed) in values for seed in by_seed)}
    variance, df = (own_variance, n - 1.0)
    if noise.paired is not None:
        order = sorted({arm for arm, _ in values})
        prominence = max(noise.paired.prominence[order.index(arm)] for arm in involved)
        doubt = 1.0 if n == 2 else min(max((prominence - 0.6) / 0.35, 0.0), 1.0)
        pooled, pool_df = noise.paired.variance, noise.paired.df
        variance, df = pooled, pool_df
        if n > 1:
            variance = max(pooled, own_variance) ** (1 - doubt) * own_variance**doubt
            df = pool_df ** (1 - doubt) * (n - 1) ** doubt
    if not (variance > 0 and df > 0):
        return expected
    standard_error = math.sqrt(norm * variance / n)
    half_width = standard_error * stats.t.ppf(0.5 + confidence_level / 2, df)
    p = 2 * (1 - stats.t.cdf(abs(center) / standard_error, df))
    p = p if n >= 3 else math.nan  # fewer seeds have no test
    return expected | {"difference_low": center - half_width, "difference_high": center + half_width, "p": p}

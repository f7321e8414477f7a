"""Statistics of a sweep: functions from arrays to estimates with intervals. Random generators are arguments.

Outcomes are compared at the end of a run, or by the mean height of a curve. Peaks are never compared, because the best
of several noisy validations is biased upward. `analysis.stats.noise` compares arms with the noise of all runs; the t
intervals here use only the numbers that they are given.

`scipy.stats` takes as long to import as everything else that `analysis` needs, so only the functions that use it import
it. Distributions come from `scipy.special`, on which `scipy.stats` is built too; outside of a support it returns NaN.
"""

import math
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Floats = NDArray[np.float64]
NAN = float("nan")
CONFIDENCE_LEVEL = 0.95
"""Confidence level of every interval, unless a caller passes another one."""
MIN_SEEDS = 3
"""Smallest number of values on which alone an interval may be based."""
MAX_EXACT_RUNS = 7
"""7! = 5040 permutations are fewer than the random ones drawn otherwise."""


class Estimate(NamedTuple):
    """A number with its interval; NaN where there is none.

    n: number of units that the interval is over (seeds, clusters of levels). se, df: standard error and degrees of
    freedom of a t interval. p: two-sided, for the hypothesis that the true value is 0.
    """

    value: float = NAN
    low: float = NAN
    high: float = NAN
    n: int = 0
    se: float = NAN
    df: float = NAN
    p: float = NAN


def wilson_interval(successes: int, n: int) -> Estimate:
    """Compute Wilson's score interval of a fraction of n independent trials; n = 0: (NaN, 0, 1).

    Interval: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Source: Wilson 1927.
    """
    if n == 0:
        return Estimate(low=0.0, high=1.0)
    z = float(special.ndtri(0.5 + CONFIDENCE_LEVEL / 2))
    fraction = successes / n
    center = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At a fraction of 0 or 1 one bound equals the fraction, and rounding can put it on the wrong side.
    low, high = min(fraction, center - half_width), max(fraction, center + half_width)
    return Estimate(fraction, max(0.0, low), min(1.0, high), n=n)


def mean_over_seeds(per_seed: ArrayLike, confidence_level: float = CONFIDENCE_LEVEL, *, min_seeds: int = 2) -> Estimate:
    """Estimate the mean of one number per seed (n,), such as a paired difference, with Student's t interval.

    There is no interval if n < `min_seeds`, or if all numbers are equal: zero width would claim more than a few seeds
    can show.
    """
    values = np.asarray(per_seed, dtype=float)
    mean = float(values.mean()) if values.size else NAN
    # Equal up to rounding of their mean.
    if values.size < min_seeds or np.ptp(values) <= 1e-12 * np.abs(values).max():
        return Estimate(mean, n=values.size)
    squared_error = float(values.var(ddof=1)) / values.size
    return make_estimate(mean, squared_error, values.size - 1, values.size, confidence_level)


def make_estimate(
    value: float, squared_error: float, df: float, n: int, confidence_level: float = CONFIDENCE_LEVEL
) -> Estimate:
    """Make the t interval and the two-sided p of a value; none if its squared standard error or df is 0 or missing."""
    if not (squared_error > 0 and df > 0):
        return Estimate(value, n=n)
    se = math.sqrt(squared_error)
    half_width = float(special.stdtrit(df, 0.5 + confidence_level / 2)) * se
    p = 2 * float(special.stdtr(df, -abs(value) / se))
    return Estimate(value, value - half_width, value + half_width, n, se, df, p)


def estimate_deviation(values: ArrayLike) -> Estimate:
    """Estimate the standard deviation of normal numbers (n,), n > 1, with its chi-square interval.

    s^2 = sum (y - mean)^2 / (n - 1), from s sqrt((n - 1) / q_0.975) to s sqrt((n - 1) / q_0.025), where q are quantiles
    of chi-square with n - 1 degrees of freedom.

    >>> [round(number, 3) for number in estimate_deviation([1.0, 2.0, 3.0])[:3]]
    [1.0, 0.521, 6.285]
    """
    y = np.asarray(values, dtype=float)
    deviation, df, tail = float(y.std(ddof=1)), y.size - 1, (1 - CONFIDENCE_LEVEL) / 2
    low, high = (deviation * math.sqrt(df / float(special.chdtri(df, upper))) for upper in (tail, 1 - tail))
    return Estimate(deviation, low, high, y.size, df=df)


class SampleStats(NamedTuple):
    """Summary of n independent numbers: mean and standard deviation (ddof 1)."""

    mean: float
    std: float
    n: int


def welch_t_test(sample: SampleStats, reference: SampleStats) -> Estimate:
    """Estimate sample.mean - reference.mean with Welch's t interval and p. n is the total of both samples.

    se^2 = s1^2/n1 + s2^2/n2, df = se^4 / sum((s^2/n)^2 / (n - 1)). Source: Welch 1947. With fewer than 2 numbers in
    either sample there is no interval. If both standard deviations are 0, there is no test: the caller must replace
    them.
    """
    value, n = sample.mean - reference.mean, sample.n + reference.n
    if min(sample.n, reference.n) < 2:
        return Estimate(value, n=n)
    squared_errors = [side.std**2 / side.n for side in (sample, reference)]
    terms = [error**2 / (side.n - 1) for error, side in zip(squared_errors, (sample, reference), strict=True)]
    # Without any spread df is 0 / 0.
    df = math.sqrt(sum(squared_errors)) ** 4 / sum(terms) if sum(terms) > 0 else NAN
    return make_estimate(value, sum(squared_errors), df, n)


def holm_adjust(p_values: ArrayLike) -> Floats:
    """Adjust p-values (m,) by Holm's step-down method: running maximum of (m - rank) p, capped at 1.

    rank counts from 0 at the smallest p. A NaN stays NaN and does not count in m: nothing was compared there.
    """
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, NAN)
    order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN comes last
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def estimate_rank_correlation(x: ArrayLike, y: ArrayLike) -> Estimate:
    """Estimate Spearman's correlation of pairs (n,) that were drawn at random, with its interval if n > 3.

    tanh(atanh(rho) +- z sqrt((1 + rho^2 / 2) / (n - 3))). Source: Bonett & Wright 2000.

    >>> [round(number, 3) for number in estimate_rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])[:3]]
    [0.8, -0.457, 0.991]
    """
    from scipy import stats

    rho, n = float(stats.spearmanr(x, y).statistic), len(np.asarray(x))
    if n <= 3:
        return Estimate(rho, n=n)
    half_width = float(special.ndtri(0.5 + CONFIDENCE_LEVEL / 2)) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    with np.errstate(divide="ignore"):  # a correlation of 1 has no width
        low, high = np.tanh(np.arctanh(rho) + half_width * np.array([-1, 1]))
    return Estimate(rho, float(low), float(high), n)


def spearman_trend(
    axis: ArrayLike, outcome: ArrayLike, blocks: ArrayLike, generator: np.random.Generator, num_permutations: int = 9999
) -> Estimate:
    """Compute Spearman's correlation of outcome (n,) with axis (n,), with p from permuting within each block (n,).

    Blocks are seeds: runs of one seed are exchangeable if the axis has no effect. For one block of at most 7 runs all
    permutations are enumerated; otherwise p = (1 + draws at least as far from 0) / (1 + draws). NaN with fewer than 3
    runs or constant values.
    """
    x, y, block = (np.asarray(values) for values in (axis, outcome, blocks))
    # The correlation of two runs is always 1 or -1, and constant values have no ranks to correlate.
    if len(x) < 3 or len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return Estimate(n=len(x))
    from scipy import stats

    ranks_x, ranks_y = (stats.rankdata(values) - (len(x) + 1) / 2 for values in (x, y))
    norm = math.sqrt(float((ranks_x**2).sum() * (ranks_y**2).sum()))
    rho = float(ranks_x @ ranks_y) / norm
    if len(np.unique(block)) == 1 and len(x) <= MAX_EXACT_RUNS:
        permuted_ranks = np.array(list(permutations(ranks_y)))
    else:
        # Random draws may miss the observed order, so it stays in the first row, and p is never 0.
        permuted_ranks = np.tile(ranks_y, (1 + num_permutations, 1))
        for number in np.unique(block):
            columns = np.flatnonzero(block == number)
            permuted_ranks[1:, columns] = generator.permuted(permuted_ranks[1:, columns], axis=1)
    # The tolerance counts permutations that are equal up to rounding.
    is_extreme = np.abs(permuted_ranks @ ranks_x) / norm >= abs(rho) - 1e-12
    return Estimate(rho, n=len(x), p=float(is_extreme.mean()))


def area_under_curve(steps: ArrayLike, values: ArrayLike, end_step: float) -> float:
    """Compute the mean height of the curve through (steps, values) from its first step to `end_step`, by trapezoids.

    A curve that ends earlier keeps its last value up to `end_step`, as a stopped run does. Points beyond `end_step` are
    cut off. A single point gives its value, no point gives NaN. The unit is the unit of `values`.
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if x.size == 0:
        return NAN
    if end_step <= x[0]:
        return float(y[0])
    # np.interp is constant beyond the last point, which continues a shorter curve to `end_step`.
    grid = np.append(x[x < end_step], end_step)
    heights = np.interp(grid, x, y)
    return float(np.trapezoid(heights, grid)) / (end_step - float(x[0]))

"""The noise of runs: how much runs with other seeds differ, estimated from all arms of a study together.

Model: the outcome of arm a with seed s is y_as = mu_a + gamma_s + e_as, where the seed effect gamma_s is shared by all
arms. Three seeds are too few to estimate the variance of e in a single arm, so it is pooled over all arms.

Arms may differ in their noise: an arm near collapse is noisier than the others, and if it is the baseline, its noise is
in every difference. So a difference is judged by the pooled variance only as far as its arms do not stand out
(`compute_doubt`). The more one does, the more the difference's sample variance, with its few degrees of freedom,
replaces the pooled one; in the limit this is the paired t test. In between, the two are interpolated, so that a small
change of an outcome cannot flip a verdict. Two seeds are too few to judge by, and the difference stands alone.
benchmarks/verdict_errors.py counts how often intervals and verdicts are wrong.

Two bounds prevent overconfidence. A variance is never below the difference's sample variance while the pool is trusted,
and never below the variance of the evaluation alone, which is known.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from analysis.stats.estimates import Estimate, Floats, make_estimate

_RELATIVE_ROUNDING = 1e-12
"""Numbers that differ by less than this fraction of their size count as equal: the rest is rounding of their mean."""

REFERENCE_DOUBT = (0.6, 0.95)
"""Prominence above which an arm is doubted to be as noisy as the others, and above which it is treated as noisier.

These limits are for the arm that others are compared with, whose noise is in all differences at once. They were chosen
by simulation (benchmarks/verdict_errors.py): 93 % of the intervals of equal arms contain 0, however noisy the baseline
is.
"""
ARM_DOUBT = (0.9, 1.0)
"""The limits for the other arm of a difference."""


class Pool(NamedTuple):
    """The noise of one run, estimated from all arms."""

    variance: float
    """Variance of one run, with `df` degrees of freedom."""
    df: float
    prominence: Floats
    """(A,) for each arm, the probability of a smaller variance ratio between it and the other arms, if all arms were
    equally noisy. 0 for an arm about which nothing is known."""


class Noise(NamedTuple):
    """What is known about the noise of a study's runs.

    None if no arm has two runs that differ, and no recorded runs match the study.
    """

    paired: Pool | None
    """For differences of runs with a common seed, without the seed effect."""
    unpaired: Pool | None
    """For runs of different seeds."""


def compute_doubt(prominence: ArrayLike, limits: tuple[float, float] = REFERENCE_DOUBT) -> Floats:
    """Compute how far an arm is treated as noisier than the others: 0 below the first limit, 1 from the second on.

    >>> compute_doubt([0.5, 0.775, 0.99]).round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    low, high = limits
    return np.clip((np.asarray(prominence, dtype=float) - low) / (high - low), 0.0, 1.0)


def blend_variances(
    own_variance: ArrayLike, own_df: ArrayLike, pool_variance: ArrayLike, pool_df: ArrayLike, doubt: ArrayLike
) -> tuple[Floats, Floats]:
    """Interpolate the variance of a run and its degrees of freedom between a pooled and an individual estimate.

    All arguments broadcast. Without doubt, the variance is the larger of the two, with the pool's degrees of freedom;
    with a doubt of 1 it is the individual estimate; in between both numbers are interpolated on a logarithmic scale. An
    individual estimate with fewer than two degrees of freedom cannot be compared with the pool, and is used alone. If
    it has none, the pool is used alone.
    """
    own, own_dfs, pooled, pool_dfs = (
        np.asarray(numbers, dtype=float) for numbers in (own_variance, own_df, pool_variance, pool_df)
    )
    weight = np.where(own_dfs <= 0, 0.0, np.where(own_dfs < 2, 1.0, doubt))
    own, own_dfs = np.where(own_dfs > 0, own, 0.0), np.where(own_dfs > 0, own_dfs, 1.0)
    variance = np.maximum(pooled, own) ** (1 - weight) * own**weight
    return variance, pool_dfs ** (1 - weight) * own_dfs**weight


def _compute_variance(values: Floats) -> float:
    """Compute the variance (ddof 1) of values (n,); exactly 0 if they are equal up to rounding, or if n < 2."""
    if values.size < 2 or np.ptp(values) <= _RELATIVE_ROUNDING * np.abs(values).max():
        return 0.0
    return float(values.var(ddof=1))


def pool_samples(outcomes: ArrayLike) -> Pool | None:
    """Pool the noise of runs of different seeds from each arm's variance. outcomes (A, S): NaN is a missing run."""
    samples = [row[np.isfinite(row)] for row in np.asarray(outcomes, dtype=float)]
    dfs = np.array([max(sample.size - 1, 0) for sample in samples], dtype=float)
    squares = np.array([_compute_variance(sample) for sample in samples]) * dfs
    return _make_pool(float(squares.sum()), float(dfs.sum()), squares, dfs)


def pool_residuals(outcomes: ArrayLike) -> Pool | None:
    """Pool the noise of runs without the common effect of seeds. outcomes (A, S): NaN is a missing run.

    Arm and seed effects are fitted by least squares. An arm increases the sum of squared residuals of the others by e'
    (I - H)^+ e, with its residuals e and its block H of the hat matrix (the extra sum of squares of a group of rows;
    Seber & Lee 2003, section 10.6). If every arm has every seed, each arm has S - 1 degrees of freedom, and all of them
    together (S - 1) (A - 1).
    """
    y = np.asarray(outcomes, dtype=float)
    arms, seeds = np.nonzero(np.isfinite(y))
    num_arms, num_seeds = y.shape
    design = np.zeros((len(arms), num_arms + num_seeds))
    design[np.arange(len(arms)), arms] = 1
    design[np.arange(len(arms)), num_arms + seeds] = 1
    # The rank is one less than the number of columns: arms and seeds can be shifted against each other.
    projection = design @ np.linalg.pinv(design.T @ design, hermitian=True) @ design.T
    values = y[arms, seeds]
    residuals = values - projection @ values
    residuals[np.abs(residuals) <= _RELATIVE_ROUNDING * np.abs(values).max(initial=0)] = 0
    extra_squares, extra_dfs = np.zeros(num_arms), np.zeros(num_arms)
    for arm in range(num_arms):
        rows = np.flatnonzero(arms == arm)
        block = np.eye(len(rows)) - projection[np.ix_(rows, rows)]
        inverse = np.linalg.pinv(block, rcond=1e-9, hermitian=True)
        extra_squares[arm] = residuals[rows] @ inverse @ residuals[rows]
        extra_dfs[arm] = np.trace(inverse @ block).round()
    df = float((len(arms) - np.trace(projection)).round()) if len(arms) else 0.0
    return _make_pool(float(residuals @ residuals), df, extra_squares, extra_dfs)


def _make_pool(square_sum: float, df: float, extra_squares: Floats, extra_dfs: Floats) -> Pool | None:
    """Make a pool from a sum of squares with `df` degrees of freedom, and each arm's contribution; None if it is 0."""
    if not (square_sum > 0 and df > 0):
        return None
    other_squares, other_dfs = np.maximum(square_sum - extra_squares, 0.0), df - extra_dfs
    is_known = (extra_dfs > 0) & (other_dfs > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (extra_squares / extra_dfs) / (other_squares / other_dfs)
        prominence = special.fdtr(extra_dfs, other_dfs, np.where(np.isnan(ratios), 0.0, ratios))
    return Pool(square_sum / df, df, np.where(is_known, prominence, 0.0))


def fit_noise(outcomes: ArrayLike, recorded: ArrayLike = ()) -> Noise:
    """Estimate the noise from the runs of all arms. outcomes (A, S): NaN is a missing run.

    recorded: outcomes of recorded runs like the study's, with other seeds. Used only if no arm has two runs: from two
    seeds on, a study shows its noise itself, and other runs may be noisier or less noisy.
    """
    y = np.asarray(outcomes, dtype=float)
    if (np.isfinite(y).sum(axis=1) > 1).any():
        return Noise(pool_residuals(y), pool_samples(y))
    pool = pool_samples(np.atleast_2d(np.asarray(recorded, dtype=float)))
    pool = None if pool is None else pool._replace(prominence=np.zeros(len(y)))
    return Noise(pool, pool)


def compute_level_variance(differences: ArrayLike, clusters: ArrayLike) -> float:
    """Estimate how much the sampling of levels adds to the variance of the overall mean of `differences` (S, L).

    Model: d_sl = mu + a_s + b_l + e_sl, with seeds and levels drawn at random. The variance of the mean is var(a) / S +
    var(b) / L + var(e) / (S L). The deviation between seeds shows the first and the last term; this is the second.
    clusters (L,): levels with the same number, such as mirrored boards, are not independent: their deviations are
    summed before they are squared. With one seed var(e) is unknown, and included in var(b). At least 0.
    """
    d = np.asarray(differences, dtype=float)
    num_seeds, num_levels = d.shape
    numbers, members = np.unique(np.asarray(clusters), return_inverse=True)
    membership = np.zeros((num_levels, len(numbers)))
    membership[np.arange(num_levels), members] = 1
    factor = len(numbers) / max(len(numbers) - 1, 1) / num_levels**2
    level_means = d.mean(axis=0)
    variance = factor * float((((level_means - d.mean()) @ membership) ** 2).sum())
    if num_seeds > 1:
        residuals = d - level_means - d.mean(axis=1, keepdims=True) + d.mean()
        variance -= factor * float(((residuals @ membership) ** 2).sum()) / (num_seeds * (num_seeds - 1))
    return max(variance, 0.0)


def estimate_pooled_mean(
    per_seed: ArrayLike, pool: Pool | None, weight_norm: float = 1.0, min_variance: float = 0.0, doubt: float = 0.0
) -> Estimate:
    """Estimate the mean of one number per seed (n,), such as a paired difference, with the noise of a pool.

    per_seed: sum_a w_a y_as for each seed, with weights w and weight_norm = sum_a w_a^2: 1 for outcomes, 2 for paired
    differences. min_variance: variance of evaluating one run, a lower bound on any run's variance. doubt: that the runs
    are as noisy as the pool's, see `compute_doubt`.

    The variance of a run is v = max(blended, min_variance), where the individual estimate is var(per_seed) /
    weight_norm with n - 1 degrees of freedom; the standard error is sqrt(weight_norm v / n). With one seed the pool is
    the only estimate. There is no interval without any estimate, or if v is 0: equal numbers are no certainty.
    """
    values = np.asarray(per_seed, dtype=float)
    if not values.size:
        return Estimate()
    variance, df = _estimate_variance(values, pool, doubt, weight_norm)
    return make_estimate(float(values.mean()), weight_norm * max(variance, min_variance) / values.size, df, values.size)


def _estimate_variance(
    values: Floats, pool: Pool | None, doubt: float, weight_norm: float = 1.0
) -> tuple[float, float]:
    """Blend the variance of a run and its degrees of freedom; values: one number per seed, see `weight_norm`."""
    own_variance, own_df = _compute_variance(values) / weight_norm, values.size - 1
    if pool is None:
        return own_variance, own_df
    variance, df = blend_variances(own_variance, own_df, pool.variance, pool.df, doubt)
    return float(variance), float(df)


def estimate_unpaired_difference(
    sample: ArrayLike,
    reference: ArrayLike,
    noise: Noise,
    min_variance: float = 0.0,
    doubts: tuple[float, float] = (0.0, 0.0),
) -> Estimate:
    """Estimate mean of sample (n,) minus mean of reference (m,), which share no seeds, with the noise of all arms.

    se^2 = v_1/n + v_2/m with blended variances. The degrees of freedom are Satterthwaite's, but at most the pool's. n
    of the estimate is the smaller number of runs. doubts: of sample and reference, see `compute_doubt`.
    """
    x, y = np.asarray(sample, dtype=float), np.asarray(reference, dtype=float)
    if not (x.size and y.size):
        return Estimate()
    (x_variance, x_df), (y_variance, y_df) = (
        _estimate_variance(values, noise.unpaired, doubt) for values, doubt in zip((x, y), doubts, strict=True)
    )
    x_error, y_error = max(x_variance, min_variance) / x.size, max(y_variance, min_variance) / y.size
    squared_error, df = x_error + y_error, 0.0
    if min(x_df, y_df) > 0 and squared_error > 0:
        df = squared_error**2 / (x_error**2 / x_df + y_error**2 / y_df)
    if noise.unpaired is not None:
        df = min(df, noise.unpaired.df)
    return make_estimate(float(x.mean() - y.mean()), squared_error, df, min(x.size, y.size))


def compute_equivalence_p_value(estimate: Estimate, margin: float) -> float:
    """Compute p of two one-sided tests (Schuirmann 1987) that the true value lies within (-margin, margin).

    The larger p of the tests of value <= -margin and of value >= margin. NaN without a standard error.
    """
    if not (estimate.se > 0 and estimate.df > 0):
        return math.nan
    return float(special.stdtr(estimate.df, (abs(estimate.value) - margin) / estimate.se))

"""The noise of runs: how much runs with other seeds differ, estimated from all arms of a study together.

Model: the outcome of arm a with seed s is y_as = mu_a + gamma_s + e_as, where the seed's effect gamma_s is shared by
all arms. Three seeds are too few to estimate the variance of e in a single arm, so it is pooled over all arms.

Arms may differ in their noise: one near collapse is noisier than the others, and if it is the baseline, its noise is in
every difference. So a difference is judged by the pooled variance only as far as the arms that take part in it do not
stand out (`compute_doubt`). The more one does, the more the variance of the difference itself takes the place of the
pooled one, with its few degrees of freedom: at the end this is the paired t test. In between, both are interpolated, so
that no small change of an outcome turns a verdict. With two seeds there is nothing to doubt by, and the difference
stands alone. benchmarks/verdict_errors.py counts how often intervals and verdicts are wrong.

Two bounds keep this honest. A variance is never below the difference's own estimate while the pool is trusted, and
never below the variance of the evaluation alone, which is known.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from analysis.stats.estimates import CONFIDENCE_LEVEL, Estimate, Floats

_RELATIVE_ROUNDING = 1e-12
"""Numbers that differ by less than this fraction of their size are equal: the rest is rounding in their mean."""

REFERENCE_DOUBT = (0.6, 0.95)
"""From which prominence on an arm is doubted to be as noisy as the others, and from which on it is taken to be noisier.

For the arm that others are compared with: its noise is in all differences at once. The limits were chosen by
simulation (benchmarks/verdict_errors.py): 93 % of the intervals of equal arms contain 0, however noisy the baseline is.
"""
ARM_DOUBT = (0.9, 1.0)
"""The same for the other arm of a difference."""


class Pool(NamedTuple):
    """The noise of one run, estimated from all arms."""

    variance: float
    """Of one run, with `df` degrees of freedom."""
    df: float
    prominence: Floats
    """(A,) for each arm, the probability that the ratio of its variance to that of the other arms would be smaller than
    it is if all arms were equally noisy. 0 for an arm of which nothing is known."""


class Noise(NamedTuple):
    """What is known of the noise of a study's runs.

    paired: for differences of runs with a common seed, without the seeds' effect. unpaired: for runs of different
    seeds. None if no arm has two runs that differ, and no recorded runs are like those of the study.
    """

    paired: Pool | None
    unpaired: Pool | None


def compute_doubt(prominence: ArrayLike, limits: tuple[float, float] = REFERENCE_DOUBT) -> Floats:
    """How far an arm is taken to be noisier than the others: 0 below the first limit, 1 from the second on.

    >>> compute_doubt([0.5, 0.775, 0.99]).round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    low, high = limits
    return np.clip((np.asarray(prominence, dtype=float) - low) / (high - low), 0.0, 1.0)


def blend_variances(
    own_variance: ArrayLike, own_df: ArrayLike, pool_variance: ArrayLike, pool_df: ArrayLike, doubt: ArrayLike
) -> tuple[Floats, Floats]:
    """The variance of a run and its degrees of freedom, between the pooled estimate and one's own.

    All arguments broadcast. Without doubt the variance is the larger one of both, with the degrees of freedom of the
    pool; with a doubt of 1 both are the own ones, and in between they are interpolated on a logarithmic scale. An
    estimate with less than two degrees of freedom cannot be compared with the pool: it stands alone. Without any, the
    pool stands alone.
    """
    own, own_dfs, pooled, pool_dfs = (
        np.asarray(numbers, dtype=float) for numbers in (own_variance, own_df, pool_variance, pool_df)
    )
    weight = np.where(own_dfs <= 0, 0.0, np.where(own_dfs < 2, 1.0, doubt))
    own, own_dfs = np.where(own_dfs > 0, own, 0.0), np.where(own_dfs > 0, own_dfs, 1.0)
    variance = np.maximum(pooled, own) ** (1 - weight) * own**weight
    return variance, pool_dfs ** (1 - weight) * own_dfs**weight


def _compute_variance(values: Floats) -> float:
    """Variance (ddof 1) of values (n,); exactly 0 if they are equal up to rounding, or if n < 2."""
    if values.size < 2 or np.ptp(values) <= _RELATIVE_ROUNDING * np.abs(values).max():
        return 0.0
    return float(values.var(ddof=1))


def pool_samples(outcomes: ArrayLike) -> Pool | None:
    """The noise of runs of different seeds, from the variance of each arm. outcomes (A, S): NaN is a missing run."""
    samples = [row[np.isfinite(row)] for row in np.asarray(outcomes, dtype=float)]
    dfs = np.array([max(sample.size - 1, 0) for sample in samples], dtype=float)
    squares = np.array([_compute_variance(sample) for sample in samples]) * dfs
    return _make_pool(float(squares.sum()), float(dfs.sum()), squares, dfs)


def pool_residuals(outcomes: ArrayLike) -> Pool | None:
    """The noise of runs without the seeds' common effect. outcomes (A, S): NaN is a missing run.

    Arm and seed effects are fitted by least squares. What an arm adds to the sum of squared residuals of the others is
    e' (I - H)^+ e, with its residuals e and its block H of the hat matrix (the extra sum of squares of a group of rows;
    Seber & Lee 2003, section 10.6). If every arm has every seed, it has S - 1 degrees of freedom, and all of them
    together (S - 1) (A - 1).
    """
    y = np.asarray(outcomes, dtype=float)
    arms, seeds = np.nonzero(np.isfinite(y))
    num_arms, num_seeds = y.shape
    design = np.zeros((len(arms), num_arms + num_seeds))
    design[np.arange(len(arms)), arms] = 1
    design[np.arange(len(arms)), num_arms + seeds] = 1
    # The design has one rank less than columns: arms and seeds can be shifted against each other.
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
    """Pool a sum of squares with `df` degrees of freedom, to which each arm adds so much; None if it is 0."""
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

    recorded: outcomes of recorded runs that are like those of the study, with other seeds. They count only if no arm
    has two runs: from two seeds on, a study shows its own noise, and other runs may be noisier or less noisy.
    """
    y = np.asarray(outcomes, dtype=float)
    if (np.isfinite(y).sum(axis=1) > 1).any():
        return Noise(pool_residuals(y), pool_samples(y))
    pool = pool_samples(np.atleast_2d(np.asarray(recorded, dtype=float)))
    pool = None if pool is None else pool._replace(prominence=np.zeros(len(y)))
    return Noise(pool, pool)


def compute_level_variance(differences: ArrayLike, clusters: ArrayLike) -> float:
    """The variance of the mean of `differences` (S, L) over S seeds and L levels because the levels are a sample.

    Model: d_sl = mu + a_s + b_l + e_sl, in which seeds and levels are drawn. The variance of the mean is
    var(a) / S + var(b) / L + var(e) / (S L). The deviation between seeds shows the first and the last term, and this is
    the other one. clusters (L,): levels of one number, such as mirrored boards, are not independent: their deviations
    are added before they are squared. With one seed var(e) is not known, and counts in var(b). At least 0.
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


def estimate_paired_contrast(
    per_seed: ArrayLike,
    noise: Noise,
    weight_norm: float = 2.0,
    min_variance: float = 0.0,
    doubt: float = 0.0,
) -> Estimate:
    """Mean of one contrast per seed (n,), such as a paired difference, with the noise of all arms.

    Args:
        per_seed: for each seed, sum_a w_a y_as, the weights w of which sum to 0.
        noise: of the study.
        weight_norm: sum_a w_a^2; 2 for a difference.
        min_variance: variance of the evaluation of one run, which no run's variance can be below.
        doubt: that the runs of the contrast are as noisy as those of the pool, see `compute_doubt`.

    The variance of a run is v = max(blended, min_variance), where the own estimate is var(per_seed) / weight_norm with
    n - 1 degrees of freedom; the standard error is sqrt(weight_norm v / n). With one seed the pool is the only
    estimate. There is no interval without any, or if v is 0: equal numbers are no certainty.
    """
    values = np.asarray(per_seed, dtype=float)
    if not values.size:
        return Estimate()
    variance, df = _estimate_variance(values, noise.paired, doubt, weight_norm)
    return make_estimate(float(values.mean()), weight_norm * max(variance, min_variance) / values.size, df, values.size)


def _estimate_variance(
    values: Floats, pool: Pool | None, doubt: float, weight_norm: float = 1.0
) -> tuple[float, float]:
    """The blended variance of a run and its degrees of freedom; values: one number per seed, see `weight_norm`."""
    own_variance, own_df = _compute_variance(values) / weight_norm, values.size - 1
    if pool is None:
        return own_variance, own_df
    variance, df = blend_variances(own_variance, own_df, pool.variance, pool.df, doubt)
    return float(variance), float(df)


def estimate_sample_mean(sample: ArrayLike, noise: Noise, min_variance: float = 0.0, doubt: float = 0.0) -> Estimate:
    """Mean of one number per run (n,), such as the outcome of an arm, with the noise of all arms."""
    values = np.asarray(sample, dtype=float)
    if not values.size:
        return Estimate()
    variance, df = _estimate_variance(values, noise.unpaired, doubt)
    squared_error = max(variance, min_variance) / values.size
    return make_estimate(float(values.mean()), squared_error, df, values.size)


def estimate_unpaired_difference(
    sample: ArrayLike,
    reference: ArrayLike,
    noise: Noise,
    min_variance: float = 0.0,
    doubts: tuple[float, float] = (0.0, 0.0),
) -> Estimate:
    """Mean of sample (n,) minus mean of reference (m,), whose runs share no seeds, with the noise of all arms.

    se^2 = v_1/n + v_2/m with blended variances. The degrees of freedom are Satterthwaite's, at most those of the pool.
    n of the estimate is the smaller of both numbers of runs. doubts: of sample and reference, see `compute_doubt`.
    """
    x, y = np.asarray(sample, dtype=float), np.asarray(reference, dtype=float)
    if not (x.size and y.size):
        return Estimate()
    squared_errors, dfs = [], []
    for values, doubt in zip((x, y), doubts, strict=True):
        variance, df = _estimate_variance(values, noise.unpaired, doubt)
        squared_errors.append(max(variance, min_variance) / values.size)
        dfs.append(df)
    squared_error = sum(squared_errors)
    df = 0.0
    if min(dfs) > 0 and squared_error > 0:
        df = squared_error**2 / sum(part**2 / part_df for part, part_df in zip(squared_errors, dfs, strict=True))
    if noise.unpaired is not None:
        df = min(df, noise.unpaired.df)
    return make_estimate(float(x.mean() - y.mean()), squared_error, df, min(x.size, y.size))


def make_estimate(value: float, squared_error: float, df: float, n: int) -> Estimate:
    """The t interval and the two-sided p of a value; none if its squared standard error or its df is 0 or missing."""
    if not (squared_error > 0 and df > 0):
        return Estimate(value, n=n)
    se = math.sqrt(squared_error)
    half_width = float(special.stdtrit(df, 0.5 + CONFIDENCE_LEVEL / 2)) * se
    p = 2 * float(special.stdtr(df, -abs(value) / se))
    return Estimate(value, value - half_width, value + half_width, n, se, df, p)


def compute_equivalence_p_value(estimate: Estimate, margin: float) -> float:
    """p of two one-sided tests (Schuirmann 1987) that the true value lies within (-margin, margin).

    The larger p of the tests of value <= -margin and of value >= margin. NaN without a standard error.
    """
    if not (estimate.se > 0 and estimate.df > 0):
        return math.nan
    return float(special.stdtr(estimate.df, (abs(estimate.value) - margin) / estimate.se))

"""The noise of runs: how much runs with other seeds differ, estimated from all arms of a study together.

Model: the outcome of arm a with seed s is y_as = mu_a + gamma_s + e_as, where the seed's effect gamma_s is shared by
all arms, and the variance of e_as may differ between arms. Three seeds are too few to estimate the variance of a single
arm. So the variances of all arms, and those of recorded replicate runs, are used together: each is drawn toward their
common value, as far as the arms agree (Smyth 2004, "Linear models and empirical Bayes methods for assessing
differential expression in microarray experiments", the method of limma).

Two bounds keep this honest. A variance is never drawn below its own estimate, since a noisy arm among quiet ones would
otherwise be judged by the quiet ones. And it is never below the variance of the evaluation alone, which is known.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from analysis.stats.estimates import Estimate, Floats

_MIN_RELATIVE_VARIANCE = 1e-5
"""A variance of 0 has no logarithm: it counts as this fraction of the median variance, as in limma."""

_RELATIVE_ROUNDING = 1e-12
"""Numbers that differ by less than this fraction of their size are equal: the rest is rounding in their mean."""


class VariancePrior(NamedTuple):
    """The common value of several variances.

    variance: the value. df: degrees of freedom that it is worth beside an arm's own estimate; infinite if the variances
    differ no more than chance explains. max_df: degrees of freedom of all variances together, which bound those of
    any test.
    """

    variance: float
    df: float
    max_df: float


def fit_variance_prior(variances: ArrayLike, dfs: ArrayLike) -> VariancePrior | None:
    """Fit a scaled inverse chi-square distribution to the variances (m,) of m arms with degrees of freedom (m,).

    Source: Smyth 2004, section 6.2. With e_a = log s_a^2 - digamma(d_a/2) + log(d_a/2), the prior's df solves
    trigamma(df/2) = var(e) - mean trigamma(d_a/2), and its variance follows from the mean of e. If the right side is
    not positive, df is infinite, and the variance is the mean of the variances, weighted by df.

    Arms without degrees of freedom (a single seed) are left out. A single variance is the prior itself, with an
    infinite df: nothing shows that another arm differs. None without any variance above 0.

    >>> fit_variance_prior([4.0, 4.0], [2, 2])
    VariancePrior(variance=4.0, df=inf, max_df=4.0)
    """
    s2, df = np.asarray(variances, dtype=float), np.asarray(dfs, dtype=float)
    s2, df = s2[df > 0], df[df > 0]
    if not (s2 > 0).any():
        return None
    max_df = float(df.sum())
    # Most arms without any spread would make the median 0; then the smallest positive variance takes its place.
    floor = _MIN_RELATIVE_VARIANCE * float(np.median(s2) or s2[s2 > 0].min())
    logs = np.log(np.maximum(s2, floor)) - special.digamma(df / 2) + np.log(df / 2)
    excess = float(logs.var(ddof=1) - special.polygamma(1, df / 2).mean()) if len(s2) > 1 else 0.0
    if excess <= 0:
        return VariancePrior(float((df * s2).sum() / max_df), math.inf, max_df)
    half_df = _invert_trigamma(excess)
    variance = math.exp(float(logs.mean()) + float(special.digamma(half_df)) - math.log(half_df))
    return VariancePrior(variance, 2 * half_df, max_df)


def _invert_trigamma(value: float) -> float:
    """The x > 0 with trigamma(x) = value > 0, by Newton's method on 1 / trigamma (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        change = trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
        x += change
        if abs(change) < 1e-10 * x:
            break
    return x


def moderate_variance(variance: float, df: float, prior: VariancePrior | None) -> tuple[float, float]:
    """Draw an estimated variance with `df` degrees of freedom toward the prior: (variance, degrees of freedom).

    (df0 s0^2 + df s^2) / (df0 + df), with df0 + df degrees of freedom, at most `prior.max_df`, but no less than the
    estimate itself. df = 0 means that there is no estimate, and gives the prior. Without a prior the estimate is
    returned, which is NaN for df = 0.
    """
    if prior is None:
        return (variance, df) if df > 0 else (math.nan, 0.0)
    own_variance = variance if df > 0 else 0.0
    if math.isinf(prior.df):
        moderated = prior.variance
    else:
        moderated = (prior.df * prior.variance + df * own_variance) / (prior.df + df)
    return max(moderated, own_variance), min(prior.df + df, prior.max_df)


class RunVariances(NamedTuple):
    """Variances (A,) of the runs of A arms, and their degrees of freedom (A,); 0 where an arm has a single seed."""

    variances: Floats
    dfs: Floats


def estimate_variances(outcomes: ArrayLike) -> RunVariances:
    """Variance of each arm over its seeds, the seeds' common effect included. outcomes (A, S): NaN is a missing run."""
    y = np.asarray(outcomes, dtype=float)
    counts = np.isfinite(y).sum(axis=1)
    variances = [_compute_variance(row[np.isfinite(row)]) for row in y]
    return RunVariances(np.array(variances), np.maximum(counts - 1, 0).astype(float))


def _compute_variance(values: Floats) -> float:
    """Variance (ddof 1) of values (n,); exactly 0 if they are equal up to rounding, or if n < 2."""
    if values.size < 2 or np.ptp(values) <= _RELATIVE_ROUNDING * np.abs(values).max():
        return 0.0
    return float(values.var(ddof=1))


def estimate_residual_variances(outcomes: ArrayLike) -> RunVariances:
    """Variance of each arm over its seeds, without the seeds' common effect. outcomes (A, S): NaN is a missing run.

    Arm and seed effects are fitted by least squares. s_a^2 = sum of an arm's squared residuals over its degrees of
    freedom, sum over its runs of 1 - h with the leverages h of the fit. If every arm has every seed, these are
    (S - 1)(A - 1) / A. With two arms both variances are half of that of the difference, with (S - 1) / 2 each.
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
    dfs = np.bincount(arms, weights=1 - np.diag(projection), minlength=num_arms).astype(float)
    dfs[dfs < 1e-9] = 0  # a single run has a leverage of 1 up to rounding
    squares = np.bincount(arms, weights=residuals**2, minlength=num_arms).astype(float)
    return RunVariances(np.divide(squares, dfs, out=np.zeros(num_arms), where=dfs > 0), dfs)


class Noise(NamedTuple):
    """What is known of the noise of a study's runs.

    paired: for differences of runs with a common seed, without the seeds' effect. unpaired: for runs of different
    seeds. None if neither the study nor a recorded replicate has two runs of one arm that differ.
    """

    paired: VariancePrior | None
    unpaired: VariancePrior | None


def fit_noise(outcomes: ArrayLike, replicates: RunVariances | None = None) -> Noise:
    """Estimate the noise from the runs of all arms. outcomes (A, S): NaN is a missing run.

    replicates: variances of recorded runs of other studies, one per arm. They contain the seeds' effect, so they are
    at least as large as the variance of paired runs.
    """
    extra = replicates or RunVariances(np.empty(0), np.empty(0))
    paired, unpaired = (
        fit_variance_prior(np.append(runs.variances, extra.variances), np.append(runs.dfs, extra.dfs))
        for runs in (estimate_residual_variances(outcomes), estimate_variances(outcomes))
    )
    return Noise(paired, unpaired)


def estimate_paired_contrast(
    per_seed: ArrayLike,
    noise: Noise,
    weight_norm: float = 2.0,
    min_variance: float = 0.0,
    confidence_level: float = 0.95,
) -> Estimate:
    """Mean of one contrast per seed (n,), such as a paired difference, with the noise of all arms.

    Args:
        per_seed: for each seed, sum_a w_a y_as, the weights w of which sum to 0.
        noise: of the study.
        weight_norm: sum_a w_a^2; 2 for a difference.
        min_variance: variance of the evaluation of one run, which no run's variance can be below.

    The variance of a run is v = max(moderated, own, min_variance), where the own estimate is var(per_seed) /
    weight_norm with n - 1 degrees of freedom; the standard error is sqrt(weight_norm v / n). With one seed the prior
    is the only estimate. There is no interval without any, or if v is 0: equal numbers are no certainty.
    """
    values = np.asarray(per_seed, dtype=float)
    if not values.size:
        return Estimate()
    own_variance = _compute_variance(values) / weight_norm
    variance, df = moderate_variance(own_variance, values.size - 1, noise.paired)
    return make_estimate(
        float(values.mean()), weight_norm * max(variance, min_variance) / values.size, df, values.size, confidence_level
    )


def estimate_sample_mean(
    sample: ArrayLike, noise: Noise, min_variance: float = 0.0, confidence_level: float = 0.95
) -> Estimate:
    """Mean of one number per run (n,), such as the outcome of an arm, with the noise of all arms."""
    values = np.asarray(sample, dtype=float)
    if not values.size:
        return Estimate()
    variance, df = moderate_variance(_compute_variance(values), values.size - 1, noise.unpaired)
    squared_error = max(variance, min_variance) / values.size
    return make_estimate(float(values.mean()), squared_error, df, values.size, confidence_level)


def estimate_unpaired_difference(
    sample: ArrayLike,
    reference: ArrayLike,
    noise: Noise,
    min_variance: float = 0.0,
    confidence_level: float = 0.95,
) -> Estimate:
    """Mean of sample (n,) minus mean of reference (m,), whose runs share no seeds, with the noise of all arms.

    se^2 = v_1/n + v_2/m with moderated variances. The degrees of freedom are Satterthwaite's, at most those of all
    variances together. n of the estimate is the smaller of both numbers of runs.
    """
    x, y = np.asarray(sample, dtype=float), np.asarray(reference, dtype=float)
    if not (x.size and y.size):
        return Estimate()
    squared_errors, dfs = [], []
    for values in (x, y):
        variance, df = moderate_variance(_compute_variance(values), values.size - 1, noise.unpaired)
        squared_errors.append(max(variance, min_variance) / values.size)
        dfs.append(df)
    squared_error = sum(squared_errors)
    df = 0.0
    if min(dfs) > 0 and squared_error > 0:
        df = squared_error**2 / sum(part**2 / part_df for part, part_df in zip(squared_errors, dfs, strict=True))
    if noise.unpaired is not None:
        df = min(df, noise.unpaired.max_df)
    return make_estimate(float(x.mean() - y.mean()), squared_error, df, min(x.size, y.size), confidence_level)


def make_estimate(value: float, squared_error: float, df: float, n: int, confidence_level: float = 0.95) -> Estimate:
    """The t interval and the two-sided p of a value; none if its squared standard error or its df is 0 or missing."""
    if not (squared_error > 0 and df > 0):
        return Estimate(value, n=n)
    se = math.sqrt(squared_error)
    half_width = float(special.stdtrit(df, 0.5 + confidence_level / 2)) * se
    p = 2 * float(special.stdtr(df, -abs(value) / se))
    return Estimate(value, value - half_width, value + half_width, n, se, df, p)


def compute_equivalence_p_value(estimate: Estimate, margin: float) -> float:
    """p of two one-sided tests (Schuirmann 1987) that the true value lies within (-margin, margin).

    The larger p of the tests of value <= -margin and of value >= margin. NaN without a standard error.
    """
    if not (estimate.se > 0 and estimate.df > 0):
        return math.nan
    return float(special.stdtr(estimate.df, (abs(estimate.value) - margin) / estimate.se))

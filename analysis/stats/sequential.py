"""An anytime-valid t test of paired differences: seeds may be added after each look, for any reason.

An ordinary t test keeps its error rate only if the number of seeds was fixed in advance. This test keeps its error rate
over all looks together: under equality, e ever reaches 1/alpha with a probability of at most alpha (Ville's
inequality). So a study may be looked at after every seed, and extended or ended because of what was seen; a rejection
stays valid if later seeds weaken it. The price is a wider interval: 1.7 times the t test's at 10 seeds. Assumptions:
differences are independent and normal with one mean and standard deviation, no finished seed is left out, and the
number of comparisons m is declared before the first look. m counts every arm that is ever compared, even one without
seeds yet: an arm without evidence has e = 1 and p = 1, never NaN.
"""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

from analysis.stats.estimates import CONFIDENCE_LEVEL, NAN, Estimate, Floats

# Differences this close are equal up to rounding of the subtraction. Fractions of levels have steps of 1e-4 or more.
_RELATIVE_ROUNDING = 1e-9
_ABSOLUTE_ROUNDING = 1e-12


def compute_e_value(t: ArrayLike, n: ArrayLike) -> Floats:
    """Compute the evidence of t statistics of n paired differences against a mean of 0; t and n broadcast.

    e = (1 + n)^(-1/2) [(1 + t^2/v) / (1 + t^2/(v (1 + n)))]^((v + 1)/2), with v = n - 1.

    It is a likelihood ratio. The alternative gives the standardized effect mean / sd the prior N(0, 1), and both
    hypotheses give sd the right-Haar prior 1 / sd, which leaves a ratio of densities of t. Under equality t has
    Student's density f with v degrees of freedom; under the alternative the numerator of t has the variance 1 + n
    instead of 1, so t / sqrt(1 + n) has the density f. The ratio of both densities is e, and its expectation under
    equality is 1. Over n, it is a martingale under equality in the filtration of the data up to scale.

    Sources: Gönen et al. 2005 for the ratio; Wang and Ramdas (arXiv 2310.03722, Theorem 4.9 with c = 1) for the
    martingale. Lai 1976 has a flat prior instead of N(0, 1), which gives no e-value. Grünwald et al. (arXiv 1906.07801)
    treat such "safe" t tests.

    e grows with |t|, up to (1 + n)^(v/2) at infinity. It is 1 with fewer than 2 differences.
    """
    t, n = np.asarray(t, dtype=float), np.asarray(n, dtype=float)
    df = np.maximum(n - 1, 1)
    with np.errstate(over="ignore"):
        # With x = t^2/v, the bracket is 1 + n x / (1 + n + x), which also holds for an infinite t.
        fraction = 1 - (1 + n) / (1 + n + t * t / df)
        log_e = n / 2 * np.log1p(n * fraction) - np.log(1 + n) / 2
        return np.exp(np.where(n < 2, 0.0, log_e))


def compute_critical_t(n: int, num_comparisons: int = 1) -> float:
    """Compute the |t| of n differences at which e = m/alpha: the half-width of the interval in standard errors.

    With K = 1 + n and R = (K (m/alpha)^2)^(1/n), it is sqrt(v (R - 1) / (1 - R/K)). It is infinite if e cannot exceed
    m/alpha, which is if K^(v/2) <= m/alpha, or with fewer than 2 differences.
    """
    if n < 2:
        return math.inf
    log_ratio = math.log1p(n)
    log_root = (log_ratio + 2 * math.log(max(num_comparisons, 1) / (1 - CONFIDENCE_LEVEL))) / n
    if log_root >= log_ratio:
        return math.inf
    return math.sqrt((n - 1) * math.expm1(log_root) / -math.expm1(log_root - log_ratio))


def find_fewest_seeds(num_comparisons: int) -> int:
    """Find the smallest number of paired seeds with which a difference, however large, can be detected.

    The smallest n with (1 + n)^((n - 1)/2) > m/alpha: 5 for a single comparison, and 6 for 2 to 6 comparisons. With
    fewer seeds every interval is infinite.
    """
    return next(n for n in itertools.count(2) if math.isfinite(compute_critical_t(n, num_comparisons)))


def estimate_mean_sequentially(differences: ArrayLike, num_comparisons: int = 1) -> Estimate:
    """Estimate the mean of paired differences (n,), one per seed, with an interval and p valid at all looks together.

    The interval contains every mean d0 with e(d0) < m/alpha: mean +- compute_critical_t se. All such intervals, of m
    arms and at any number of seeds, contain their true means with a probability of at least 1 - alpha.

    p = min(1, 1/e) is for a single comparison; correct it with `holm_adjust`. Under equality, the probability that it
    ever falls to alpha is at most alpha. After the correction, the rejections at all looks, whatever the dependence of
    the arms, include a false one with a probability of at most alpha: the first false one needs e >= m0/alpha from one
    of the m0 true hypotheses. The e-Holm procedure of Vovk and Wang 2021 rejects more, but needs expectations of at
    most 1 at a common stopping time. Ours are martingales only in the filtration of their arm.

    With fewer seeds than `find_fewest_seeds`, the interval is infinite. Equal differences have no interval (NaN) and p
    = 1: their spread of 0 is chance, and would make any mean certain. Without differences, value is NaN.
    """
    values = np.asarray(differences, dtype=float)
    n = values.size
    mean = float(values.mean()) if n else NAN
    if n < 2:
        return Estimate(mean, -math.inf, math.inf, n, p=1.0)
    if np.ptp(values) <= _RELATIVE_ROUNDING * float(np.abs(values).max()) + _ABSOLUTE_ROUNDING:
        return Estimate(mean, n=n, se=0.0, df=n - 1, p=1.0)
    se = float(values.std(ddof=1)) / math.sqrt(n)
    half_width = compute_critical_t(n, num_comparisons) * se
    e_value = float(compute_e_value(mean / se, n))
    return Estimate(mean, mean - half_width, mean + half_width, n, se, n - 1, min(1.0, 1 / e_value))


def compute_sequential_equivalence_p_value(estimate: Estimate, margin: float) -> float:
    """Compute p that the true mean lies within (-margin, margin), valid at all looks together.

    estimate: from `estimate_mean_sequentially`. p is 1/e against the nearer margin, capped at 1, and 1 if the estimate
    lies outside. e is larger against a mean beyond the margin than against the margin itself, so under any such mean
    the probability that this p ever falls to alpha is at most alpha. Without a standard error it is 1 rather than NaN:
    such an arm still counts in the number of comparisons. NaN without a margin, and for an empty `Estimate()`, such as
    the baseline's, which is not compared.
    """
    if math.isnan(margin) or math.isnan(estimate.p):
        return NAN
    if not estimate.se > 0 or abs(estimate.value) >= margin:
        return 1.0
    return min(1.0, 1 / float(compute_e_value((margin - abs(estimate.value)) / estimate.se, estimate.n)))

"""Power of t tests: what a comparison with this noise and these degrees of freedom can find, and what it cannot.

A t test sees (D + se Z) / (se S): the true difference D, a standard normal Z, and S = sqrt(chi2(df) / df), the error of
the standard error. Every probability below is the integral of a normal density times P(S <= s), taken numerically.
`scipy.stats.nct` is an oracle of the tests, and is not called here: its lower tail is NaN for a quarter of the
arguments that occur here, and its upper tail is wrong by up to 0.1 below one degree of freedom.

The powers are exact if `se` is the true standard error. An observed one is uncertain itself: with 2 degrees of freedom,
it lies between 0.16 and 1.9 of the true one in 95 of 100 studies.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from analysis.stats.estimates import NAN, Floats

# Nodes and weights of the tanh-sinh rule on (0, 1). It stays accurate where P(S <= s) ~ s^df has no derivative at 0,
# which costs polynomial rules their digits if df is small.
_RULE_STEP = 0.05
_RULE_POSITIONS = np.arange(-64, 65) * _RULE_STEP
_NODES = special.expit(math.pi * np.sinh(_RULE_POSITIONS))
_WEIGHTS = _RULE_STEP * math.pi * np.cosh(_RULE_POSITIONS) * _NODES * (1 - _NODES)
# The standard normal density is below 1e-18 beyond this distance from 0.
_MAX_Z = 9.0
# P(S <= s) is 1 up to rounding at this s for df >= 0.01, and its square does not overflow.
_MAX_S = 1e4


def compute_power(
    difference: float, se: float, df: float, num_comparisons: int = 1, confidence_level: float = 0.95
) -> float:
    """Probability that a two-sided t test rejects equality if the true difference is `difference`.

    P(|T| > c) with c = t(1 - alpha/2m, df), where T has the noncentral t distribution with df degrees of freedom and
    noncentrality difference / se, alpha = 1 - confidence_level, and m comparisons: the first and strictest step of
    Holm's procedure. Source: Cohen 1988. Without a difference it is alpha/m. NaN without a standard error or degrees of
    freedom; infinite df give the normal test.
    """
    if math.isnan(difference) or not (se > 0 and df > 0):  # the second is also False for NaN
        return NAN
    critical_t = _compute_critical_t(df, 2 * max(num_comparisons, 1), confidence_level)
    return _compute_rejection_probability(abs(difference) / se, critical_t, df)


def find_detectable_difference(
    se: float, df: float, num_comparisons: int = 1, power: float = 0.8, confidence_level: float = 0.95
) -> float:
    """Smallest true difference that the test of `compute_power` detects with probability `power`, in (0, 1).

    The root of compute_power(difference) = power. It depends on the noise and not on the observed effect. It is 0 if
    the test rejects as often without any difference. NaN without a standard error or degrees of freedom.

    The usual sum (t(1 - alpha/2m) + t(power)) se treats the noncentral t distribution as a shifted one. It is too small
    by 13 % with 2 degrees of freedom and 5 comparisons.
    """
    if not (se > 0 and df > 0):
        return NAN
    critical_t = _compute_critical_t(df, 2 * max(num_comparisons, 1), confidence_level)

    def compute_excess(noncentrality: float) -> float:
        return _compute_rejection_probability(noncentrality, critical_t, df) - power

    if compute_excess(0.0) >= 0:
        return 0.0
    # The test misses only if Z is too small or S too large. At this bound each has half the probability of a miss.
    tail = (1 - power) / 2
    large_s = 1.0 if math.isinf(df) else math.sqrt(float(special.chdtri(df, tail)) / df)
    upper_bound = critical_t * large_s - float(special.ndtri(tail))
    return float(optimize.brentq(compute_excess, 0.0, upper_bound, xtol=1e-10, rtol=1e-10)) * se


def compute_equivalence_power(
    margin: float, se: float, df: float, num_comparisons: int = 1, confidence_level: float = 0.95
) -> float:
    """Probability that two one-sided t tests (TOST) show equivalence within +-margin if the true difference is 0.

    They show it if |d| + c s < margin for the observed difference d and standard error s, with c = t(1 - alpha/m, df):
    each test is at alpha/m, so the interval of level 1 - 2 alpha/m lies within the margin. With M = margin / se, the
    power is 2 integral_0^M phi(z) P(c S < M - z) dz. Sources: Schuirmann 1987 for the test; Phillips 1990 for its
    power, there by Owen's Q function. It is 0 without a margin, and NaN without a standard error or degrees of freedom.
    """
    if math.isnan(margin) or not (se > 0 and df > 0):
        return NAN
    if margin <= 0:
        return 0.0
    bound = margin / se
    critical_t = _compute_critical_t(df, max(num_comparisons, 1), confidence_level)
    # By symmetry, -|Z| in place of |Z|: it has twice the normal density, on the negative side.
    return _integrate_with_chi(lambda z: 2 * _compute_normal_density(z), bound, 0.0, critical_t, df)


def _compute_critical_t(df: float, num_tails: int, confidence_level: float) -> float:
    return -float(special.stdtrit(df, (1 - confidence_level) / num_tails))


def _compute_rejection_probability(noncentrality: float, critical_t: float, df: float) -> float:
    """P(c S < |noncentrality + Z|), where both Z = z and Z = -2 noncentrality - z give |noncentrality + z|."""
    # Beyond 10 _MAX_Z the second density is 0 in any case, and the square of its argument might overflow.
    mirror_shift = min(2 * noncentrality, 10 * _MAX_Z)
    return _integrate_with_chi(
        lambda z: _compute_normal_density(z) + _compute_normal_density(z + mirror_shift),
        noncentrality,
        _MAX_Z,
        critical_t,
        df,
    )


def _compute_normal_density(z: Floats) -> Floats:
    return np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _integrate_with_chi(
    density: Callable[[Floats], Floats], center: float, high: float, critical_t: float, df: float
) -> float:
    """Integral of density(z) P(c S < center + z) over z from max(-center, -9) to high, with S = sqrt(chi2(df) / df).

    With many degrees of freedom the probability rises steeply at center + z = c. There, the integral is cut in two: the
    rule has most of its nodes near the ends of a piece.
    """
    low = max(-center, -_MAX_Z)
    edges = np.clip([low, critical_t - center, high], low, high)
    widths = np.diff(edges)
    z = edges[:-1, None] + widths[:, None] * _NODES
    s = np.minimum((center + z) / critical_t, _MAX_S)
    probability = (s > 1).astype(float) if math.isinf(df) else special.gammainc(df / 2, df / 2 * s * s)
    # Rounding may put a probability of 1 above it.
    return min(1.0, float(widths @ ((density(z) * probability) @ _WEIGHTS)))

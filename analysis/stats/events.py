"""Time until an event, such as the collapse of a run: functions from arrays to estimates.

The estimand is the restricted mean: how many of the first `horizon` steps, on average, pass without the event. Unlike a
median it exists if most runs never have the event, and unlike a hazard ratio it has a unit that can be planned with.
The horizon is declared before any result.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.stats.estimates import CONFIDENCE_LEVEL, NAN, Estimate, Floats

Booleans = NDArray[np.bool_]
# All 2^14 = 16,384 exchanges of arms within 14 seeds are enumerated; for more seeds, random ones are drawn.
MAX_EXACT_SEEDS = 14
NUM_RANDOM_EXCHANGES = 9999


class EventTimes(NamedTuple):
    """Runs of one arm, in the order of their seeds: the last step of each, and True where the event ended it there.

    False means censored: the run was not followed further, and had no event until then.
    """

    end_steps: ArrayLike
    is_event: ArrayLike


def kaplan_meier(end_steps: ArrayLike, is_event: ArrayLike) -> tuple[Floats, Floats]:
    """Estimate the fraction of runs without the event, at step 0 and after each step with one: (steps, fractions).

    end_steps (n,): last step of each run. is_event (n,): True if the event ended the run there, False if it ended for
    another reason (censored). Without an event, the curve is the single point (0, 1).
    """
    ends, is_observed = np.asarray(end_steps, dtype=float), np.asarray(is_event, dtype=bool)
    event_steps, fractions = _estimate_survival(np.ones((1, ends.size), dtype=bool), ends, is_observed)
    return np.concatenate([[0.0], event_steps]), fractions[0]


def restricted_mean(end_steps: ArrayLike, is_event: ArrayLike, horizon: float) -> float:
    """Compute the mean steps without the event among the first `horizon`: the area under the Kaplan-Meier curve.

    Source: Royston and Parmar 2013. Without censoring before the horizon it is mean(min(T, horizon)). NaN without runs,
    and where the curve is unknown before the horizon because the runs with the latest ends were censored.
    """
    ends, is_observed = np.asarray(end_steps, dtype=float), np.asarray(is_event, dtype=bool)
    return float(_compute_restricted_means(np.ones((1, ends.size), dtype=bool), ends, is_observed, horizon)[0])


def compare_restricted_means(
    arm: EventTimes, baseline: EventTimes, horizon: float, generator: np.random.Generator
) -> Estimate:
    """Estimate the difference of restricted means, arm minus baseline, by a permutation test paired by seed.

    The n-th run of both arms has the same seed. If the arm has no effect, the two runs of a seed are exchangeable: p is
    the fraction of all 2^n exchanges whose difference is at least as far from 0. With more than 14 seeds, it is the
    fraction among 9,999 random exchanges and the observed one; only then is the generator used. If all runs are
    followed to their event or the horizon, an exchange flips the sign of a seed's D = min(T_arm, horizon) -
    min(T_baseline, horizon).

    The interval contains all shifts d for which the same test of D - d does not reject. For a d below the mean of D, a
    flip of the seeds S counts against rejection exactly if the mean of D over S, or over all other seeds, is at most d.
    The bounds are therefore order statistics of means over subsets (Hartigan 1969), without a search. They are NaN with
    fewer than 6 seeds, which cannot exclude any shift at 95 % (2 / 2^5 > .05), without any event before the horizon,
    and if a run is censored before the horizon, because a shift of unknown times cannot be tested. There is no interval
    for equal D either: it would have width zero, and equal runs are no certainty.

    With such censored runs, the Kaplan-Meier curves of each exchange are compared, and p also requires that both runs
    of a seed are censored alike. Exchanges that leave a curve unknown are not counted, since they cannot be compared
    with the observed one, which is known.
    """
    times = np.array([arm.end_steps, baseline.end_steps], dtype=float)
    is_event = np.array([arm.is_event, baseline.is_event], dtype=bool)
    num_seeds = times.shape[1]
    if num_seeds == 0:
        return Estimate()
    arm_mean, baseline_mean = (restricted_mean(*runs, horizon) for runs in zip(times, is_event, strict=True))
    value = arm_mean - baseline_mean
    if math.isnan(value):
        return Estimate(n=num_seeds)
    # Which seeds exchange their runs (exchanges, seeds). The first exchange is the observed one: none.
    if num_seeds <= MAX_EXACT_SEEDS:
        is_exchanged = (np.arange(2**num_seeds)[:, None] >> np.arange(num_seeds) & 1).astype(bool)
    else:
        is_exchanged = np.zeros((1 + NUM_RANDOM_EXCHANGES, num_seeds), dtype=bool)
        is_exchanged[1:] = generator.integers(0, 2, size=(NUM_RANDOM_EXCHANGES, num_seeds))
    is_followed = bool(np.all(is_event | (times >= horizon)))
    if is_followed:
        restricted_times = np.minimum(times, horizon)
        differences = restricted_times[0] - restricted_times[1]
        permuted_values = np.where(is_exchanged, -differences, differences).mean(axis=1)
    else:
        is_in_arm = np.concatenate([~is_exchanged, is_exchanged], axis=1)
        permuted_arm_means, permuted_baseline_means = (
            _compute_restricted_means(is_member, times.ravel(), is_event.ravel(), horizon)
            for is_member in (is_in_arm, ~is_in_arm)
        )
        permuted_values = permuted_arm_means - permuted_baseline_means
    # The tolerance counts differences that are equal up to rounding.
    is_extreme = np.abs(permuted_values) >= abs(permuted_values[0]) - 1e-9 * horizon
    p = float(is_extreme[~np.isnan(permuted_values)].mean())
    is_invertible = is_followed and bool(np.any(is_event & (times < horizon)))
    bounds = _invert_sign_flips(differences, is_exchanged) if is_invertible else (NAN, NAN)
    return Estimate(value, *bounds, n=num_seeds, p=p)


def _compute_restricted_means(is_member: Booleans, end_steps: Floats, is_event: Booleans, horizon: float) -> Floats:
    """Compute restricted means of many samples of the same runs, is_member (samples, runs); NaN where unknown."""
    steps, fractions = _estimate_survival(is_member, end_steps, is_event & (end_steps < horizon))
    is_known = (fractions[:, -1] == 0) | (is_member & (end_steps >= horizon)).any(axis=1)
    return np.where(is_known, fractions @ np.diff([0.0, *steps, horizon]), NAN)


def _estimate_survival(is_member: Booleans, end_steps: Floats, is_event: Booleans) -> tuple[Floats, Floats]:
    """Estimate Kaplan-Meier curves of many samples of the same runs, is_member (samples, runs).

    Returns the steps (S,) with an event of any run, and the fractions (samples, 1 + S) at step 0 and after each.
    """
    steps = np.unique(end_steps[is_event])
    membership = is_member.astype(float)
    num_at_risk = membership @ (end_steps[:, None] >= steps)
    num_events = membership @ (is_event[:, None] & (end_steps[:, None] == steps))
    # Where no run is at risk there is no event, and the factor is 1.
    factors = 1 - num_events / np.maximum(num_at_risk, 1)
    return steps, np.cumprod(np.concatenate([np.ones((len(factors), 1)), factors], axis=1), axis=1)


def _invert_sign_flips(differences: Floats, is_flipped: Booleans) -> tuple[float, float]:
    """Find the smallest and largest shift that the sign flips (flips, seeds) do not reject; NaN if unbounded."""
    num_flips, num_seeds = is_flipped.shape
    num_flipped, sums = is_flipped.sum(axis=1), is_flipped @ differences
    is_proper = (num_flipped > 0) & (num_flipped < num_seeds)
    # Flipping no seed or all seeds is always as extreme as the observed mean, whatever the shift.
    means = np.full((2, num_flips), [[-np.inf], [np.inf]])
    means[0, is_proper] = sums[is_proper] / num_flipped[is_proper]
    means[1, is_proper] = (differences.sum() - sums[is_proper]) / (num_seeds - num_flipped[is_proper])
    means.sort(axis=0)
    # A shift is rejected if at most this many flips are as far from it. The product may be an integer up to rounding.
    num_rejecting = math.floor((1 - CONFIDENCE_LEVEL) * num_flips + 1e-9)
    low, high = float(np.sort(means[0])[num_rejecting]), float(np.sort(means[1])[num_flips - 1 - num_rejecting])
    return (low, high) if math.isfinite(low) and math.isfinite(high) and low < high else (NAN, NAN)

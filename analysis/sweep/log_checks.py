"""The checks of rl-doctor (PyPI rldoctor 0.2.0, detectors/ and stats.py) on the rows of a run so far.

Each is the condition under which the tool reports a severity of at least WARNING, the least at which its live monitor
speaks. With too few measurements the answer is False.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from analysis.stats.estimates import Floats

Measures = Mapping[str, Floats]
"""Measures of a run and `step`: arrays (rows,), NaN where not measured."""
Numbers = Mapping[str, float]
"""Thresholds and windows of a rule, by name."""
MIN_POINTS = 8
"""Fewer measurements have no trend."""
MIN_PLATEAU_POINTS = 12
MAX_P = 0.05


class Trend(NamedTuple):
    """A straight line through a series, and whether the series rises (1), falls (-1) or neither (0)."""

    slope: float
    intercept: float
    direction: int


def get_series(measures: Measures, name: str) -> tuple[Floats, Floats]:
    """Return the steps and values (n,) at which a measure has a value; empty if it is not measured."""
    values = measures.get(name, np.full(len(measures["step"]), np.nan))
    is_measured = np.isfinite(values)
    return measures["step"][is_measured], values[is_measured]


def fit_trend(steps: Floats, values: Floats) -> Trend:
    """Fit the line of Theil and Sen (medians), and test the order of the values.

    Mann and Kendall's test: S, the number of pairs that rise minus those that fall, against its normal distribution
    with the correction for ties. Without `MIN_POINTS` values nothing is significant. Source: Mann 1945.
    """
    count = len(values)
    if count < 2:
        return Trend(0.0, 0.0, 0)
    earlier, later = np.triu_indices(count, k=1)
    rises = values[later] - values[earlier]
    slope = float(np.median(rises / (steps[later] - steps[earlier])))
    ties = np.unique(values, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    score = max(abs(np.sign(rises).sum()) - 1, 0)  # minus 1: the correction for continuity
    is_significant = count >= MIN_POINTS and variance > 0 and math.erfc(score / math.sqrt(2 * variance)) < MAX_P
    direction = (1 if slope > 0 else -1) if is_significant else 0
    return Trend(slope, float(np.median(values) - slope * np.median(steps)), direction)


def take_first(values: Floats) -> Floats:
    """Take the first tenth of a series: 5 to 25 values."""
    return values[: min(max(5, round(0.1 * len(values))), 25)]


def take_last(values: Floats, fraction: float, minimum: int) -> Floats:
    """Take the last fraction of a series, at least `minimum` values."""
    return values[-max(minimum, round(fraction * len(values))) :]


def compute_mad(values: Floats) -> float:
    """Compute the median absolute deviation, scaled to the standard deviation of a normal distribution."""
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def has_high_median(measures: Measures, numbers: Numbers, measure: str) -> bool:
    """Check the median of a fraction, such as that of groups without spread, in the last quarter."""
    values = get_series(measures, measure)[1]
    return len(values) >= 2 and bool(np.median(take_last(values, 0.25, 5)) >= numbers["high"])


def is_entropy_exhausted(measures: Measures, numbers: Numbers) -> bool:
    """Check whether entropy is below a fraction of its first values, or heads there.

    It heads there if the trend of its recent half crosses that level within a quarter of the steps so far, or within as
    many steps as there were if the evaluation (or else the reward) does not rise.
    """
    steps, values = get_series(measures, "entropy")
    if len(values) < MIN_POINTS or (first := np.median(take_first(values))) <= 0:
        return False
    floor = numbers["low"] * first
    if np.median(take_last(values, 0.1, 3)) <= floor:
        return True
    half = max(len(steps) // 2, MIN_POINTS)
    remaining = project_crossing(steps[-half:], values[-half:], floor)
    if remaining is None or (remaining := int(remaining)) <= 0:
        return False
    horizon = 0.25 if get_recent_progress(measures) > 0 else 1.0
    return remaining <= horizon * (steps[-1] - steps[0])


def project_crossing(steps: Floats, values: Floats, level: float) -> float | None:
    """Project in how many steps a falling series reaches a level; None if its trend does not go there.

    The trend is linear, or exponential if all values are positive and its residuals have the smaller deviation.
    """
    trend = fit_trend(steps, values)
    distance = level - (trend.intercept + trend.slope * steps[-1])
    if (values > 0).all() and level > 0:
        log_trend = fit_trend(steps, np.log(values))
        log_fit = log_trend.intercept + log_trend.slope * steps
        if compute_mad(values - np.exp(log_fit)) < compute_mad(values - (trend.intercept + trend.slope * steps)):
            trend, distance = log_trend, np.log(level) - log_fit[-1]
    if trend.direction == 0 or trend.slope == 0 or distance * trend.slope < 0:
        return None
    return float(distance / trend.slope)


def get_recent_progress(measures: Measures) -> int:
    """Return the direction of the recent half of the evaluation, or of the reward if that has too few points."""
    for name in ("eval_score", "reward"):
        steps, values = get_series(measures, name)
        if len(values) >= MIN_POINTS:
            half = max(len(steps) // 2, MIN_POINTS)
            return fit_trend(steps[-half:], values[-half:]).direction
    return 0


def is_kl_drifting(measures: Measures, numbers: Numbers) -> bool:
    """Check whether the KL is very high, or high and accelerating, or has never left 0."""
    steps, values = get_series(measures, "kl")
    if len(values) < MIN_POINTS or not values.any():
        return False
    middle, level = len(values) // 2, np.median(take_last(values, 0.1, 3))
    has_halves = middle >= MIN_POINTS
    early = fit_trend(steps[:middle], values[:middle]).slope if has_halves else 0.0
    late = (
        fit_trend(steps[middle:], values[middle:]) if len(values) - middle >= MIN_POINTS else fit_trend(steps, values)
    )
    is_accelerating = late.slope > 1.5 * max(early, 0.0)
    is_high = level >= numbers["very_high"] or (is_accelerating and level >= numbers["high"])
    return bool(is_high or values.max() <= numbers["low"])


def has_sick_gradients(measures: Measures, numbers: Numbers) -> bool:
    """Check gradient norms: many that are exactly 0, a small fraction of the first ones, or at least three spikes."""
    values = get_series(measures, "grad_norm")[1]
    if len(values) < MIN_POINTS:
        return False
    first, last = np.median(take_first(values)), np.median(take_last(values, 0.1, 3))
    middle, deviation = np.median(values), compute_mad(values)
    is_spike = (values - middle > numbers["sigmas"] * deviation) & (values > numbers["ratio"] * max(middle, 1e-12))
    return bool(
        (values == 0).mean() >= numbers["zeros"]
        or (first > 0 and last <= numbers["low"] * first)
        or (deviation > 0 and is_spike.sum() >= 3)
    )


def has_plateau(measures: Measures, numbers: Numbers) -> bool:
    """Check whether the evaluation (or else the reward) falls or is flat, and was best long ago.

    Flat: its recent 35 % does not rise, and its trend moves less than `low` times the noise. Long ago: at least `high`
    of the steps so far.
    """
    for name in ("eval_score", "reward"):
        steps, values = get_series(measures, name)
        if len(values) >= MIN_PLATEAU_POINTS:
            break
    else:
        return False
    window = max(int(0.35 * len(values)), MIN_PLATEAU_POINTS)
    trend = fit_trend(steps[-window:], values[-window:])
    noise, move = compute_mad(values[-window:]), abs(trend.slope) * (steps[-1] - steps[-window])
    is_flat = trend.direction <= 0 and noise > 0 and move < numbers["low"] * noise
    since_best = (steps[-1] - steps[values.argmax()]) / max(steps[-1] - steps[0], 1)
    return bool((trend.direction < 0 or is_flat) and since_best >= numbers["high"])


def has_diverging_reward(measures: Measures, numbers: Numbers) -> bool:
    """Check whether the reward rises while the evaluation falls, or stays behind, or has the opposite ranks."""
    steps, scores = get_series(measures, "eval_score")
    reward_steps, rewards = get_series(measures, "reward")
    if len(scores) < 4 or len(rewards) < 2:
        return False
    rewards = np.interp(steps, reward_steps, rewards)
    if len(scores) >= 6 and correlate_ranks(rewards, scores) < 0:
        return True
    if fit_trend(steps, rewards).direction <= 0 or (direction := fit_trend(steps, scores).direction) > 0:
        return False
    gaps = _standardize(rewards) - _standardize(scores)
    return bool(direction < 0 or np.median(take_last(gaps, 0.34, 2)) >= numbers["high"])


def _standardize(values: Floats) -> Floats:
    """Divide the distance to the median of the first quarter by the deviation of all values."""
    distances = values - np.median(values[: max(len(values) // 4, 1)])
    return distances / (compute_mad(values) or np.abs(distances).max() or 1.0)


def has_length_hacking(measures: Measures, numbers: Numbers) -> bool:
    """Check whether replies grow with the reward, while the evaluation gains much less."""
    steps, lengths = get_series(measures, "response_length")
    reward_steps, rewards = get_series(measures, "reward")
    score_steps, scores = get_series(measures, "eval_score")
    if min(len(lengths), len(rewards)) < MIN_POINTS or len(scores) < 4:
        return False
    first, last = np.median(take_first(lengths)), np.median(take_last(lengths, 0.1, 3))
    growth = (last - first) / first if first > 0 else 0.0
    if growth < numbers["high"] or (
        correlate_ranks(lengths, np.interp(steps, reward_steps, rewards)) < numbers["correlation"]
    ):
        return False
    before, after = np.median(scores[: len(scores) // 4]), np.median(take_last(scores, 0.25, 1))
    is_rising = fit_trend(score_steps, scores).direction > 0
    return not is_rising or bool(after - before < 0.25 * growth * abs(before))


def correlate_ranks(x: Floats, y: Floats) -> float:
    """Compute Spearman's correlation; 0 if one series is constant."""
    from scipy import stats

    return 0.0 if np.ptp(x) == 0 or np.ptp(y) == 0 else float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])

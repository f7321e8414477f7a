"""Find the change of a series of measurements: when it starts to move, how far, and how certain that is.

The model is a ramp with independent noise: a first level until the onset, then a straight line to a second level, which
is reached at the end of the change. A sudden change is the shortest ramp. The model does not fit a series with several
changes in different directions: select a section of it, or fix the direction.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from analysis.stats.estimates import CONFIDENCE_LEVEL, NAN, Floats

NUM_PARAMETERS = 4
"""A ramp has two levels, an onset and an end."""
MIN_POINTS = 2 * NUM_PARAMETERS
"""With fewer points, too little is left to estimate the noise."""
MAX_POSITIONS = 100
"""Onset and end are searched among at most this many measurements, evenly spaced: 4,950 ramps."""
NUM_PERMUTATIONS = 999


class Change(NamedTuple):
    """A change of a series. NaN where unknown."""

    onset: float = NAN
    """The last step at the first level; `low` to `high` is its interval."""
    low: float = NAN
    high: float = NAN
    end: float = NAN
    """The first step at the second level."""
    before: float = NAN
    after: float = NAN
    """The two levels, in the unit of the series."""
    p: float = NAN
    """For the hypothesis that the series has no change."""


def find_change(steps: ArrayLike, values: ArrayLike, generator: np.random.Generator, direction: int = 0) -> Change:
    """Fit a ramp to `values` (n,), measured at ascending `steps` (n,) or NaN, by least squares.

    direction: 1 for changes upward only, -1 for changes downward only, 0 for both. Returns an empty `Change` for fewer
    than `MIN_POINTS` measurements, for a constant series, and if no ramp in this direction explains anything.

    The interval contains every onset whose best ramp is not rejected by an F test of its squared residuals. The
    threshold of F is multiplied by (1 + r) / (1 - r), where r is the correlation of consecutive residuals, if positive:
    correlated noise drifts, and a drift resembles a change. p is the fraction of permutations of blocks of about n **
    (1/3) consecutive values in which a ramp explains as much; the blocks preserve part of that correlation.

    >>> change = find_change(range(12), [5, 5, 5, 5, 4, 3, 2, 1, 1, 1, 1, 1], np.random.default_rng(0))
    >>> change.onset, change.end, round(change.before, 6), round(change.after, 6)
    (3.0, 7.0, 5.0, 1.0)
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    is_measured = ~np.isnan(y)
    x, y = x[is_measured], y[is_measured]
    if len(y) < MIN_POINTS or np.ptp(y) == 0:
        return Change()
    # At least two points at the first level, and one at the second.
    positions = np.unique(np.linspace(1, len(x) - 1, min(len(x) - 1, MAX_POSITIONS)).round().astype(int))
    starts, ends = (positions[index] for index in np.triu_indices(len(positions), 1))
    ramps = np.clip((x - x[starts, None]) / (x[ends] - x[starts])[:, None], 0, 1)
    shapes = ramps - ramps.mean(axis=1, keepdims=True)
    shapes /= np.linalg.norm(shapes, axis=1, keepdims=True)
    explained = _compute_explained(shapes, y[:, None], direction)[:, 0]
    best = int(np.argmax(explained))
    if explained[best] <= 0:
        return Change()
    after_minus_before, before = np.polyfit(ramps[best], y, 1)
    residuals = y - (before + after_minus_before * ramps[best])
    low, high = _find_interval(x, starts, explained, float(((y - y.mean()) ** 2).sum()), residuals)
    permuted_values = _permute_blocks(y, NUM_PERMUTATIONS, generator)
    permuted_maxima = _compute_explained(shapes, permuted_values.T, direction).max(axis=0)
    num_extreme = int((permuted_maxima >= explained[best] * (1 - 1e-9)).sum())
    return Change(
        onset=float(x[starts[best]]),
        low=low,
        high=high,
        end=float(x[ends[best]]),
        before=float(before),
        after=float(before + after_minus_before),
        p=(1 + num_extreme) / (1 + NUM_PERMUTATIONS),
    )


def _compute_explained(shapes: Floats, values: Floats, direction: int) -> Floats:
    """Compute the sums of squares (ramps, columns) that shapes (ramps, n) explain of `values` (n, columns)."""
    projections: Floats = shapes @ (values - values.mean(axis=0))
    # In place: with a permutation per column, each array has a million numbers.
    if direction:
        projections *= np.sign(direction)
        np.maximum(projections, 0.0, out=projections)
    return np.square(projections, out=projections)


def _find_interval(
    x: Floats, starts: Floats, explained: Floats, total: float, residuals: Floats
) -> tuple[float, float]:
    """Find the smallest and the largest onset that the F test of `find_change` does not reject."""
    correlation = max(0.0, float((residuals[1:] * residuals[:-1]).sum() / max((residuals**2).sum(), 1e-300)))
    inflation = (1 + correlation) / (1 - min(correlation, 0.9))
    df = len(x) - NUM_PARAMETERS
    limit = 1 + inflation * special.fdtri(1, df, CONFIDENCE_LEVEL) / df
    unexplained = np.maximum(total - explained, 1e-12 * total)
    onsets = x[starts[unexplained <= limit * unexplained.min()]]
    return float(onsets.min()), float(onsets.max())


def _permute_blocks(values: Floats, count: int, generator: np.random.Generator) -> Floats:
    """Shuffle `values` (n,) into `count` random orders, as (count, n).

    Blocks of consecutive values stay together; the first block starts at a random place, and the last is shorter.
    """
    places = np.arange(len(values))
    length = max(1, round(len(values) ** (1 / 3)))
    num_blocks = -(-len(values) // length)
    ranks = generator.permuted(np.tile(np.arange(num_blocks), (count, 1)), axis=1)
    order = np.argsort(ranks[:, places // length] * length + places % length, axis=1)
    starts = generator.integers(len(values), size=(count, 1))
    return values[(order + starts) % len(values)]

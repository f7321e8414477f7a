"""The dose at which half of the runs have an event, such as the learning rate at which half of them collapse.

Model: a run at the dose x (log10) has the event with probability 1 / (1 + exp(-b (x - e))). The edge e is the dose of
probability 1/2, and b > 0 is its sharpness. With few runs per dose, the outcomes are often separated: none has the
event up to some dose, and all have it beyond. The likelihood then grows without bound in b, so it is multiplied by the
root of the determinant of the Fisher information (Firth 1993, "Bias reduction of maximum likelihood estimates"; Heinze
and Schemper 2002, "A solution to the problem of separation in logistic regression"). Its maximum is finite for all
outcomes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from analysis.stats.estimates import CONFIDENCE_LEVEL, NAN, Estimate, Floats

SEARCH_MARGIN = 1.0
"""How far outside the doses a bound is searched, in decades. A bound further out is as good as none."""
MIN_SLOPE, MAX_SLOPE = 0.1, 1e3
"""Range of b, per decade. The smallest changes the odds by a tenth per decade; the largest is a step for any doses."""
_NUM_EDGES, _NUM_SLOPES, _NUM_SHIFTS = 61, 41, 25


class DoseCounts(NamedTuple):
    """Runs by dose: doses (D,) ascending in log10, num_events (D,), num_runs (D,) of at least 1 each."""

    doses: Floats
    num_events: Floats
    num_runs: Floats


def count_events(doses: ArrayLike, is_event: ArrayLike) -> DoseCounts:
    """Count the events of runs (N,) with positive doses (N,) by dose.

    >>> [field.tolist() for field in count_events([0.1, 1, 1], [False, True, False])]
    [[-1.0, 0.0], [0.0, 1.0], [1.0, 2.0]]
    """
    distinct_doses, indices = np.unique(np.asarray(doses, dtype=float), return_inverse=True)
    counts = [
        np.bincount(indices, weights=weights, minlength=len(distinct_doses)).astype(float)
        for weights in (np.asarray(is_event, dtype=float), np.ones(len(indices)))
    ]
    return DoseCounts(np.log10(distinct_doses), *counts)


def compute_log_likelihood(design: Floats, coefficients: Floats, counts: DoseCounts) -> Floats:
    """Compute the penalized log-likelihood (...,) of coefficients (..., K) under design (D, K), up to a constant.

    sum over doses of k log p + (n - k) log(1 - p), plus half of the log determinant of the Fisher information X' diag(n
    p (1 - p)) X, with k events in n runs and logit p = X coefficients.
    """
    logits = coefficients @ design.T
    log_p, log_q = special.log_expit(logits), special.log_expit(-logits)
    fit = log_p @ counts.num_events + log_q @ (counts.num_runs - counts.num_events)
    weights = counts.num_runs * np.exp(log_p + log_q)
    information = np.tensordot(weights, design[:, :, None] * design[:, None, :], axes=1)
    # Far from all doses the information underflows to 0. Its logarithm, -inf, is never a maximum.
    with np.errstate(divide="ignore"):
        return np.asarray(fit + np.linalg.slogdet(information)[1] / 2)


class _Model(NamedTuple):
    """Runs of one line, or of a line and a reference with the same slope and shifted edges.

    is_shifted (D,): 1 for the doses of the line, 0 for the reference's; None with a single line.
    """

    counts: DoseCounts
    is_shifted: Floats | None = None

    def compute(self, edge: Floats, log_slope: Floats, shift: Floats) -> Floats:
        """Compute the penalized log-likelihood of parameters that broadcast. edge: the reference's, if there is one."""
        slope = np.exp(log_slope)
        columns, terms = [np.ones_like(self.counts.doses), self.counts.doses], [-slope * edge, slope]
        if self.is_shifted is not None:
            columns, terms = [*columns, self.is_shifted], [*terms, -slope * shift]
        coefficients = np.stack(np.broadcast_arrays(*terms), axis=-1)
        return compute_log_likelihood(np.stack(columns, axis=1), coefficients, self.counts)

    @property
    def edge_bounds(self) -> tuple[float, float]:
        """Range in which the edge is searched."""
        return float(self.counts.doses.min()) - SEARCH_MARGIN, float(self.counts.doses.max()) + SEARCH_MARGIN

    @property
    def shift_bounds(self) -> tuple[float, float]:
        """Range in which the shift is searched."""
        low, high = self.edge_bounds
        return low - high, high - low


_SLOPE_BOUNDS = (math.log(MIN_SLOPE), math.log(MAX_SLOPE))


def _maximize(model: _Model, edge: float | None = None, shift: float | None = None) -> tuple[float, Floats]:
    """Maximize the penalized log-likelihood; return it with edge, log slope and shift. None: the parameter is free."""
    has_shift = model.is_shifted is not None
    bounds = [
        model.edge_bounds if edge is None else (edge, edge),
        _SLOPE_BOUNDS,
        model.shift_bounds if has_shift and shift is None else (shift or 0.0, shift or 0.0),
    ]
    sizes = (_NUM_EDGES, _NUM_SLOPES, _NUM_SHIFTS)
    axes = [np.linspace(*ends, size if ends[0] < ends[1] else 1) for ends, size in zip(bounds, sizes, strict=True)]
    # A grid search first, since the likelihood may have several maxima.
    values = model.compute(*np.meshgrid(*axes, indexing="ij", sparse=True))
    best = np.unravel_index(np.argmax(values), values.shape)
    start = np.array([axis[index] for axis, index in zip(axes, best, strict=True)])
    is_free = np.array([ends[0] < ends[1] for ends in bounds])

    def compute_loss(free_values: Floats) -> float:
        point = start.copy()
        point[is_free] = free_values
        return -float(model.compute(*point))

    options = {"xatol": 1e-5, "fatol": 1e-9}
    free_bounds = [ends for ends in bounds if ends[0] < ends[1]]
    result = optimize.minimize(compute_loss, start[is_free], method="Nelder-Mead", bounds=free_bounds, options=options)
    point = start.copy()
    point[is_free] = result.x
    return -float(result.fun), point


class EdgeEstimate(NamedTuple):
    """The edge of one line in log10 of the dose."""

    edge: Estimate
    """Edge with its interval. n: number of runs. A bound is NaN if the runs do not bound the edge on that side."""
    bracket_low: float = NAN
    bracket_high: float = NAN
    """For separated runs, the highest dose without (`bracket_low`) and the lowest with the event (`bracket_high`). The
    latter is NaN if no run has the event, the former if every run has it. Both are NaN if runs are not separated."""
    refusal: str = ""
    """Why there is no edge; empty if there is one."""

    @property
    def is_separated(self) -> bool:
        """Whether no run has the event up to some dose, and all runs have it beyond."""
        return not (math.isnan(self.bracket_low) and math.isnan(self.bracket_high))


def estimate_edge(counts: DoseCounts) -> EdgeEstimate:
    """Estimate the edge with a profile-likelihood interval, or with an exact one if the runs are separated.

    Profile: all edges whose penalized log-likelihood, maximized over the slope, is less than half of the chi-square
    quantile below the maximum. Exact: see `bound_edge`. Any edge between the two doses of the bracket fits separated
    runs equally well; the estimate is the middle in log10. Runs are treated as independent.

    There is no edge without an event, with an event in every run, with runs at fewer than two doses, if the event does
    not become more frequent with the dose, or if the maximum lies more than a decade outside the doses.
    """
    num_runs = int(counts.num_runs.sum())
    if num_runs == 0:
        return EdgeEstimate(Estimate(), refusal="no scored run")
    is_none, is_all = counts.num_events == 0, counts.num_events == counts.num_runs
    # Separated: doses without the event come first, and at all later ones every run has it.
    if np.all(is_none | is_all) and np.all(np.diff(is_all.astype(int)) >= 0):
        bracket_low = float(counts.doses[is_none][-1]) if is_none.any() else NAN
        bracket_high = float(counts.doses[is_all][0]) if is_all.any() else NAN
        edge = Estimate((bracket_low + bracket_high) / 2, *bound_edge(counts), n=num_runs)
        refusal = "" if is_none.any() and is_all.any() else "no event" if is_none.any() else "an event in every run"
        return EdgeEstimate(edge, bracket_low, bracket_high, refusal)
    if len(counts.doses) < 2:
        return EdgeEstimate(Estimate(n=num_runs), refusal="an edge needs two doses")
    model = _Model(counts)
    maximum, (edge_value, log_slope, _) = _maximize(model)
    if log_slope <= _SLOPE_BOUNDS[0] + 1e-3:
        refusal = "the frequency does not rise with the dose"
    elif not _is_inside(edge_value, model.edge_bounds):
        refusal = "the edge lies more than a decade outside the doses"
    else:
        bounds = _invert(lambda value: maximum - _maximize(model, edge=value)[0], edge_value, model.edge_bounds)
        return EdgeEstimate(Estimate(float(edge_value), *bounds, n=num_runs))
    return EdgeEstimate(Estimate(n=num_runs), refusal=refusal)


def bound_edge(counts: DoseCounts) -> tuple[float, float]:
    """Bound the edge exactly, in log10 of the dose, if the event never becomes rarer with the dose; NaN if unbounded.

    If the edge were at or below a dose, each run from that dose on would have the event with a probability of at least
    1/2, so the first m of them would all be without it with a probability of at most 2^-m. The lower bound is the
    highest dose for which this is rejected, as it then is for all lower doses: there is no event up to it, and from it
    on at least m runs precede the first dose with an event, with 2^-m <= (1 - .95) / 2 (six runs at 95 %). The upper
    bound mirrors it. No shape is assumed.
    """
    min_runs = math.ceil(-math.log2((1 - CONFIDENCE_LEVEL) / 2))
    low = _find_bound(counts.doses, counts.num_events, counts.num_runs, min_runs)
    num_survivors = counts.num_runs - counts.num_events
    return low, -_find_bound(-counts.doses[::-1], num_survivors[::-1], counts.num_runs[::-1], min_runs)


def _find_bound(doses: Floats, num_events: Floats, num_runs: Floats, min_runs: int) -> float:
    """Find the highest dose from which on at least `min_runs` runs precede the first dose with an event."""
    is_before = np.cumsum(num_events) == 0
    num_following = np.cumsum(num_runs[is_before][::-1])[::-1]
    return float(max(doses[is_before][num_following >= min_runs], default=NAN))


def estimate_shift(line: DoseCounts, reference: DoseCounts) -> Estimate:
    """Estimate the edge of a line minus a reference's, in decades, with a profile-likelihood interval.

    Both share a slope b, estimated from the runs of both. Runs are treated as independent: if runs of one seed vary
    together, as with common levels, the interval is wider than needed. n: number of runs. If all or none of the runs of
    one side have the event, its edge is bounded on one side only: then the estimate and one bound are NaN. Both bounds
    are NaN if nothing bounds the difference.
    """
    num_runs = int(line.num_runs.sum() + reference.num_runs.sum())
    has_events = [bool(counts.num_events.any()) for counts in (line, reference)]
    has_survivors = [bool((counts.num_events < counts.num_runs).any()) for counts in (line, reference)]
    has_low, has_high = has_survivors[0] and has_events[1], has_events[0] and has_survivors[1]
    if not (has_low or has_high):
        return Estimate(n=num_runs)
    counts = DoseCounts(*(np.concatenate(fields) for fields in zip(line, reference, strict=True)))
    is_shifted = np.repeat([1.0, 0.0], [len(line.doses), len(reference.doses)])
    model = _Model(counts, is_shifted)
    maximum, (_, log_slope, shift) = _maximize(model)
    if log_slope <= _SLOPE_BOUNDS[0] + 1e-3:
        return Estimate(n=num_runs)
    low, high = _invert(lambda value: maximum - _maximize(model, shift=value)[0], shift, model.shift_bounds)
    value = float(shift) if has_low and has_high and _is_inside(shift, model.shift_bounds) else NAN
    return Estimate(value, low if has_low else NAN, high if has_high else NAN, n=num_runs)


def _is_inside(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] + 1e-3 < value < bounds[1] - 1e-3


def _invert(compute_loss: Callable[[float], float], value: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """Find the values on either side at which the log-likelihood is half of a chi-square quantile below its maximum.

    compute_loss: the distance from the maximum, which is at `value`. NaN on a side without such a value in `bounds`.
    """
    limit = float(special.gammaincinv(0.5, CONFIDENCE_LEVEL))  # half of the quantile of chi^2(1)
    return tuple(  # type: ignore[return-value]
        float(optimize.brentq(lambda x: compute_loss(x) - limit, *sorted((bound, value)), xtol=1e-4))
        if abs(bound - value) > 1e-3 and compute_loss(bound) > limit
        else NAN
        for bound in bounds
    )

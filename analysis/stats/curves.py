"""Learning curves: success as a sigmoid of cost, with intervals over seeds. Random generators are arguments.

The last validation of a run depends on where its training was cut off. A curve separates the ceiling that an arm
approaches from the cost at which it gets halfway, so that "ends higher" and "gets there sooner" are two statements.
Cost is any cumulative count: optimizer steps, or tokens.

Where a curve would not be meaningful, none is fitted: the result is NaN, with a sentence that says why.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from analysis.stats.estimates import CONFIDENCE_LEVEL, NAN, Estimate, Floats, SampleStats, welch_t_test
from trainable.runs.history import find_collapse

# One more than the parameters of a single curve.
MIN_VALIDATIONS = 5
# A bootstrap of 4 seeds has only 35 different samples, and a t interval with 3 degrees of freedom is rarely useful.
MIN_BOOTSTRAP_SEEDS = 5
# At a rate of exactly 0 or 1 the likelihood of any other outcome is 0, and its slope is infinite.
RATE_BOUNDS = (1e-4, 1 - 1e-4)
STEEPNESS_BOUNDS = (0.25, 16.0)
# The midpoint is searched up to this factor beyond both ends of the measured costs.
MIDPOINT_MARGIN = 10.0
# Starts of the search: the best few of a grid of midpoints and steepnesses.
NUM_GRID_MIDPOINTS, GRID_STEEPNESSES, NUM_STARTS = 8, (1.0, 2.5, 6.0), 3
TEST_LEVEL = 0.05


class Validations(NamedTuple):
    """Validations of one arm: S seeds with V validations each. Costs and trials are broadcast to (S, V)."""

    costs: ArrayLike
    """Optimizer steps or tokens until the validation, 0 before training."""
    successes: ArrayLike
    """(S, V) number of successful episodes, NaN where a validation is missing."""
    num_trials: ArrayLike
    """Number of episodes."""


class CurveFit(NamedTuple):
    """Curves of the S seeds of an arm; NaN if `refusal`, a sentence, says why there are none."""

    start: float
    """Success at cost 0."""
    midpoint: float
    """Cost at which half of the gain is reached."""
    steepness: float
    """The exponent."""
    ceilings: Floats
    """(S,) success that each seed approaches."""
    covariance: Floats
    """(3 + S, 3 + S) for start, log midpoint, log steepness and ceilings, from Fisher information and dispersion."""
    dispersion: float
    """Variance of validations around the curves in units of the binomial variance, at least 1."""
    first_cost: float
    """Smallest measured cost above 0."""
    refusal: str = ""


class CurveEstimates(NamedTuple):
    """Ceiling and midpoint of an arm with intervals over seeds. `se` of the midpoint refers to its logarithm."""

    ceiling: Estimate
    midpoint: Estimate
    fit: CurveFit
    refusal: str = ""


def fit_curves(validations: Validations) -> CurveFit:
    """Fit the curves of an arm, whose seeds share y0, C and B, while each has its individual ceiling A.

    Success at the cost c is y(c) = y0 + (A - y0) / (1 + (C / c)^B), and y0 at c = 0, with the start y0, the midpoint C
    and the steepness B. Source: Khatri et al. 2025 (arXiv 2510.13786). As B grows, the curve becomes a step at C.

    Maximizes the binomial log-likelihood, sum of k log y(c) + (n - k) log(1 - y(c)) over validations with k successes
    in n trials, from several starts. The ceilings are not shrunk toward each other. Their mean is the ceiling of the
    arm.

    Refused, in this order, by tests at 5 % whose likelihood ratios are divided by the dispersion:

    1. too few validations: a seed has fewer than 5 at different costs.
    2. collapse: `find_collapse` names a seed. It is not left out, because the others would overstate the arm.
    3. no gain: a constant is not rejected, or the mean of the ceilings is not above y0.
    4. ceiling not identified: a midpoint at or beyond the largest cost of a seed is not rejected (one-sided). Such a
       curve bends only where nothing was measured, and every higher ceiling fits with a later midpoint.
    5. no gain: the mean of two or more ceilings is less than 1.64 standard errors above y0. The seeds diverge, but
       not upward.
    """
    counts = _make_counts(validations)
    num_seeds = len(counts.successes)
    if refusal := _refuse_validations(counts):
        return _refuse_fit(num_seeds, refusal)
    low, high = _find_log_range(counts)
    parameters, log_likelihood = _maximize(counts, _find_starts(counts, low, high))
    dispersion, covariance = _estimate_noise(parameters, counts)
    if refusal := _refuse_curve(parameters, counts, log_likelihood, dispersion, covariance):
        return _refuse_fit(num_seeds, refusal)
    start, midpoint, steepness = float(parameters[0]), math.exp(parameters[1]), math.exp(parameters[2])
    return CurveFit(start, midpoint, steepness, parameters[3:], covariance, dispersion, first_cost=math.exp(low))


def estimate_curve(validations: Validations, generator: np.random.Generator, num_draws: int = 500) -> CurveEstimates:
    """Estimate ceiling A and midpoint C of an arm, with intervals from a bootstrap of its n seeds.

    A +- t(n-1) s and C exp(+- t(n-1) s'), with s^2 = n / (n - 1) times the variance of A (of log C) over bootstrap
    samples of seeds. With fewer than 5 seeds there is no interval. Bootstrap quantiles are not used: with so few seeds
    they are too narrow, because a sample of n seeds varies less than n new seeds do (Hesterberg 2015).

    If C lies before the first validation of the training, C is refused, and A is kept.
    """
    fit = fit_curves(validations)
    num_seeds = len(fit.ceilings)
    if fit.refusal:
        return CurveEstimates(Estimate(n=num_seeds), Estimate(n=num_seeds), fit, fit.refusal)
    ceiling_se, log_midpoint_se = _bootstrap_standard_errors(fit, _make_counts(validations), generator, num_draws)
    df = float(num_seeds - 1) if num_seeds >= MIN_BOOTSTRAP_SEEDS else NAN
    t = float(special.stdtrit(df, 0.5 + CONFIDENCE_LEVEL / 2))
    value = float(fit.ceilings.mean())
    # np.clip keeps NaN.
    low, high = np.clip([value - t * ceiling_se, value + t * ceiling_se], 0, 1)
    ceiling = Estimate(value, float(low), float(high), num_seeds, ceiling_se, df)
    if fit.midpoint < fit.first_cost:
        refusal = f"Midpoint not identified: half of the gain is reached before the first cost, {fit.first_cost:.4g}."
        return CurveEstimates(ceiling, Estimate(n=num_seeds), fit, refusal)
    factor = math.exp(t * log_midpoint_se)
    bounds = fit.midpoint / factor, fit.midpoint * factor
    return CurveEstimates(ceiling, Estimate(fit.midpoint, *bounds, num_seeds, log_midpoint_se, df), fit)


def compare_curves(arm: CurveEstimates, baseline: CurveEstimates) -> tuple[Estimate, Estimate, str]:
    """Compare two arms: difference of ceilings, arm minus baseline, and ratio of midpoints, arm over baseline.

    Also returns why there is no comparison, or an empty text. p of the ratio is for a true ratio of 1, and its `se`
    refers to its logarithm.

    Welch's t intervals from the bootstrap standard errors, for the ratio on logarithms. A ratio below 1 means that the
    arm needs less cost for half of its gain. Seeds are not paired, which makes the intervals too wide, not too narrow,
    if a seed helps both arms alike. Where an arm is refused, the comparison is NaN.
    """
    difference = welch_t_test(_summarize(arm.ceiling), _summarize(baseline.ceiling))
    log_midpoints = [side.midpoint._replace(value=math.log(side.midpoint.value)) for side in (arm, baseline)]
    ratio = welch_t_test(_summarize(log_midpoints[0]), _summarize(log_midpoints[1]))
    ratio = ratio._replace(value=math.exp(ratio.value), low=math.exp(ratio.low), high=math.exp(ratio.high))
    refusals = [f"{name}: {side.refusal}" for name, side in (("Arm", arm), ("Baseline", baseline)) if side.refusal]
    return difference, ratio, " ".join(refusals)


def _summarize(estimate: Estimate) -> SampleStats:
    """Make up a sample whose mean has the standard error of an estimate over seeds."""
    return SampleStats(estimate.value, estimate.se * math.sqrt(estimate.n), estimate.n)


class _Counts(NamedTuple):
    """Validations in the order of their costs (S, V); a missing one has 0 trials. weights (S,): copies of each seed."""

    log_costs: Floats
    successes: Floats
    num_trials: Floats
    weights: Floats


def _make_counts(validations: Validations) -> _Counts:
    successes = np.atleast_2d(np.asarray(validations.successes, dtype=float))
    costs, num_trials = (
        np.broadcast_to(np.asarray(values, dtype=float), successes.shape)
        for values in (validations.costs, validations.num_trials)
    )
    is_missing = np.isnan(successes)
    # Missing validations come last. Their cost does not matter; 1 has a finite logarithm.
    order = np.argsort(np.where(is_missing, np.inf, costs), axis=1, kind="stable")
    columns = (np.where(is_missing, fill, values) for fill, values in ((1, costs), (0, successes), (0, num_trials)))
    costs, successes, num_trials = (np.take_along_axis(values, order, axis=1) for values in columns)
    with np.errstate(divide="ignore"):  # before training the logarithm is -inf, and its sigmoid 0
        log_costs = np.log(costs)
    return _Counts(log_costs, successes, num_trials, np.ones(len(successes)))


def _find_log_range(counts: _Counts) -> tuple[float, float]:
    """Return the logarithms of the smallest cost above 0 and of the largest cost."""
    log_costs = counts.log_costs[(counts.num_trials > 0) & np.isfinite(counts.log_costs)]
    return float(log_costs.min()), float(log_costs.max())


def _refuse_validations(counts: _Counts) -> str:
    """Say what is wrong with the validations themselves; empty if they can be fitted."""
    rows = [
        (np.exp(log_costs[trials > 0]), successes[trials > 0], trials[trials > 0])
        for log_costs, successes, trials, _ in zip(*counts, strict=True)
    ]
    num_short = sum(len(np.unique(costs)) < MIN_VALIDATIONS for costs, _, _ in rows)
    if num_short or not rows:
        short = f"{num_short} of {len(rows)} seeds have fewer than {MIN_VALIDATIONS} at different costs"
        return f"Too few validations: {short}."
    collapse_costs = [
        find_collapse(zip(costs, successes / trials, trials, strict=True)) for costs, successes, trials in rows
    ]
    num_collapsed = np.count_nonzero(np.isfinite(collapse_costs))
    if num_collapsed:
        return (
            f"Collapse: {num_collapsed} of {len(rows)} seeds fall below half of their running maximum at two "
            f"validations in a row, the first at cost {min(collapse_costs):.4g}."
        )
    return ""


def _refuse_fit(num_seeds: int, refusal: str) -> CurveFit:
    size = 3 + num_seeds
    return CurveFit(NAN, NAN, NAN, np.full(num_seeds, NAN), np.full((size, size), NAN), NAN, NAN, refusal)


def _estimate_noise(parameters: Floats, counts: _Counts) -> tuple[float, Floats]:
    """Estimate the dispersion of the validations around the curves, and the covariance of the parameters."""
    rates, jacobian = _differentiate(parameters, counts)
    variances = rates * (1 - rates)
    residuals = counts.successes - counts.num_trials * rates
    chi_square = float(np.sum(residuals**2 / (np.maximum(counts.num_trials, 1) * variances)))
    dispersion = max(1.0, chi_square / (np.count_nonzero(counts.num_trials) - len(parameters)))
    information = np.einsum("isv,sv,jsv->ij", jacobian, counts.num_trials / variances, jacobian)
    # A direction without information, such as the steepness of a step, gets no variance.
    return dispersion, dispersion * np.linalg.pinv(information, hermitian=True)


def _refuse_curve(
    parameters: Floats, counts: _Counts, log_likelihood: float, dispersion: float, covariance: Floats
) -> str:
    """Say why the most likely curve is not meaningful; empty if it is."""
    start, ceilings = float(parameters[0]), parameters[3:]
    constant = float(np.clip(counts.successes.sum() / counts.num_trials.sum(), *RATE_BOUNDS))
    constant_log_likelihood = _compute_log_likelihood(np.full_like(counts.successes, constant), counts)
    ratio = 2 * (log_likelihood - constant_log_likelihood) / dispersion
    # When rates reach their bounds, rounding makes the ratio slightly negative.
    if special.chdtrc(len(parameters) - 1, max(ratio, 0.0)) > TEST_LEVEL:
        return f"No gain: a constant success of {constant:.3g} fits all validations."
    gain = float(ceilings.mean()) - start
    if gain <= 0:
        return f"No gain: success falls from its start, {start:.3g}."
    z = float(special.ndtri(1 - TEST_LEVEL))
    end = float(np.where(counts.num_trials > 0, counts.log_costs, -np.inf).max(axis=1).min())
    late_starts = _find_starts(counts, end, end + math.log(MIDPOINT_MARGIN))
    _, late_log_likelihood = _maximize(counts, late_starts, min_log_midpoint=end)
    if 2 * (log_likelihood - late_log_likelihood) / dispersion < z**2:
        return (
            "Ceiling not identified: half of the gain may be reached only at or beyond the largest cost of a seed, "
            f"{math.exp(end):.4g}."
        )
    num_seeds = len(ceilings)
    if num_seeds > 1 and gain <= z * math.sqrt(covariance[0, 0] + ceilings.var(ddof=1) / num_seeds):
        return f"No gain: the ceiling, {ceilings.mean():.3g}, is not clearly above the start, {start:.3g}."
    return ""


def _differentiate(parameters: Floats, counts: _Counts) -> tuple[Floats, Floats]:
    """Compute success rates (S, V) and their derivatives by each parameter (3 + S, S, V)."""
    start, log_midpoint, log_steepness = parameters[:3]
    steepness, ceilings = math.exp(log_steepness), parameters[3:, None]
    # At cost 0, minus infinity times a slope of 0 would be NaN.
    exponents = steepness * np.maximum(counts.log_costs - log_midpoint, -700)
    progress = special.expit(exponents)
    slopes = (ceilings - start) * progress * (1 - progress)
    jacobian = np.zeros((len(parameters), *progress.shape))
    jacobian[:3] = 1 - progress, -steepness * slopes, exponents * slopes
    seeds = np.arange(len(progress))
    jacobian[3 + seeds, seeds] = progress
    return start + (ceilings - start) * progress, jacobian


def _compute_log_likelihood(rates: Floats, counts: _Counts) -> float:
    failures = counts.num_trials - counts.successes
    log_likelihoods = counts.successes * np.log(rates) + failures * np.log1p(-rates)
    return float(counts.weights @ log_likelihoods.sum(axis=1))


def _compute_loss(parameters: Floats, counts: _Counts) -> tuple[float, Floats]:
    """Compute the negative log-likelihood per trial, and its gradient."""
    rates, jacobian = _differentiate(parameters, counts)
    scores = counts.weights[:, None] * (counts.successes - counts.num_trials * rates) / (rates * (1 - rates))
    num_trials = float(counts.weights @ counts.num_trials.sum(axis=1))
    gradient = jacobian.reshape(len(parameters), -1) @ scores.ravel()
    return -_compute_log_likelihood(rates, counts) / num_trials, -gradient / num_trials


def _find_starts(counts: _Counts, low: float, high: float) -> list[Floats]:
    """Choose starts among curves through the first and last validations, with midpoints in a log range."""
    success = counts.successes / np.maximum(counts.num_trials, 1)
    last = np.count_nonzero(counts.num_trials, axis=1) - 1
    start = float(success[:, 0].mean())
    seeds = np.arange(len(last))
    last_success, last_log_cost = success[seeds, last], counts.log_costs[seeds, last]
    starts = []
    for log_midpoint in np.linspace(low, high, NUM_GRID_MIDPOINTS):
        for steepness in GRID_STEEPNESSES:
            ceilings = start + (last_success - start) / special.expit(steepness * (last_log_cost - log_midpoint))
            # Away from the bounds, where the likelihood is flat or steep.
            rates = np.clip([start, *ceilings], 0.01, 0.99)
            starts.append(np.array([rates[0], log_midpoint, math.log(steepness), *rates[1:]]))
    return sorted(starts, key=lambda parameters: _compute_loss(parameters, counts)[0])[:NUM_STARTS]


def _maximize(counts: _Counts, starts: list[Floats], min_log_midpoint: float = -math.inf) -> tuple[Floats, float]:
    """Find the parameters with the largest log-likelihood within the bounds. Also return that log-likelihood."""
    low, high = _find_log_range(counts)
    margin = math.log(MIDPOINT_MARGIN)
    midpoint_bounds = (max(low - margin, min_log_midpoint), high + margin)
    rate_bounds = [RATE_BOUNDS] * len(counts.successes)
    bounds = [RATE_BOUNDS, midpoint_bounds, tuple(np.log(STEEPNESS_BOUNDS)), *rate_bounds]
    options = {"ftol": 1e-12, "maxiter": 300}
    solutions = [
        optimize.minimize(_compute_loss, start, (counts,), "SLSQP", jac=True, bounds=bounds, options=options)
        for start in starts
    ]
    parameters = min(solutions, key=lambda solution: solution.fun).x
    return parameters, _compute_log_likelihood(_differentiate(parameters, counts)[0], counts)


def _bootstrap_standard_errors(
    fit: CurveFit, counts: _Counts, generator: np.random.Generator, num_draws: int
) -> tuple[float, float]:
    """Bootstrap the standard errors of the ceiling and the log midpoint over seeds; NaN with too few seeds."""
    num_seeds = len(fit.ceilings)
    if num_seeds < MIN_BOOTSTRAP_SEEDS:
        return NAN, NAN
    start = np.array([fit.start, math.log(fit.midpoint), math.log(fit.steepness), *fit.ceilings])
    copies = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=num_draws)
    # 5 seeds have only 126 different samples: each is fitted once.
    samples, num_repeats = np.unique(copies, axis=0, return_counts=True)
    estimates = []
    for sample in samples:
        # A seed that is not drawn has no weight, and its ceiling does not move.
        parameters, _ = _maximize(counts._replace(weights=sample.astype(float)), [start])
        estimates.append((sample @ parameters[3:] / num_seeds, parameters[1]))
    variances = np.cov(np.transpose(estimates), fweights=num_repeats, ddof=0).diagonal()
    ceiling_se, log_midpoint_se = np.sqrt(variances * num_seeds / (num_seeds - 1))
    return float(ceiling_se), float(log_midpoint_se)

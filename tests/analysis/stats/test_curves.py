"""Tests of learning curves: literal likelihoods, recovered parameters, identities, refusals."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from analysis.stats import curves
from analysis.stats.curves import CurveEstimates, CurveFit, Validations
from analysis.stats.estimates import Estimate
from tests.strategies.examples import draw_examples

TRUTH = {"start": 0.2, "ceiling": 0.7, "midpoint": 30.0, "steepness": 2.0}


def compute_rate(cost: float, start: float, ceiling: float, midpoint: float, steepness: float) -> float:
    return start + (ceiling - start) / (1 + (midpoint / cost) ** steepness) if cost > 0 else start


def simulate_arm(
    generator: np.random.Generator,
    num_seeds: int = 5,
    num_validations: int = 12,
    num_trials: int = 512,
    ceiling_std: float = 0.05,
    **truth: float,
) -> Validations:
    """Validations from cost 0 to 100, with ceilings that differ between seeds."""
    parameters = TRUTH | truth
    costs = np.linspace(0, 100, num_validations)
    ceilings = np.clip(generator.normal(parameters.pop("ceiling"), ceiling_std, num_seeds), 0, 1)
    rates = [[compute_rate(cost, ceiling=ceiling, **parameters) for cost in costs] for ceiling in ceilings]
    return Validations(costs, generator.binomial(num_trials, rates), num_trials)


def make_exact_arm(ceilings: list[float], num_validations: int = 12) -> Validations:
    """Validations whose successes are exactly as many as their curves expect."""
    costs = np.linspace(0, 100, num_validations)
    rates = [[compute_rate(cost, **TRUTH | {"ceiling": ceiling}) for cost in costs] for ceiling in ceilings]
    return Validations(costs, 512 * np.array(rates), 512)


def compute_negative_log_likelihood(parameters: np.ndarray, validations: Validations) -> float:
    start, log_midpoint, log_steepness, *ceilings = parameters
    total = 0.0
    for ceiling, successes in zip(ceilings, np.asarray(validations.successes), strict=True):
        for cost, count in zip(np.asarray(validations.costs), successes, strict=True):
            rate = compute_rate(cost, start, ceiling, math.exp(log_midpoint), math.exp(log_steepness))
            trials = float(np.asarray(validations.num_trials))
            total -= count * math.log(rate) + (trials - count) * math.log(1 - rate)
    return total


def list_parameters(fit: CurveFit) -> np.ndarray:
    return np.array([fit.start, math.log(fit.midpoint), math.log(fit.steepness), *fit.ceilings])


def make_estimates(ceiling: float, midpoint: float, num_seeds: int = 5, refusal: str = "") -> CurveEstimates:
    fit = CurveFit(0.2, midpoint, 2.0, np.full(num_seeds, ceiling), np.eye(3 + num_seeds), 1.0, 10.0, refusal)
    values = (Estimate(ceiling, n=num_seeds, se=0.02), Estimate(midpoint, n=num_seeds, se=0.1))
    return CurveEstimates(*values, fit, refusal)


def test_no_other_search_finds_a_larger_likelihood_and_expected_successes_give_back_their_curves() -> None:
    validations = simulate_arm(np.random.default_rng(0), num_seeds=3)
    parameters = list_parameters(curves.fit_curves(validations))
    fitted_value = compute_negative_log_likelihood(parameters, validations)
    search = optimize.minimize(
        compute_negative_log_likelihood, parameters * 1.02, args=(validations,), method="Nelder-Mead", tol=1e-6
    )
    assert fitted_value <= search.fun + 1e-6
    assert parameters == pytest.approx(search.x, abs=1e-2)
    fit = curves.fit_curves(make_exact_arm([0.6, 0.7, 0.8]))
    assert (fit.start, fit.midpoint, fit.steepness) == pytest.approx((0.2, 30, 2), rel=1e-3)
    assert fit.ceilings == pytest.approx([0.6, 0.7, 0.8], rel=1e-3)
    assert (fit.dispersion, fit.refusal) == (1, "")


def test_covariance_is_the_inverse_of_the_curvature() -> None:
    # With expected successes, the observed information is the expected one.
    validations = make_exact_arm([0.6, 0.8])
    fit = curves.fit_curves(validations)
    parameters, step = list_parameters(fit), 1e-3
    size = len(parameters)
    hessian = np.zeros((size, size))
    for row in range(size):
        for column in range(size):
            for first, second in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                corner = parameters + step * (first * np.eye(size)[row] + second * np.eye(size)[column])
                value = compute_negative_log_likelihood(corner, validations)
                hessian[row, column] += first * second * value / (4 * step**2)
    assert fit.covariance @ hessian == pytest.approx(np.eye(size), abs=0.02)


def test_dispersion_is_the_chi_square_per_degree_of_freedom() -> None:
    generator = np.random.default_rng(1)
    costs = np.linspace(0, 100, 12)
    rates = [compute_rate(cost, **TRUTH) for cost in costs] + generator.normal(0, 0.06, (4, 12))
    successes = generator.binomial(512, np.clip(rates, 0, 1))
    fit = curves.fit_curves(Validations(costs, successes, 512))
    curve = (fit.midpoint, fit.steepness)
    fitted_rates = np.array([[compute_rate(cost, fit.start, top, *curve) for cost in costs] for top in fit.ceilings])
    residuals = (successes / 512 - fitted_rates) / np.sqrt(fitted_rates * (1 - fitted_rates) / 512)
    assert fit.dispersion == pytest.approx((residuals**2).sum() / (4 * 12 - 7))
    assert fit.dispersion > 3


@given(st.floats(1e-3, 1e6))
@draw_examples(10)
def test_scaled_costs_scale_the_midpoint_only(factor: float) -> None:
    validations = simulate_arm(np.random.default_rng(2), num_seeds=2)
    fit = curves.fit_curves(validations)
    scaled_fit = curves.fit_curves(validations._replace(costs=np.asarray(validations.costs) * factor))
    assert scaled_fit.midpoint == pytest.approx(factor * fit.midpoint, rel=1e-4)
    assert scaled_fit.first_cost == pytest.approx(factor * fit.first_cost)
    assert [scaled_fit.start, *scaled_fit.ceilings] == pytest.approx([fit.start, *fit.ceilings], rel=1e-4)


def test_neither_the_order_of_validations_nor_a_missing_one_matters() -> None:
    validations = simulate_arm(np.random.default_rng(3), num_seeds=3)
    costs, successes = np.tile(np.asarray(validations.costs), (3, 1)), np.asarray(validations.successes, dtype=float)
    fit = curves.fit_curves(validations)
    padding = np.full((3, 1), np.nan)
    padded_fit = curves.fit_curves(
        Validations(np.hstack([padding, costs[:, ::-1]]), np.hstack([padding, successes[:, ::-1]]), 512)
    )
    assert list_parameters(padded_fit) == pytest.approx(list_parameters(fit))
    reordered_fit = curves.fit_curves(validations._replace(successes=successes[[2, 0, 1]]))
    assert reordered_fit.ceilings == pytest.approx(fit.ceilings[[2, 0, 1]], rel=1e-4)
    # A seed that ends earlier keeps a ceiling of its own.
    successes[1, 8:] = np.nan
    shorter_fit = curves.fit_curves(validations._replace(successes=successes))
    assert shorter_fit.refusal == ""
    assert shorter_fit.ceilings == pytest.approx(fit.ceilings, abs=0.05)


@pytest.mark.slow
def test_intervals_cover_the_truth() -> None:
    generator, simulations = np.random.default_rng(4), 20
    estimates = [curves.estimate_curve(simulate_arm(generator), generator, 50) for _ in range(simulations)]
    for name, truth in (("ceiling", 0.7), ("midpoint", 30)):
        intervals: list[Estimate] = [getattr(estimate, name) for estimate in estimates]
        coverage = np.mean([interval.low <= truth <= interval.high for interval in intervals])
        assert coverage >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / simulations)
        # Intervals that hold everything would cover the truth too.
        assert np.median([interval.high - interval.low for interval in intervals]) < truth / 2


@pytest.mark.long
def test_standard_errors_are_those_of_refitted_bootstrap_samples() -> None:
    validations = simulate_arm(np.random.default_rng(6))
    estimates = curves.estimate_curve(validations, np.random.default_rng(7), 25)
    samples = np.random.default_rng(7).multinomial(5, np.full(5, 0.2), size=25)
    refits = [
        curves.fit_curves(validations._replace(successes=np.repeat(validations.successes, sample, axis=0)))
        for sample in samples
    ]
    ceilings, log_midpoints = [fit.ceilings.mean() for fit in refits], [math.log(fit.midpoint) for fit in refits]
    expected = [math.sqrt(5 / 4) * np.std(values) for values in (ceilings, log_midpoints)]
    assert [estimates.ceiling.se, estimates.midpoint.se] == pytest.approx(expected, rel=1e-2)
    t = scipy_stats.t.ppf(0.975, 4)
    ceiling, midpoint = estimates.ceiling, estimates.midpoint
    assert (ceiling.low, ceiling.high) == pytest.approx(
        (ceiling.value - t * ceiling.se, ceiling.value + t * ceiling.se)
    )
    bounds = midpoint.value * math.exp(-t * midpoint.se), midpoint.value * math.exp(t * midpoint.se)
    assert (midpoint.low, midpoint.high) == pytest.approx(bounds)


@pytest.mark.parametrize("num_seeds", [1, 4])
def test_few_seeds_have_no_interval(num_seeds: int) -> None:
    validations = simulate_arm(np.random.default_rng(8), num_seeds)
    estimates = curves.estimate_curve(validations, np.random.default_rng(0))
    assert estimates.refusal == ""
    assert estimates.ceiling.value == pytest.approx(0.7, abs=0.1)
    assert estimates.midpoint.value == pytest.approx(30, abs=10)
    assert np.isnan([*estimates.ceiling[1:3], *estimates.midpoint[1:3]]).all()
    difference, ratio, _ = curves.compare_curves(estimates, estimates)
    assert (difference.value, ratio.value) == (0, 1)
    assert np.isnan([*difference[1:3], *ratio[1:3]]).all()


def test_comparison_is_welch_of_ceilings_and_of_log_midpoints() -> None:
    arm, baseline = make_estimates(0.75, 20, 5), make_estimates(0.7, 40, 8)
    difference, ratio, _ = curves.compare_curves(arm, baseline)
    assert (difference.value, ratio.value, ratio.n) == (pytest.approx(0.05), pytest.approx(0.5), 13)
    for estimate, means, se in ((difference, (0.75, 0.7), 0.02), (ratio, (math.log(20), math.log(40)), 0.1)):
        expected = scipy_stats.ttest_ind_from_stats(
            means[0], se * math.sqrt(5), 5, means[1], se * math.sqrt(8), 8, equal_var=False
        )
        assert estimate.p == pytest.approx(expected.pvalue)
    half_width = scipy_stats.t.ppf(0.975, ratio.df) * math.sqrt(2) * 0.1
    assert (ratio.low, ratio.high) == pytest.approx((0.5 * math.exp(-half_width), 0.5 * math.exp(half_width)))
    exchanged_difference, exchanged_ratio, _ = curves.compare_curves(baseline, arm)
    assert exchanged_difference[:3] == pytest.approx((-difference.value, -difference.high, -difference.low))
    assert exchanged_ratio[:3] == pytest.approx((1 / ratio.value, 1 / ratio.high, 1 / ratio.low))


@pytest.mark.long
def test_comparison_separates_a_cheaper_arm_from_a_better_one() -> None:
    generator = np.random.default_rng(9)
    baseline, cheaper_arm, better_arm = (
        curves.estimate_curve(simulate_arm(generator, **truth), generator, 60)
        for truth in ({"ceiling": 0.6}, {"ceiling": 0.6, "midpoint": 15}, {"ceiling": 0.8})
    )
    difference, ratio, _ = curves.compare_curves(cheaper_arm, baseline)
    assert ratio.high < 1 < ratio.value * 2.5
    assert ratio.low <= 0.5 <= ratio.high
    assert difference.low <= 0 <= difference.high
    difference, ratio, _ = curves.compare_curves(better_arm, baseline)
    assert 0 < difference.low <= 0.2 <= difference.high
    assert ratio.low <= 1 <= ratio.high


def refuse(validations: Validations) -> str:
    """Return the refusal of an arm, and check that it comes with no number."""
    estimates = curves.estimate_curve(validations, np.random.default_rng(0))
    assert estimates.refusal == estimates.fit.refusal
    num_seeds = len(np.asarray(validations.successes))
    assert [estimates.ceiling, estimates.midpoint] == [pytest.approx(Estimate(n=num_seeds), nan_ok=True)] * 2
    assert np.isnan([*estimates.fit.ceilings, estimates.fit.midpoint]).all()
    return estimates.refusal


def test_too_few_validations_and_a_collapse_are_refused() -> None:
    validations = simulate_arm(np.random.default_rng(10), num_seeds=3, num_validations=5)
    assert curves.fit_curves(validations).refusal == ""
    successes = np.asarray(validations.successes, dtype=float)
    successes[1, 2] = np.nan
    assert refuse(validations._replace(successes=successes)) == (
        "Too few validations: 1 of 3 seeds have fewer than 5 at different costs."
    )
    assert refuse(validations._replace(costs=[0, 50, 50, 75, 100])).startswith("Too few validations: 3 of 3")
    assert refuse(Validations([0, 50], np.empty((0, 2)), 512)).startswith("Too few validations: 0 of 0")
    validations = simulate_arm(np.random.default_rng(11), num_seeds=3)
    successes = np.asarray(validations.successes, dtype=float)
    successes[2, -1] = 40
    assert curves.fit_curves(validations._replace(successes=successes)).refusal == ""
    successes[2, -2] = 40
    assert refuse(validations._replace(successes=successes)) == (
        "Collapse: 1 of 3 seeds fall below half of their running maximum at two validations in a row, the first at "
        "cost 100."
    )


@pytest.mark.parametrize(
    ("truth", "sentence"),
    [
        ({"ceiling": 0.2, "ceiling_std": 0.0}, "No gain: a constant success of 0.197 fits all"),
        # The seeds part from each other, but their mean stays.
        ({"ceiling": 0.2, "ceiling_std": 0.06, "steepness": 4}, "No gain: the ceiling, 0.212, is not clearly above"),
        ({"ceiling": 0.14, "ceiling_std": 0.0}, "No gain: success falls from its start, 0.2."),
    ],
)
def test_no_gain_is_refused(truth: dict[str, Any], sentence: str) -> None:
    assert refuse(simulate_arm(np.random.default_rng(19), **truth)).startswith(sentence)


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_arms_that_never_or_always_succeed_have_no_gain(num_seeds: int) -> None:
    # Their rates lie at the bounds, where a curve fits as well as a constant up to rounding.
    for num_validations in (6, 12, 14):
        costs = np.arange(1.0, num_validations + 1)
        for successes in (0.0, 64.0):
            validations = Validations(costs, np.full((num_seeds, num_validations), successes), 64)
            assert refuse(validations).startswith("No gain: a constant success of"), (num_validations, successes)


def test_an_unidentified_ceiling_is_refused() -> None:
    assert refuse(simulate_arm(np.random.default_rng(12), midpoint=200)) == (
        "Ceiling not identified: half of the gain may be reached only at or beyond the largest cost of a seed, 100."
    )
    validations = simulate_arm(np.random.default_rng(12), midpoint=50)
    assert curves.fit_curves(validations).refusal == ""
    successes = np.asarray(validations.successes, dtype=float)
    successes[3, 6:] = np.nan
    assert refuse(validations._replace(successes=successes)).endswith("the largest cost of a seed, 45.45.")


@pytest.mark.slow
def test_flat_and_rising_arms_are_rarely_given_a_ceiling() -> None:
    generator, simulations = np.random.default_rng(14), 15
    for truth in ({"ceiling": 0.2, "ceiling_std": 0.0}, {"midpoint": 200}):
        refusals = [curves.fit_curves(simulate_arm(generator, **truth)).refusal for _ in range(simulations)]
        assert sum(refusal == "" for refusal in refusals) <= 2


def test_a_midpoint_before_the_first_cost_is_refused_alone_and_refusals_of_both_arms_are_named() -> None:
    validations = simulate_arm(np.random.default_rng(15), midpoint=5)
    estimates = curves.estimate_curve(validations, np.random.default_rng(0), 30)
    assert estimates.refusal == "Midpoint not identified: half of the gain is reached before the first cost, 9.091."
    assert estimates.ceiling.low <= 0.7 <= estimates.ceiling.high
    assert math.isnan(estimates.midpoint.value)
    difference, ratio, refusal = curves.compare_curves(make_estimates(0.5, 20), estimates)
    assert refusal == f"Baseline: {estimates.refusal}"
    assert difference.high < 0
    assert np.isnan(ratio[:3]).all()
    refused = make_estimates(math.nan, math.nan, refusal="No gain.")
    difference, ratio, refusal = curves.compare_curves(refused, refused)
    assert refusal == "Arm: No gain. Baseline: No gain."
    assert np.isnan([*difference[:3], *ratio[:3]]).all()

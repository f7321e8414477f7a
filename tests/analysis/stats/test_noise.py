"""Tests of the noise model: literal versions, recovered priors, identities with t tests, and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from analysis.stats.estimates import Estimate, Floats, holm_adjust, mean_over_seeds, welch_t_test
from analysis.stats.estimates import SampleStats as Sample
from analysis.stats.noise import (
    Noise,
    RunVariances,
    VariancePrior,
    compute_equivalence_p_value,
    estimate_paired_contrast,
    estimate_residual_variances,
    estimate_unpaired_difference,
    estimate_variances,
    fit_noise,
    fit_variance_prior,
    moderate_variance,
)
from tests.strategies.examples import draw_examples

NO_NOISE = Noise(None, None)
numbers = st.floats(-1, 1, allow_nan=False).map(lambda number: round(number, 3))
tables = st.tuples(st.integers(2, 5), st.integers(2, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(numbers, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def draw_variances(generator: np.random.Generator, variance: float, df0: float, dfs: Floats) -> Floats:
    """Sample variances of arms whose true variances come from a scaled inverse chi-square distribution."""
    true_variances = variance * df0 / generator.chisquare(df0, len(dfs))
    return true_variances * generator.chisquare(dfs) / dfs


# The prior


@pytest.mark.parametrize("df0", [3.0, 10.0])
def test_a_prior_is_recovered_from_many_variances(df0: float) -> None:
    dfs = np.tile([2.0, 4.0, 9.0], 4000)
    prior = fit_variance_prior(draw_variances(np.random.default_rng(0), 0.04, df0, dfs), dfs)
    assert prior is not None
    # Four standard errors of 12,000 arms.
    assert abs(prior.variance / 0.04 - 1) < 0.05
    assert abs(prior.df / df0 - 1) < 0.1
    assert prior.max_df == dfs.sum()


@given(st.lists(st.tuples(st.floats(1e-4, 1), st.integers(1, 20)), min_size=2, max_size=8))
@draw_examples(60)
def test_a_prior_solves_its_equations(arms: list[tuple[float, int]]) -> None:
    variances, dfs = [variance for variance, _ in arms], [df for _, df in arms]
    logs = [math.log(v) - special.digamma(d / 2) + math.log(d / 2) for v, d in arms]
    excess = np.var(logs, ddof=1) - np.mean([special.polygamma(1, d / 2) for d in dfs])
    prior = fit_variance_prior(variances, dfs)
    assert prior is not None
    if excess <= 1e-6 or min(variances) < 1e-5 * np.median(variances):
        return
    df0 = 2 * optimize.brentq(lambda x: special.polygamma(1, x) - excess, 1e-4, 1e8)
    assert prior.df == pytest.approx(df0, rel=1e-6)
    expected = math.exp(np.mean(logs) + special.digamma(df0 / 2) - math.log(df0 / 2))
    assert prior.variance == pytest.approx(expected, rel=1e-6)


def test_variances_that_agree_are_pooled() -> None:
    assert fit_variance_prior([4.0, 4.0, 5.0], [2, 2, 4]) == VariancePrior(4.5, math.inf, 8.0)
    assert fit_variance_prior([4.0], [2]) == VariancePrior(4.0, math.inf, 2.0)
    assert fit_variance_prior([4.0, 0.0], [2, 0]) == VariancePrior(4.0, math.inf, 2.0)


@pytest.mark.parametrize("variances", [[], [0.0, 0.0]])
def test_no_spread_has_no_prior(variances: list[float]) -> None:
    assert fit_variance_prior(variances, [2] * len(variances)) is None


def test_an_arm_without_spread_does_not_break_the_fit() -> None:
    prior = fit_variance_prior([0.0, 0.0, 0.0, 0.04], [2, 2, 2, 2])
    assert prior is not None
    assert 0 < prior.variance < 0.04
    assert 0 < prior.df < math.inf


# Moderation


def test_a_quiet_arm_is_drawn_up_and_a_noisy_one_keeps_its_own_variance() -> None:
    prior = VariancePrior(4.0, 6.0, 20.0)
    assert moderate_variance(1.0, 2, prior) == ((6 * 4 + 2 * 1) / 8, 8.0)
    assert moderate_variance(9.0, 2, prior) == (9.0, 8.0)
    assert moderate_variance(0.0, 0, prior) == (4.0, 6.0)
    assert moderate_variance(1.0, 2, VariancePrior(4.0, math.inf, 20.0)) == (4.0, 20.0)
    assert moderate_variance(1.0, 2, None) == (1.0, 2)
    assert math.isnan(moderate_variance(0.0, 0, None)[0])


# Variances of runs


@given(tables)
@draw_examples(60)
def test_residual_variances_are_those_of_a_literal_fit(table: list[list[float]]) -> None:
    y = np.array(table)
    num_arms, num_seeds = y.shape
    residuals = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    df = (num_arms - 1) * (num_seeds - 1) / num_arms
    runs = estimate_residual_variances(y)
    assert runs.dfs == pytest.approx(np.full(num_arms, df))
    assert runs.variances == pytest.approx((residuals**2).sum(1) / df, abs=1e-12)


@given(tables, st.data())
@draw_examples(60)
def test_effects_of_arms_and_seeds_do_not_count(table: list[list[float]], data: st.DataObject) -> None:
    y = np.array(table)
    missing = data.draw(st.lists(st.booleans(), min_size=y.size, max_size=y.size))
    y[np.array(missing).reshape(y.shape)] = math.nan
    shifted = y + np.arange(y.shape[0])[:, None] + 3 * np.arange(y.shape[1])
    runs, shifted_runs = estimate_residual_variances(y), estimate_residual_variances(shifted)
    assert shifted_runs.dfs == pytest.approx(runs.dfs)
    assert shifted_runs.variances == pytest.approx(runs.variances, abs=1e-9)
    # All degrees of freedom together: runs, less the effects that they can tell apart.
    assert runs.dfs.sum() <= max(np.isfinite(y).sum() - 1, 0)


def test_equal_arms_leave_no_residual() -> None:
    y = np.array([[0.1, 0.3, 0.7], [0.1, 0.3, 0.7], [0.2, 0.4, 0.8]])
    assert estimate_residual_variances(y).variances.tolist() == [0.0, 0.0, 0.0]
    assert fit_noise(y).paired is None


def test_variances_with_the_seeds_effect() -> None:
    runs = estimate_variances([[1.0, 3.0, math.nan], [5.0, math.nan, math.nan]])
    assert runs.variances.tolist() == [2.0, 0.0]
    assert runs.dfs.tolist() == [1.0, 0.0]


# Contrasts


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=6))
@draw_examples(60)
def test_two_arms_are_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    y = np.array(pairs).T
    differences = y[1] - y[0]
    if np.ptp(differences) < 1e-6:
        return
    expected = mean_over_seeds(differences)
    assert estimate_paired_contrast(differences, fit_noise(y)) == pytest.approx(expected, rel=1e-6)
    assert estimate_paired_contrast(differences, NO_NOISE) == pytest.approx(expected, rel=1e-6)


def test_runs_of_other_seeds_are_welchs_test_without_a_prior() -> None:
    x, y = [1.0, 2.0, 4.0], [2.0, 5.0, 5.0, 9.0]
    expected = welch_t_test(
        Sample(float(np.mean(x)), float(np.std(x, ddof=1)), 3), Sample(float(np.mean(y)), float(np.std(y, ddof=1)), 4)
    )
    estimate = estimate_unpaired_difference(x, y, NO_NOISE)
    assert estimate._replace(n=0) == pytest.approx(expected._replace(n=0), rel=1e-9)


def test_one_seed_needs_recorded_replicates() -> None:
    y = np.array([[0.8], [0.7]])
    alone = estimate_paired_contrast(y[1] - y[0], fit_noise(y))
    assert alone.value == pytest.approx(-0.1)
    assert math.isnan(alone.low)
    assert math.isnan(alone.p)
    replicates = RunVariances(np.array([0.02**2]), np.array([19.0]))
    estimate = estimate_paired_contrast(y[1] - y[0], fit_noise(y, replicates))
    assert estimate.se == pytest.approx(0.02 * math.sqrt(2))
    assert estimate.df == 19
    assert estimate.high - estimate.value == pytest.approx(stats.t.ppf(0.975, 19) * 0.02 * math.sqrt(2))


def test_one_run_against_several_of_the_baseline() -> None:
    replicates = RunVariances(np.array([0.02**2]), np.array([19.0]))
    y = np.array([[0.80, math.nan, math.nan], [math.nan, 0.70, math.nan]])
    noise = fit_noise(y, replicates)
    one = estimate_unpaired_difference([0.7], [0.8], noise)
    four = estimate_unpaired_difference([0.7], [0.8, 0.81, 0.79, 0.80], noise)
    assert one.se == pytest.approx(0.02 * math.sqrt(2))
    assert four.se == pytest.approx(0.02 * math.sqrt(1 + 1 / 4))
    assert one.df == four.df == 19


def test_no_interval_is_narrower_than_the_evaluation_allows() -> None:
    equal = estimate_paired_contrast([0.1, 0.1, 0.1], NO_NOISE)
    assert math.isnan(equal.low)
    assert math.isnan(equal.p)
    floored = estimate_paired_contrast([0.1, 0.1, 0.1], NO_NOISE, min_variance=0.01**2)
    assert floored.se == pytest.approx(math.sqrt(2 * 0.01**2 / 3))
    noise = Noise(VariancePrior(1e-8, math.inf, 10.0), VariancePrior(1e-8, math.inf, 10.0))
    assert estimate_paired_contrast([0.1, 0.1001], noise, min_variance=0.01**2).se == pytest.approx(0.01)
    assert estimate_unpaired_difference([0.1], [0.2], noise, min_variance=0.01**2).se == pytest.approx(
        0.01 * math.sqrt(2)
    )


def test_the_weights_of_a_contrast_scale_its_error() -> None:
    """The mean of two pairs with an arm in common has the weights (1, -1/2, -1/2)."""
    noise = Noise(VariancePrior(0.02**2, math.inf, 30.0), None)
    estimate = estimate_paired_contrast([0.1], noise, weight_norm=1.5)
    assert estimate.se == pytest.approx(0.02 * math.sqrt(1.5))


def test_a_sign_is_kept() -> None:
    y = np.array([[0.8, 0.81, 0.79], [0.6, 0.62, 0.61], [0.8, 0.79, 0.8]])
    estimate = estimate_paired_contrast(y[1] - y[0], fit_noise(y))
    assert estimate.high < 0 < estimate.se
    mirrored = estimate_paired_contrast(y[0] - y[1], fit_noise(y))
    assert (mirrored.low, mirrored.high) == pytest.approx((-estimate.high, -estimate.low))
    assert mirrored.p == estimate.p < 1e-4


# Equivalence


@given(st.floats(-0.2, 0.2), st.floats(0.001, 0.1), st.integers(1, 30))
def test_equal_within_a_margin_is_a_90_percent_interval_inside_it(value: float, se: float, df: int) -> None:
    margin = 0.05
    p = compute_equivalence_p_value(Estimate(value, se=se, df=df), margin)
    half_width = stats.t.ppf(0.95, df) * se
    if abs(p - 0.05) > 1e-9:
        assert (p < 0.05) == (-margin < value - half_width and value + half_width < margin)


def test_equivalence_by_hand() -> None:
    assert compute_equivalence_p_value(Estimate(0.0, se=0.05 / 1.812461, df=10), 0.05) == pytest.approx(0.05, abs=1e-6)
    assert compute_equivalence_p_value(Estimate(0.05, se=0.01, df=10), 0.05) == 0.5
    assert math.isnan(compute_equivalence_p_value(Estimate(0.0), 0.05))


# Error rates. benchmarks/verdict_errors.py has the same on 4,000 studies per cell; here a bound is missed if the rate
# exceeds it by three standard errors.

NUM_STUDIES = 600


def simulate(deviations: list[float], num_seeds: int, seed: int) -> tuple[float, float]:
    """Share of studies of equal arms with a false verdict after Holm, and coverage of the intervals."""
    generator = np.random.default_rng(seed)
    false_verdicts = covered = 0
    for _ in range(NUM_STUDIES):
        y = generator.normal(0.8, np.array(deviations)[:, None], (len(deviations), num_seeds))
        noise = fit_noise(y)
        estimates = [estimate_paired_contrast(row - y[0], noise) for row in y[1:]]
        false_verdicts += bool(holm_adjust([estimate.p for estimate in estimates]).min() < 0.05)
        covered += sum(estimate.low <= 0 <= estimate.high for estimate in estimates)
    return false_verdicts / NUM_STUDIES, covered / NUM_STUDIES / (len(deviations) - 1)


@pytest.mark.long
@pytest.mark.parametrize("num_seeds", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 5))])
@pytest.mark.parametrize("deviations", [[0.015] * 6, [0.01, 0.01, 0.01, 0.03, 0.03, 0.06]], ids=["equal", "unequal"])
def test_error_rates(deviations: list[float], num_seeds: int) -> None:
    family_error, coverage = simulate(deviations, num_seeds, seed=num_seeds)
    assert family_error <= 0.07 + 3 * math.sqrt(0.07 * 0.93 / NUM_STUDIES)
    assert 0.93 - 3 * math.sqrt(0.93 * 0.07 / NUM_STUDIES) <= coverage <= 0.98

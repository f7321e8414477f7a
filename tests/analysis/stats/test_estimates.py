"""Tests of the estimates: slow literal versions, SciPy, values by hand and simulated coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis.stats import estimates
from tests.oracles import analysis as oracles
from tests.strategies.examples import draw_examples

SIMULATIONS = 600
shares = st.floats(0, 1, allow_nan=False)


@given(st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@draw_examples(60)
def test_wilson_solves_its_equation(counts: tuple[int, int]) -> None:
    interval = estimates.wilson_interval(*counts)
    assert (interval.low, interval.high) == pytest.approx(oracles.wilson(*counts), abs=1e-9)
    assert interval.low <= interval.value <= interval.high


def test_wilson_hand_value_and_no_trials() -> None:
    interval = estimates.wilson_interval(1, 1)
    assert (interval.low, interval.high) == pytest.approx((1 / (1 + 1.959964**2), 1.0), rel=1e-6)
    empty = estimates.wilson_interval(0, 0)
    assert math.isnan(empty.value)
    assert (empty.low, empty.high) == (0.0, 1.0)


def test_mean_over_seeds_is_the_paired_t_test() -> None:
    arm, baseline = np.array([0.60, 0.58, 0.64, 0.55]), np.array([0.50, 0.55, 0.52, 0.53])
    estimate = estimates.mean_over_seeds(arm - baseline)
    expected = scipy_stats.ttest_rel(arm, baseline)
    interval = expected.confidence_interval(0.95)
    assert estimate.p == pytest.approx(expected.pvalue)
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high))


def test_one_seed_has_no_interval() -> None:
    estimate = estimates.mean_over_seeds([0.1])
    assert estimate.value == 0.1
    assert math.isnan(estimate.low)
    assert math.isnan(estimates.mean_over_seeds([]).value)


@pytest.mark.parametrize("value", [0.0, 0.25, 0.1])
def test_equal_differences_have_no_interval(value: float) -> None:
    estimate = estimates.mean_over_seeds([value] * 3)
    assert (estimate.value, estimate.n) == (pytest.approx(value), 3)
    assert np.isnan([estimate.low, estimate.high, estimate.p]).all()


def test_interval_over_seeds_covers() -> None:
    draws = np.random.default_rng(4).normal(0.05, 0.04, size=(SIMULATIONS, 3))
    intervals = [estimates.mean_over_seeds(row) for row in draws]
    assert 0.925 <= np.mean([estimate.low <= 0.05 <= estimate.high for estimate in intervals]) <= 0.975


@given(st.lists(shares, min_size=1, max_size=8))
@draw_examples(60)
def test_holm_equals_its_oracle(p: list[float]) -> None:
    assert estimates.holm_adjust(p) == pytest.approx(oracles.holm(p))


def test_holm_hand_values_and_missing() -> None:
    assert estimates.holm_adjust([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    adjusted = estimates.holm_adjust([0.04, np.nan, 0.01])
    assert math.isnan(adjusted[1])
    assert adjusted[[0, 2]] == pytest.approx([0.04, 0.02])


def test_spearman_trend_enumerates_few_runs() -> None:
    axis, outcome = [0, 0.01, 0.03, 0.1, 0.3], [0.5, 0.6, 0.4, 0.3, 0.2]
    trend = estimates.spearman_trend(axis, outcome, [0] * 5, np.random.default_rng(0))
    assert trend.rho == pytest.approx(scipy_stats.spearmanr(axis, outcome).statistic)
    at_least_as_extreme = [
        abs(scipy_stats.spearmanr(axis, order).statistic) >= abs(trend.rho) - 1e-9
        for order in itertools.permutations(outcome)
    ]
    assert trend.p == pytest.approx(np.mean(at_least_as_extreme))


def test_spearman_trend_draws_within_seeds_and_from_the_generator_only() -> None:
    axis, seeds = np.tile(np.arange(5), 3), np.repeat(np.arange(3), 5)
    outcome = seeds * 10.0 + axis  # a perfect trend within each seed, hidden by the differences between seeds
    first, second = (estimates.spearman_trend(axis, outcome, seeds, np.random.default_rng(1), 999) for _ in range(2))
    assert first == second
    assert first.p == pytest.approx(1 / 1000)
    mixed = estimates.spearman_trend(axis, outcome, np.zeros(15), np.random.default_rng(1), 999)
    assert mixed.p > 0.1


@pytest.mark.parametrize(("axis", "outcome"), [([0, 1], [0.1, 0.2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5])])
def test_spearman_trend_degenerate(axis: list[float], outcome: list[float]) -> None:
    assert math.isnan(estimates.spearman_trend(axis, outcome, [0] * len(axis), np.random.default_rng(0)).rho)


def test_page_trend_sees_both_directions() -> None:
    rising = [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.35, 0.5], [0.1, 0.15, 0.3, 0.6]]
    expected = min(1.0, 2 * scipy_stats.page_trend_test(rising).pvalue)
    assert estimates.page_trend_p_value(rising) == pytest.approx(expected)
    assert estimates.page_trend_p_value([row[::-1] for row in rising]) == pytest.approx(expected)
    assert math.isnan(estimates.page_trend_p_value([[0.1, 0.2, 0.3]]))


@given(st.lists(st.tuples(st.integers(1, 20), shares), min_size=1, max_size=8), st.integers(1, 200))
@draw_examples(60)
def test_area_equals_its_oracle(pieces: list[tuple[int, float]], extra_steps: int) -> None:
    steps = np.cumsum([step for step, _ in pieces])
    values = [value for _, value in pieces]
    area = estimates.area_under_curve(steps, values, steps[0] + extra_steps)
    assert area == pytest.approx(oracles.area(steps, values, steps[0] + extra_steps), abs=2e-3)


def test_area_carries_the_last_value() -> None:
    assert estimates.area_under_curve([0, 10], [0.4, 0.0], 40) == pytest.approx(0.05)
    assert estimates.area_under_curve([0, 10], [0.2, 0.2], 60) == pytest.approx(0.2)
    assert estimates.area_under_curve([5], [0.3], 5) == 0.3
    assert math.isnan(estimates.area_under_curve([], [], 10))

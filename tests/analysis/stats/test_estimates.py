"""The estimates equal SciPy's, or a literal enumeration where SciPy has none, over drawn data, and values by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis.stats import estimates
from tests.oracles import analysis as oracles
from tests.strategies.examples import draw_examples

examples = draw_examples(60)
shares = st.floats(0, 1, allow_nan=False)
# Multiples of .01: two numbers are equal or clearly apart, so that rounding decides nothing.
numbers = st.integers(-1000, 1000).map(lambda hundredths: hundredths / 100)
samples = st.lists(numbers, min_size=2, max_size=10).filter(lambda values: len(set(values)) > 1)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@examples
def test_wilson_interval_is_that_of_scipy(counts: tuple[int, int]) -> None:
    interval = estimates.wilson_interval(*counts)
    expected = scipy_stats.binomtest(*counts).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)
    assert interval.low <= interval.value == counts[0] / counts[1] <= interval.high


@given(samples, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
@examples
def test_mean_over_seeds_is_the_one_sample_t_test_of_scipy(values: list[float], confidence_level: float) -> None:
    estimate = estimates.mean_over_seeds(values, confidence_level)
    expected = scipy_stats.ttest_1samp(values, 0.0)
    interval = expected.confidence_interval(confidence_level)
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-12)
    assert estimate.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (estimate.df, estimate.n) == (expected.df, len(values))


@pytest.mark.parametrize("values", [[0.1], [0.0] * 3, [0.25] * 3, [0.1] * 3])
def test_little_data_and_equal_seeds_have_no_interval(values: list[float]) -> None:
    estimate = estimates.mean_over_seeds(values)
    assert (estimate.value, estimate.n) == (pytest.approx(values[0]), len(values))
    assert np.isnan([estimate.low, estimate.high, estimate.p]).all()
    assert math.isnan(estimates.mean_over_seeds([]).value)
    assert estimates.wilson_interval(0, 0) == pytest.approx(estimates.Estimate(low=0.0, high=1.0), nan_ok=True)
    assert estimates.area_under_curve([5], [0.3], 5) == 0.3
    assert math.isnan(estimates.area_under_curve([], [], 10))


@given(samples, samples)
@examples
def test_welch_t_test_is_that_of_scipy(sample: list[float], reference: list[float]) -> None:
    summaries = (
        estimates.SampleStats(float(np.mean(x)), float(np.std(x, ddof=1)), len(x)) for x in (sample, reference)
    )
    estimate = estimates.welch_t_test(*summaries)
    expected = scipy_stats.ttest_ind(sample, reference, equal_var=False)
    interval = expected.confidence_interval()
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert estimate.value == pytest.approx(np.mean(sample) - np.mean(reference), abs=1e-12)
    assert estimate.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert estimate.df == pytest.approx(expected.df)
    assert estimate.n == len(sample) + len(reference)


def find_rejected(p_values: list[float], significance_level: float) -> set[int]:
    """Holm's steps: reject the smallest of m p-values if it is at most level / m, then go through the others."""
    remaining, rejected = set(range(len(p_values))), set[int]()
    while remaining:
        smallest = min(remaining, key=lambda index: p_values[index])
        if p_values[smallest] > significance_level / len(remaining):
            break
        rejected.add(smallest)
        remaining.remove(smallest)
    return rejected


@given(
    st.lists(st.one_of(st.integers(0, 200), st.none()), min_size=1, max_size=12),
    st.integers(0, 9_999).map(lambda number: (number + 0.5) / 10_000),  # equals no multiple of a drawn p-value
)
@examples
def test_holm_rejects_what_its_steps_reject(thousandths: list[int | None], significance_level: float) -> None:
    tested = [number / 1000 for number in thousandths if number is not None]
    adjusted = estimates.holm_adjust([math.nan if number is None else number / 1000 for number in thousandths])
    assert np.isnan(adjusted).tolist() == [number is None for number in thousandths]
    is_rejected = (adjusted[~np.isnan(adjusted)] <= significance_level).tolist()
    assert {index for index, rejected in enumerate(is_rejected) if rejected} == find_rejected(
        tested, significance_level
    )


@given(st.lists(st.tuples(st.integers(0, 5), numbers), min_size=3, max_size=15))
@examples
def test_spearman_rho_is_that_of_scipy(runs: list[tuple[int, float]]) -> None:
    axis, outcome = zip(*runs, strict=True)
    assume(len(set(axis)) > 1 and len(set(outcome)) > 1)
    blocks = [index % 2 for index in range(len(runs))]  # two seeds, so that few permutations are drawn
    trend = estimates.spearman_trend(axis, outcome, blocks, np.random.default_rng(0), num_permutations=9)
    assert trend.value == pytest.approx(scipy_stats.spearmanr(axis, outcome).statistic, abs=1e-12)
    assert trend.n == len(runs)


def test_spearman_trend_enumerates_few_runs() -> None:
    axis, outcome = [0, 0.01, 0.03, 0.1, 0.3], [0.5, 0.6, 0.4, 0.3, 0.2]
    trend = estimates.spearman_trend(axis, outcome, [0] * 5, np.random.default_rng(0))
    at_least_as_extreme = [
        abs(scipy_stats.spearmanr(axis, order).statistic) >= abs(trend.value) - 1e-9
        for order in itertools.permutations(outcome)
    ]
    assert trend.p == pytest.approx(np.mean(at_least_as_extreme))


def test_spearman_trend_draws_within_seeds_and_from_the_generator_only() -> None:
    axis, seeds = np.tile(np.arange(5), 3), np.repeat(np.arange(3), 5)
    outcome = seeds * 10.0 + axis  # a perfect trend within each seed, hidden by the differences between seeds
    first, second = (estimates.spearman_trend(axis, outcome, seeds, np.random.default_rng(1)) for _ in range(2))
    assert first == second
    assert first.p == 1 / 10_000
    mixed = estimates.spearman_trend(axis, outcome, np.zeros(15), np.random.default_rng(1))
    assert mixed.p > 0.1
    for axis, outcome in (([0, 1], [0.1, 0.2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5])):
        assert math.isnan(estimates.spearman_trend(axis, outcome, [0] * len(axis), np.random.default_rng(0)).value)


@given(st.lists(st.tuples(st.integers(1, 20), shares), min_size=1, max_size=8), st.integers(1, 200))
@examples
def test_area_equals_its_oracle(pieces: list[tuple[int, float]], extra_steps: int) -> None:
    steps = np.cumsum([step for step, _ in pieces])
    values = [value for _, value in pieces]
    area = estimates.area_under_curve(steps, values, steps[0] + extra_steps)
    assert area == pytest.approx(oracles.area(steps, values, steps[0] + extra_steps), abs=2e-3)

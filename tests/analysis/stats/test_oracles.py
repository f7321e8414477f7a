"""The estimates equal SciPy's, or a literal enumeration where SciPy has none, over drawn data."""

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis.stats import estimates
from tests.strategies.examples import draw_examples

examples = draw_examples(60)
confidence_levels = st.sampled_from([0.8, 0.9, 0.95, 0.99])
# Multiples of .01: two numbers are equal or clearly apart, so that rounding decides nothing.
numbers = st.integers(-1000, 1000).map(lambda hundredths: hundredths / 100)
samples = st.lists(numbers, min_size=2, max_size=10).filter(lambda values: len(set(values)) > 1)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), confidence_levels)
@examples
def test_wilson_interval_is_that_of_scipy(counts: tuple[int, int], confidence_level: float) -> None:
    interval = estimates.wilson_interval(*counts, confidence_level)
    expected = scipy_stats.binomtest(*counts).proportion_ci(confidence_level, method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)
    assert interval.value == counts[0] / counts[1]


@given(samples, confidence_levels)
@examples
def test_mean_over_seeds_is_the_one_sample_t_test_of_scipy(values: list[float], confidence_level: float) -> None:
    estimate = estimates.mean_over_seeds(values, confidence_level)
    expected = scipy_stats.ttest_1samp(values, 0.0)
    interval = expected.confidence_interval(confidence_level)
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-12)
    assert estimate.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (estimate.df, estimate.n) == (expected.df, len(values))


def summarize(values: list[float]) -> estimates.SampleStats:
    return estimates.SampleStats(float(np.mean(values)), float(np.std(values, ddof=1)), len(values))


@given(samples, samples, confidence_levels)
@examples
def test_welch_t_test_is_that_of_scipy(sample: list[float], reference: list[float], confidence_level: float) -> None:
    estimate = estimates.welch_t_test(summarize(sample), summarize(reference), confidence_level)
    expected = scipy_stats.ttest_ind(sample, reference, equal_var=False)
    interval = expected.confidence_interval(confidence_level)
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert estimate.value == pytest.approx(np.mean(sample) - np.mean(reference), abs=1e-12)
    assert estimate.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert estimate.df == pytest.approx(expected.df)
    assert estimate.n == len(sample) + len(reference)


def compute_closed_test_p_values(p_values: list[float]) -> list[float]:
    """Holm's procedure is the closed test of Bonferroni's: a hypothesis is rejected if all sets that contain it are."""
    indices = range(len(p_values))
    subsets = [set(subset) for size in indices for subset in itertools.combinations(indices, size + 1)]
    bonferroni = [min(1.0, len(subset) * min(p_values[index] for index in subset)) for subset in subsets]
    return [max(p for p, subset in zip(bonferroni, subsets, strict=True) if index in subset) for index in indices]


@given(st.lists(st.integers(0, 1000).map(lambda thousandths: thousandths / 1000), min_size=1, max_size=6))
@examples
def test_holm_is_the_closed_test_of_bonferroni(p_values: list[float]) -> None:
    assert estimates.holm_adjust(p_values) == pytest.approx(compute_closed_test_p_values(p_values))


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


@cache
def count_page_statistics(num_seeds: int, num_arms: int) -> Counter[int]:
    """How often each value of Page's L = sum of arm number x rank occurs over all rankings by all seeds."""
    rankings = list(itertools.permutations(range(1, num_arms + 1)))
    return Counter(
        sum(arm * rank for ranking in table for arm, rank in enumerate(ranking, 1))
        for table in itertools.product(rankings, repeat=num_seeds)
    )


def enumerate_page_p_value(table: list[list[float]]) -> float:
    counts = count_page_statistics(len(table), len(table[0]))
    ranks = [[sorted(row).index(value) + 1 for value in row] for row in table]
    observed = sum(arm * rank for ranking in ranks for arm, rank in enumerate(ranking, 1))
    rising = sum(count for statistic, count in counts.items() if statistic >= observed)
    falling = sum(count for statistic, count in counts.items() if statistic <= observed)
    return min(1.0, 2 * min(rising, falling) / counts.total())


tables_without_ties = st.tuples(st.integers(2, 3), st.integers(3, 4)).flatmap(
    lambda shape: st.lists(
        st.lists(numbers, min_size=shape[1], max_size=shape[1], unique=True), min_size=shape[0], max_size=shape[0]
    )
)


@given(tables_without_ties)
@examples
def test_page_trend_p_value_enumerates_all_rankings(table: list[list[float]]) -> None:
    assert estimates.page_trend_p_value(table) == pytest.approx(enumerate_page_p_value(table))


@given(st.lists(st.tuples(st.integers(0, 5), numbers), min_size=3, max_size=15))
@examples
def test_spearman_rho_is_that_of_scipy(runs: list[tuple[int, float]]) -> None:
    axis, outcome = zip(*runs, strict=True)
    assume(len(set(axis)) > 1 and len(set(outcome)) > 1)
    blocks = [index % 2 for index in range(len(runs))]  # two seeds, so that few permutations are drawn
    trend = estimates.spearman_trend(axis, outcome, blocks, np.random.default_rng(0), num_permutations=9)
    assert trend.rho == pytest.approx(scipy_stats.spearmanr(axis, outcome).statistic, abs=1e-12)
    assert trend.n == len(runs)

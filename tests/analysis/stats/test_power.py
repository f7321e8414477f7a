"""Tests of the powers: the noncentral t of SciPy, an integral over chi, simulated studies and numbers by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from scipy import stats as scipy_stats

from analysis.stats import power
from tests.strategies.examples import draw_examples

INF, NAN = float("inf"), float("nan")
SIMULATIONS = 100_000
degrees_of_freedom = st.one_of(st.floats(0.5, 60), st.floats(60, 1e6), st.just(INF))
comparison_counts = st.integers(1, 160)
ratios = st.floats(0, 12)


def simulate_paired_t_tests(n: int, difference: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate studies of n paired differences with standard deviation 1: means and their standard errors."""
    values = np.random.default_rng(seed).normal(difference, 1, size=(SIMULATIONS, n))
    return values.mean(axis=1), values.std(axis=1, ddof=1) / math.sqrt(n)


# Oracles.


@given(ratios, st.floats(1, 200), comparison_counts)
@draw_examples(60)
def test_power_is_that_of_the_noncentral_t(noncentrality: float, df: float, num_comparisons: int) -> None:
    critical_t = scipy_stats.t.isf(0.025 / num_comparisons, df)
    # SciPy's lower tail is NaN where it is far below the tolerance.
    lower_tail = np.nan_to_num(scipy_stats.nct.cdf(-critical_t, df, noncentrality))
    expected = scipy_stats.nct.sf(critical_t, df, noncentrality) + lower_tail
    assert power.compute_power(0.02 * noncentrality, 0.02, df, num_comparisons) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "num_comparisons"), [(3, 1), (3, 5), (10, 5)])
def test_simulated_studies_find_the_detectable_difference(n: int, num_comparisons: int) -> None:
    difference = power.find_detectable_difference(1 / math.sqrt(n), n - 1, num_comparisons)
    means, errors = simulate_paired_t_tests(n, difference, seed=5)
    p = 2 * scipy_stats.t.sf(np.abs(means / errors), n - 1)
    # Five binomial standard errors of 100,000 studies.
    assert np.mean(p < 0.05 / num_comparisons) == pytest.approx(0.8, abs=0.0065)


@given(st.floats(0.05, 15), st.floats(0.5, 200), comparison_counts)
@draw_examples(60)
def test_equivalence_power_is_the_integral_over_chi(bound: float, df: float, num_comparisons: int) -> None:
    critical_t = scipy_stats.t.isf(0.05 / num_comparisons, df)

    # Given the error s of the standard error, |Z| must be below bound - critical_t s.
    def compute_weighted_power(s: float) -> float:
        density = scipy_stats.chi.pdf(s * math.sqrt(df), df) * math.sqrt(df)
        return float((2 * scipy_stats.norm.cdf(bound - critical_t * s) - 1) * density)

    edges = sorted({0.0, *(min(s, bound / critical_t) for s in (0.5, 1.0, 2.0, INF))})
    expected = sum(
        integrate.quad(compute_weighted_power, *piece, epsabs=1e-9, limit=200)[0] for piece in itertools.pairwise(edges)
    )
    computed = power.compute_equivalence_power(0.02 * bound, 0.02, df, num_comparisons)
    assert computed == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("n", "margin", "num_comparisons"), [(3, 2.0, 1), (5, 1.2, 1), (5, 2.5, 5)])
def test_simulated_studies_show_equivalence(n: int, margin: float, num_comparisons: int) -> None:
    means, errors = simulate_paired_t_tests(n, 0.0, seed=6)
    tail = 0.05 / num_comparisons
    p_below, p_above = (scipy_stats.t.sf((margin + sign * means) / errors, n - 1) for sign in (1, -1))
    expected = np.mean((p_below < tail) & (p_above < tail))
    computed = power.compute_equivalence_power(margin, 1 / math.sqrt(n), n - 1, num_comparisons)
    assert 0.1 < computed < 0.9
    assert computed == pytest.approx(expected, abs=0.008)


# Identities.


@given(degrees_of_freedom, comparison_counts, st.floats(0.1, 0.99))
@draw_examples(60)
def test_detectable_difference_has_the_requested_power(df: float, num_comparisons: int, target: float) -> None:
    difference = power.find_detectable_difference(0.02, df, num_comparisons, target)
    assert power.compute_power(difference, 0.02, df, num_comparisons) == pytest.approx(target, abs=1e-8)


@given(degrees_of_freedom, comparison_counts, st.sampled_from([0.9, 0.95, 0.99]))
@draw_examples(60)
def test_power_without_a_difference_is_the_error_rate(df: float, num_comparisons: int, level: float) -> None:
    computed = power.compute_power(0.0, 0.02, df, num_comparisons, level)
    assert computed == pytest.approx((1 - level) / num_comparisons, rel=1e-6)


@given(ratios, degrees_of_freedom, comparison_counts)
@draw_examples(60)
def test_power_does_not_depend_on_the_sign(difference: float, df: float, num_comparisons: int) -> None:
    computed = power.compute_power(difference, 1.0, df, num_comparisons)
    assert power.compute_power(-difference, 1.0, df, num_comparisons) == computed


@given(ratios, st.integers(1, 160))
@draw_examples(60)
def test_infinite_degrees_of_freedom_give_the_normal_tests(bound: float, num_comparisons: int) -> None:
    normal = scipy_stats.norm
    z, one_sided_z = normal.isf(0.025 / num_comparisons), normal.isf(0.05 / num_comparisons)
    rejection_probability = normal.cdf(bound - z) + normal.cdf(-bound - z)
    equivalence_probability = max(0.0, 2 * normal.cdf(bound - one_sided_z) - 1)
    # At this bound equivalence begins to be possible, with a kink, which an estimated deviation rounds off.
    is_at_kink = abs(bound - one_sided_z) < 0.02
    for df, tolerance in ((INF, 1e-9), (1e6, 1e-4)):
        computed = power.compute_power(bound, 1.0, df, num_comparisons)
        assert computed == pytest.approx(rejection_probability, abs=tolerance)
        if is_at_kink and df != INF:
            continue
        computed = power.compute_equivalence_power(bound, 1.0, df, num_comparisons)
        assert computed == pytest.approx(equivalence_probability, abs=tolerance)


# Properties.


@given(degrees_of_freedom, comparison_counts, ratios, ratios)
@draw_examples(60)
def test_powers_grow_with_the_difference_and_the_margin(
    df: float, num_comparisons: int, first: float, second: float
) -> None:
    small, large = sorted([first, second])
    for compute in (power.compute_power, power.compute_equivalence_power):
        assert compute(small, 1.0, df, num_comparisons) <= compute(large, 1.0, df, num_comparisons) + 1e-9


@given(st.floats(0.5, 1e4), comparison_counts, st.floats(1.5, 10))
@draw_examples(60)
def test_detectable_difference_shrinks_with_seeds_and_grows_with_comparisons(
    df: float, num_comparisons: int, factor: float
) -> None:
    difference = power.find_detectable_difference(0.02, df, num_comparisons)
    assert power.find_detectable_difference(0.02, df * factor, num_comparisons) < difference
    assert power.find_detectable_difference(0.02, df, num_comparisons + 1) > difference
    assert power.find_detectable_difference(0.02, df, num_comparisons, power=0.9) > difference
    assert power.find_detectable_difference(0.02, df, num_comparisons, confidence_level=0.99) > difference
    assert power.find_detectable_difference(0.02 * factor, df, num_comparisons) == pytest.approx(difference * factor)


# Degenerate cases and golden numbers.


@pytest.mark.parametrize(("se", "df"), [(NAN, 5.0), (0.0, 5.0), (-0.1, 5.0), (0.1, NAN), (0.1, 0.0)])
def test_no_noise_estimate_means_no_power(se: float, df: float) -> None:
    assert math.isnan(power.find_detectable_difference(se, df))
    assert math.isnan(power.compute_power(0.1, se, df))
    assert math.isnan(power.compute_equivalence_power(0.1, se, df))
    assert math.isnan(power.compute_power(NAN, 0.1, 5))
    assert math.isnan(power.compute_equivalence_power(NAN, 0.1, 5))


@pytest.mark.parametrize("df", [0.5, 2.0, 1e6, INF])
def test_extreme_noise(df: float) -> None:
    for compute in (power.compute_power, power.compute_equivalence_power):
        for certain in (compute(0.1, 1e-300, df), compute(INF, 0.1, df)):
            assert certain == pytest.approx(1)
            assert certain <= 1
    assert power.compute_power(0.1, INF, df) == pytest.approx(0.05)
    assert power.compute_equivalence_power(0.1, INF, df) == 0
    assert power.compute_equivalence_power(0.0, 0.1, df) == 0
    assert power.compute_equivalence_power(-0.1, 0.1, df) == 0


def test_a_power_below_the_error_rate_needs_no_difference() -> None:
    assert power.find_detectable_difference(0.1, 5, power=0.04) == 0


@pytest.mark.parametrize(("n", "expected", "shifted"), [(3, 7.32, 6.34), (5, 2.63, 2.48), (10, 1.33, 1.31)])
def test_detectable_difference_of_paired_seeds(n: int, expected: float, shifted: float) -> None:
    # Known values, in standard deviations of a paired difference, so se = 1 / sqrt(n) and df = n - 1, for power 0.8 at
    # alpha 0.05 among 5 comparisons. With a shifted t in place of the noncentral one they would be too small.
    se, df = 1 / math.sqrt(n), n - 1
    assert power.find_detectable_difference(se, df, 5) == pytest.approx(expected, abs=0.005)
    shifted_difference = (scipy_stats.t.ppf(0.995, df) + scipy_stats.t.ppf(0.8, df)) * se
    assert shifted_difference == pytest.approx(shifted, abs=0.005)


def test_no_comparison_counts_as_one() -> None:
    assert power.find_detectable_difference(0.1, 5, 0) == power.find_detectable_difference(0.1, 5, 1)
    assert power.compute_power(0.1, 0.1, 5, 0) == power.compute_power(0.1, 0.1, 5, 1)
    assert power.compute_equivalence_power(0.1, 0.1, 5, 0) == power.compute_equivalence_power(0.1, 0.1, 5, 1)

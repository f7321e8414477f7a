"""Tests of the anytime-valid t test: integrals, the same ratio in other terms, studies with a look after every seed."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from scipy import stats as scipy_stats

from analysis.stats import sequential
from analysis.stats.estimates import Estimate, mean_over_seeds
from tests.strategies.examples import draw_examples

INF, NAN = float("inf"), float("nan")
STUDIES, MAX_SEEDS = 20_000, 30
SEED_COUNTS = np.arange(2, MAX_SEEDS + 1)
# Rounded, because an oracle cuts its integral at 0 and at t, and quad fails on a piece of width 1e-300.
t_statistics = st.floats(-15, 15).map(lambda t: round(t, 3))
difference_lists = st.lists(st.integers(-512, 512), min_size=5, max_size=40).filter(lambda values: np.ptp(values) > 0)


class Looks(NamedTuple):
    """Means, standard errors and t statistics (studies, looks) of the first 2, 3, ... 30 of each study's values."""

    means: np.ndarray
    errors: np.ndarray
    t: np.ndarray


def look_after_every_seed(values: np.ndarray) -> Looks:
    means = values.cumsum(axis=-1)[..., 1:] / SEED_COUNTS
    squares = (values**2).cumsum(axis=-1)[..., 1:] - SEED_COUNTS * means**2
    errors = np.sqrt(squares / (SEED_COUNTS - 1) / SEED_COUNTS)
    return Looks(means, errors, means / errors)


@pytest.fixture(scope="module")
def equality() -> Looks:
    return look_after_every_seed(np.random.default_rng(7).normal(size=(STUDIES, MAX_SEEDS)))


@given(t_statistics, st.integers(2, 40))
@draw_examples(60)
def test_e_value_is_the_mixture_of_noncentral_t_densities(t: float, n: int) -> None:
    def compute_weighted_density(effect: float) -> float:
        return float(scipy_stats.nct.pdf(t, n - 1, math.sqrt(n) * effect) * scipy_stats.norm.pdf(effect))

    peaks = sorted({0.0, min(max(t / math.sqrt(n), -7.2), 7.2)})
    mixture, _ = integrate.quad(compute_weighted_density, -8, 8, points=peaks, epsabs=0, epsrel=1e-9, limit=200)
    expected = mixture / scipy_stats.t.pdf(t, n - 1)
    assert sequential.compute_e_value(t, n) == pytest.approx(expected, rel=1e-6)


@given(difference_lists)
@draw_examples(60)
def test_p_of_an_estimate_is_that_of_the_mixture_martingale(values: list[int]) -> None:
    # Wang and Ramdas, Theorem 4.9, in sums and with c = 1: sqrt(1/(n + 1)) (((n + 1) V)/((n + 1) V - S^2))^(n/2).
    n, total = len(values), sum(values)
    weighted_squares = (n + 1) * sum(value**2 for value in values)
    martingale = math.sqrt(1 / (n + 1)) * (weighted_squares / (weighted_squares - total**2)) ** (n / 2)
    estimate = sequential.estimate_mean_sequentially(np.array(values) / 512)
    assert estimate.p == pytest.approx(min(1, 1 / martingale), rel=1e-6)


@given(difference_lists, st.integers(1, 6))
@draw_examples(60)
def test_ends_of_an_interval_have_the_e_value_that_rejects(values: list[int], num_comparisons: int) -> None:
    estimate = sequential.estimate_mean_sequentially(values, num_comparisons)
    if math.isinf(estimate.low):
        assert sequential.compute_e_value(INF, len(values)) <= 20 * num_comparisons * (1 + 1e-9)
        assert estimate.high == INF
        return
    assert estimate.low < estimate.value < estimate.high
    for end in (estimate.low, estimate.high):
        shifted = sequential.estimate_mean_sequentially(np.array(values) - end)
        assert 1 / shifted.p == pytest.approx(20 * num_comparisons, rel=1e-6)


@pytest.mark.parametrize(("num_comparisons", "expected"), [(1, 5), (2, 6), (5, 6), (6, 6), (7, 7)])
def test_fewest_seeds_that_can_reject(num_comparisons: int, expected: int) -> None:
    assert sequential.find_fewest_seeds(num_comparisons) == expected
    # The largest possible e of n seeds is (1 + n)^((n - 1)/2): 11.2, 36 and 129.6 with 4, 5 and 6 seeds.
    largest, largest_before = (float(sequential.compute_e_value(INF, n)) for n in (expected, expected - 1))
    assert largest == pytest.approx((1 + expected) ** ((expected - 1) / 2))
    assert largest_before < 20 * num_comparisons < largest
    assert sequential.compute_critical_t(expected - 1, num_comparisons=num_comparisons) == INF
    assert math.isfinite(sequential.compute_critical_t(expected, num_comparisons=num_comparisons))


def test_a_look_after_every_seed_keeps_the_error_rate(equality: Looks) -> None:
    e_values = sequential.compute_e_value(equality.t, SEED_COUNTS)
    assert 0.01 < np.mean((e_values >= 20).any(axis=1)) <= 0.05
    p_values = 2 * scipy_stats.t.sf(np.abs(equality.t), SEED_COUNTS - 1)
    assert np.mean((p_values < 0.05).any(axis=1)) > 0.2


def test_arms_that_share_a_baseline_keep_the_error_rate_of_their_family() -> None:
    outcomes = np.random.default_rng(8).normal(size=(6, STUDIES // 2, MAX_SEEDS))
    e_values = sequential.compute_e_value(look_after_every_seed(outcomes[1:] - outcomes[0]).t, SEED_COUNTS)
    # Without any true difference, Holm's procedure makes an error only if its first step does.
    assert 0.005 < np.mean((e_values >= 5 / 0.05).any(axis=(0, 2))) <= 0.05
    assert np.mean((e_values >= 1 / 0.05).any(axis=(0, 2))) > 0.05


def test_intervals_cover_at_all_looks_at_once() -> None:
    looks = look_after_every_seed(np.random.default_rng(9).normal(0.3, 2, size=(STUDIES, MAX_SEEDS)))
    half_widths = [sequential.compute_critical_t(int(n)) for n in SEED_COUNTS] * looks.errors
    is_covered = (looks.means - half_widths < 0.3) & (looks.means + half_widths > 0.3)
    assert 0.95 <= np.mean(is_covered.all(axis=1)) < 0.99
    # A margin as large as the true mean: any statement of equivalence is wrong.
    is_equivalent = (looks.means - half_widths > -0.3) & (looks.means + half_widths < 0.3)
    assert np.mean(is_equivalent.any(axis=1)) <= 0.05


@given(t_statistics, t_statistics, st.integers(2, 100))
@draw_examples(60)
def test_e_value_is_even_and_grows_with_t(first: float, second: float, n: int) -> None:
    small, large = sorted([abs(first), abs(second)])
    e_values = sequential.compute_e_value([small, large, -large, INF, -INF], n)
    assert e_values[0] <= e_values[1] * (1 + 1e-12)
    assert e_values[1] == e_values[2] <= e_values[3] * (1 + 1e-12)
    assert e_values[3] == e_values[4] == pytest.approx((1 + n) ** ((n - 1) / 2))
    assert sequential.compute_e_value(0.0, n) == pytest.approx((1 + n) ** -0.5)


@given(difference_lists)
@draw_examples(60)
def test_estimate_is_that_of_the_t_test_with_a_wider_interval(values: list[int]) -> None:
    estimate, fixed = sequential.estimate_mean_sequentially(values), mean_over_seeds(values)
    assert (estimate.value, estimate.n, estimate.se, estimate.df) == pytest.approx(
        (fixed.value, fixed.n, fixed.se, fixed.df)
    )
    assert estimate.low < fixed.low <= fixed.high < estimate.high
    assert estimate.p >= fixed.p
    several = sequential.estimate_mean_sequentially(values, num_comparisons=3)
    assert several.low < estimate.low
    assert several.high > estimate.high
    assert several.p == estimate.p


@pytest.mark.parametrize(
    "differences",
    [
        [0.25] * 10,
        [-0.25] * 30,
        [0.0] * 10,
        # All are 0.1, 1e6 or 0 up to rounding.
        [0.8 - 0.7, 0.6 - 0.5, 0.3 - 0.2, 0.9 - 0.8, 0.4 - 0.3, 0.7 - 0.6],
        [8e6 - 7e6, 1e7 * (0.6 - 0.5), 1e7 * (0.3 - 0.2), 1e7 * (0.9 - 0.8), 1e6, 1e6],
        [0.1 + 0.2 - 0.3, 0.0, 0.7 + 0.1 - 0.8, 0.0, 0.0, 0.1 + 0.7 - 0.8],
    ],
)
def test_equal_differences_give_no_certainty(differences: list[float]) -> None:
    estimate = sequential.estimate_mean_sequentially(differences)
    assert estimate.value == pytest.approx(np.mean(differences))
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    assert (estimate.p, estimate.se, estimate.df) == (1.0, 0.0, len(differences) - 1)


@pytest.mark.parametrize("differences", [[], [0.3], [0.3, 0.31], [0.3, 0.31, 0.29, 0.3]])
def test_too_few_seeds_leave_every_mean_possible(differences: list[float]) -> None:
    estimate = sequential.estimate_mean_sequentially(differences)
    assert (estimate.low, estimate.high, estimate.n) == (-INF, INF, len(differences))
    assert 0.05 < estimate.p <= 1
    assert estimate.p == 1 or len(differences) > 1
    assert math.isnan(estimate.value) == (not differences)


def test_too_little_is_no_evidence_and_no_equivalence_and_huge_evidence_no_overflow() -> None:
    assert sequential.compute_e_value([NAN, INF, 3.0, 3.0], [1, 1, 1, 0]).tolist() == [1, 1, 1, 1]
    estimate = sequential.estimate_mean_sequentially([0.1, 0.2, NAN, 0.1, 0.3, 0.2])
    assert (estimate.p, math.isnan(estimate.low)) == (1, True)
    assert sequential.compute_e_value(1e6, 5000) == INF
    assert sequential.compute_e_value(1e200, 5) == pytest.approx(36)
    assert sequential.estimate_mean_sequentially(1e6 + np.arange(5000) % 2).p == 0
    for values in ([0.1] * 8, [0.1], []):
        estimate = sequential.estimate_mean_sequentially(values)
        assert (estimate.p, sequential.compute_sequential_equivalence_p_value(estimate, 0.2)) == (1, 1)
    spread = sequential.estimate_mean_sequentially([0.1, 0.2] * 4)
    assert math.isnan(sequential.compute_sequential_equivalence_p_value(spread, math.nan))
    # The baseline itself is no comparison.
    assert math.isnan(sequential.compute_sequential_equivalence_p_value(Estimate(), 0.2))


@given(difference_lists, st.floats(0.01, 2))
def test_equivalence_is_shown_exactly_if_the_interval_lies_within_the_margin(values: list[int], scale: float) -> None:
    estimate = sequential.estimate_mean_sequentially(np.array(values) / 512)
    margin = scale * (abs(estimate.value) + estimate.high - estimate.value)
    p = sequential.compute_sequential_equivalence_p_value(estimate, margin)
    is_inside = -margin < estimate.low and estimate.high < margin
    assert (p < 0.05) is is_inside or p == pytest.approx(0.05)
    assert sequential.compute_sequential_equivalence_p_value(estimate, abs(estimate.value)) == 1.0


def test_a_mean_at_the_margin_is_rarely_called_equal_at_any_look(equality: Looks) -> None:
    margin = 1.0  # in standard deviations; the true mean is 1
    means = equality.means + margin
    t_at_margin = (margin - np.abs(means)) / equality.errors
    is_equal = (sequential.compute_e_value(t_at_margin, SEED_COUNTS) >= 1 / 0.05) & (np.abs(means) < margin)
    assert is_equal.any(axis=1).mean() <= 0.05

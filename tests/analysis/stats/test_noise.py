"""Tests of the noise model: literal versions, identities with t tests, and simulated coverage."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.data.compare import Outcomes, estimate_difference, make_test_columns
from analysis.stats.estimates import Estimate, Floats, holm_adjust, mean_over_seeds, welch_t_test
from analysis.stats.estimates import SampleStats as Sample
from analysis.stats.noise import (
    ARM_DOUBT,
    Noise,
    Pool,
    blend_variances,
    compute_doubt,
    compute_equivalence_p_value,
    compute_level_variance,
    estimate_pooled_mean,
    estimate_unpaired_difference,
    fit_noise,
    pool_residuals,
    pool_samples,
)
from tests.strategies.examples import draw_examples

NO_NOISE = Noise(None, None)
RECORDED = 0.02 * stats.zscore(np.arange(20), ddof=1)
"""Recorded runs with a deviation of 0.02."""
numbers = st.floats(-1, 1, allow_nan=False).map(lambda number: round(number, 3))
tables = st.tuples(st.integers(2, 5), st.integers(2, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(numbers, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


@given(tables)
@draw_examples(60)
def test_a_pool_is_that_of_a_literal_fit(table: list[list[float]]) -> None:
    y = np.array(table)
    num_arms, num_seeds = y.shape
    residuals = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    df = (num_arms - 1) * (num_seeds - 1)
    pool = pool_residuals(y)
    if (residuals**2).sum() < 1e-12:
        return
    assert (pool.variance, pool.df) == pytest.approx(((residuals**2).sum() / df, df))
    for arm in range(num_arms):
        assert pool.prominence[arm] == pytest.approx(compute_prominence(y, arm), abs=1e-6)


def compute_prominence(y: Floats, arm: int) -> float:
    """P(F <= the ratio of mean squares) of one arm against the others, with a fit of all arms and one of the others."""
    fits = [
        numbers - numbers.mean(1, keepdims=True) - numbers.mean(0) + numbers.mean()
        for numbers in (y, np.delete(y, arm, 0))
    ]
    total, others = ((fit**2).sum() for fit in fits)
    extra_df, other_df = y.shape[1] - 1, (y.shape[0] - 2) * (y.shape[1] - 1)
    if not other_df:
        return 0.0
    if others < 1e-12:
        return 1.0 if total > others + 1e-12 else 0.0
    return float(stats.f.cdf((total - others) / extra_df / (others / other_df), extra_df, other_df))


@given(tables, st.data())
@draw_examples(60)
def test_effects_of_arms_and_seeds_do_not_count(table: list[list[float]], data: st.DataObject) -> None:
    y = np.array(table)
    missing = data.draw(st.lists(st.booleans(), min_size=y.size, max_size=y.size))
    y[np.array(missing).reshape(y.shape)] = math.nan
    shifted = y + np.arange(y.shape[0])[:, None] + 3 * np.arange(y.shape[1])
    pool, shifted_pool = pool_residuals(y), pool_residuals(shifted)
    if pool is None or shifted_pool is None:
        assert pool is shifted_pool or min(one.variance for one in (pool, shifted_pool) if one) < 1e-20
        return
    assert shifted_pool.df == pool.df <= np.isfinite(y).sum() - 1
    assert shifted_pool.variance == pytest.approx(pool.variance, abs=1e-9)


@given(tables, st.integers(0, 4))
@draw_examples(40)
def test_an_arm_without_a_second_run_shows_no_noise(table: list[list[float]], seed: int) -> None:
    """A run that stands alone has an effect of its own: it changes neither the pool nor any prominence."""
    y = np.array(table)
    more = np.vstack([y, np.full(y.shape[1], math.nan)])
    more[-1, seed % y.shape[1]] = 7.0
    for pool in (pool_residuals, pool_samples):
        alone, beside = pool(y), pool(more)
        if alone is not None and beside is not None and alone.variance > 1e-9:
            assert beside.variance == pytest.approx(alone.variance)
            assert beside.df == alone.df
            assert beside.prominence == pytest.approx([*alone.prominence, 0.0], abs=1e-6)


def test_equal_arms_leave_no_residual_and_samples_are_pooled_by_degrees_of_freedom() -> None:
    noise = fit_noise(np.array([[0.1, 0.3, 0.7], [0.1, 0.3, 0.7], [0.2, 0.4, 0.8]]))
    assert noise.paired is None
    assert noise.unpaired is not None
    y = np.array([[0.80, 0.82, 0.81], [0.70, 0.71, 0.73]])
    assert str(fit_noise(y, RECORDED)) == str(fit_noise(y))
    pool = pool_samples([[1.0, 3.0, math.nan], [5.0, math.nan, math.nan], [2.0, 2.0, 5.0]])
    assert (pool.variance, pool.df) == pytest.approx(((2.0 + 6.0) / 3, 3.0))
    assert pool.prominence == pytest.approx([stats.f.cdf(2 / 3, 1, 2), 0.0, stats.f.cdf(3 / 2, 2, 1)])


@given(st.floats(1e-6, 1), st.integers(2, 9), st.floats(1e-6, 1), st.integers(2, 60), st.floats(0, 1))
def test_a_blend_lies_between_the_pool_and_the_own_estimate(
    own: float, own_df: int, pooled: float, pool_df: int, doubt: float
) -> None:
    variance, df = blend_variances(own, own_df, pooled, pool_df, doubt)
    assert (
        own * (1 - 1e-9) <= variance <= max(own, pooled) * (1 + 1e-9)
    )  # so a noisy arm is never taken for a quiet one
    assert min(own_df, pool_df) * (1 - 1e-9) <= df <= max(own_df, pool_df) * (1 + 1e-9)
    assert blend_variances(own, own_df, pooled, pool_df, 1.0) == pytest.approx((own, own_df))
    assert blend_variances(own, own_df, pooled, pool_df, 0.0) == pytest.approx((max(own, pooled), pool_df))
    assert blend_variances(own, 1, pooled, pool_df, 0.0) == pytest.approx((own, 1))
    assert blend_variances(own, 0, pooled, pool_df, 1.0) == pytest.approx((pooled, pool_df))


@pytest.mark.parametrize("noisy_arm", [0, 3])
def test_a_noisy_arm_is_doubted_by_degrees_and_judged_by_its_own_runs(noisy_arm: int) -> None:
    y = np.random.default_rng(0).normal(0.8, 0.01, (6, 5))
    y[noisy_arm] += [0.2, -0.2, 0.1, -0.1, 0.0]
    pool = fit_noise(y).paired
    assert compute_doubt(pool.prominence).tolist() == [float(arm == noisy_arm) for arm in range(6)]
    alone = mean_over_seeds(y[noisy_arm] - y[1])
    blended = estimate_pooled_mean(y[noisy_arm] - y[1], fit_noise(y).paired, 2.0, doubt=1.0)
    assert blended == pytest.approx(alone)
    assert compute_doubt([0.0, 0.6, 0.775, 0.95, 1.0]) == pytest.approx([0, 0, 0.5, 1, 1])
    assert compute_doubt(0.95, ARM_DOUBT) == pytest.approx(0.5)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=6))
@draw_examples(60)
def test_two_arms_are_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    y = np.array(pairs).T
    differences = y[1] - y[0]
    if np.ptp(differences) < 1e-6:
        return
    expected = mean_over_seeds(differences)
    assert estimate_pooled_mean(differences, fit_noise(y).paired, 2.0) == pytest.approx(expected, rel=1e-6)
    assert estimate_pooled_mean(differences, None, 2.0) == pytest.approx(expected, rel=1e-6)


def test_one_seed_needs_recorded_replicates_and_other_seeds_without_a_pool_are_welchs_test() -> None:
    y = np.array([[0.8], [0.7]])
    alone = estimate_pooled_mean(y[1] - y[0], fit_noise(y).paired, 2.0)
    assert alone.value == pytest.approx(-0.1)
    assert np.isnan([alone.low, alone.p]).all()
    estimate = estimate_pooled_mean(y[1] - y[0], fit_noise(y, RECORDED).paired, 2.0)
    assert (estimate.se, estimate.df) == (pytest.approx(0.02 * math.sqrt(2)), 19)
    assert estimate.high - estimate.value == pytest.approx(stats.t.ppf(0.975, 19) * 0.02 * math.sqrt(2))
    noise = fit_noise(np.array([[0.80, math.nan, math.nan], [math.nan, 0.70, math.nan]]), RECORDED)
    for baseline in ([0.8], [0.8, 0.81, 0.79, 0.80]):
        unpaired = estimate_unpaired_difference([0.7], baseline, noise)
        assert (unpaired.se, unpaired.df) == (pytest.approx(0.02 * math.sqrt(1 + 1 / len(baseline))), 19)
    x, y = [1.0, 2.0, 4.0], [2.0, 5.0, 5.0, 9.0]
    expected = welch_t_test(
        Sample(float(np.mean(x)), float(np.std(x, ddof=1)), 3), Sample(float(np.mean(y)), float(np.std(y, ddof=1)), 4)
    )
    estimate = estimate_unpaired_difference(x, y, NO_NOISE)
    assert estimate._replace(n=0) == pytest.approx(expected._replace(n=0), rel=1e-9)


def test_no_interval_is_narrower_than_the_evaluation_allows() -> None:
    equal = estimate_pooled_mean([0.1, 0.1, 0.1], None, 2.0)
    assert math.isnan(equal.low)
    assert math.isnan(equal.p)
    floored = estimate_pooled_mean([0.1, 0.1, 0.1], None, 2.0, min_variance=0.01**2)
    assert floored.se == pytest.approx(math.sqrt(2 * 0.01**2 / 3))
    pool = Pool(1e-8, 10.0, np.zeros(2))
    noise = Noise(pool, pool)
    assert estimate_pooled_mean([0.1, 0.1001], noise.paired, 2.0, min_variance=0.01**2).se == pytest.approx(0.01)
    assert estimate_unpaired_difference([0.1], [0.2], noise, min_variance=0.01**2).se == pytest.approx(
        0.01 * math.sqrt(2)
    )


@given(st.floats(-0.2, 0.2), st.floats(0.001, 0.1), st.integers(1, 30))
def test_equal_within_a_margin_is_a_90_percent_interval_inside_it(value: float, se: float, df: int) -> None:
    margin = 0.05
    p = compute_equivalence_p_value(Estimate(value, se=se, df=df), margin)
    half_width = stats.t.ppf(0.95, df) * se
    assert math.isnan(compute_equivalence_p_value(Estimate(value), margin))
    if abs(p - 0.05) > 1e-9:
        assert (p < 0.05) == (-margin < value - half_width and value + half_width < margin)


# Error rates. benchmarks/verdict_errors.py has the same on 4,000 studies per cell; here a bound is missed if the rate
# exceeds it by three standard errors.

NUM_STUDIES = 600


def simulate(deviations: list[float], num_seeds: int, seed: int) -> tuple[float, float]:
    """Share of studies of equal arms with a false verdict after Holm, and coverage of the intervals."""
    generator = np.random.default_rng(seed)
    false_verdicts = covered = 0
    names = [str(arm) for arm in range(len(deviations))]
    for _ in range(NUM_STUDIES):
        y = generator.normal(0.8, np.array(deviations)[:, None], (len(deviations), num_seeds))
        outcomes = Outcomes("late_val_success", pd.DataFrame(y, index=names), {}, fit_noise(y))
        estimates = [estimate_difference(outcomes, arm, "0") for arm in names[1:]]
        false_verdicts += bool(holm_adjust([estimate.p for estimate in estimates]).min() < 0.05)
        covered += sum(estimate.low <= 0 <= estimate.high for estimate in estimates)
    return false_verdicts / NUM_STUDIES, covered / NUM_STUDIES / (len(deviations) - 1)


@pytest.mark.long
@pytest.mark.parametrize("num_seeds", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 5))])
@pytest.mark.parametrize(
    "deviations",
    [[0.015] * 6, [0.01, 0.01, 0.01, 0.03, 0.03, 0.06], [0.075, *[0.015] * 5]],
    ids=["equal", "a noisy arm", "a noisy baseline"],
)
def test_error_rates(deviations: list[float], num_seeds: int) -> None:
    family_error, coverage = simulate(deviations, num_seeds, seed=num_seeds)
    assert family_error <= 0.07 + 3 * math.sqrt(0.07 * 0.93 / NUM_STUDIES)
    assert 0.93 - 3 * math.sqrt(0.93 * 0.07 / NUM_STUDIES) <= coverage
    # Beside a noisier arm, the intervals of the quiet ones are wider than they need be.
    assert coverage <= 0.98 or len(set(deviations)) > 1


def test_the_level_variance_is_that_of_drawn_levels() -> None:
    """Seeds, levels and their interaction are drawn again and again: the two variances add up to that of the mean."""
    generator = np.random.default_rng(0)
    totals = []
    for _ in range(20_000):
        seeds, levels = generator.normal(0, 0.02, (4, 1)), np.repeat(generator.normal(0, 0.3, 20), 3)
        d = seeds + levels + generator.normal(0, 0.4, (4, 60))
        totals.append(d.mean(axis=1).var(ddof=1) / 4 + compute_level_variance(d, np.repeat(np.arange(20), 3)))
    assert np.mean(totals) == pytest.approx(0.02**2 / 4 + 0.3**2 / 20 + 0.4**2 / 240, rel=0.01)
    # As if the levels of one class were independent, it would be a third of it.
    assert compute_level_variance(d, np.arange(60)) < 0.6 * compute_level_variance(d, np.repeat(np.arange(20), 3))
    assert compute_level_variance(np.full((3, 10), 0.2), np.arange(10)) == pytest.approx(0, abs=1e-30)
    assert compute_level_variance([[0.1, 0.1], [0.3, 0.3]], [0, 1]) == pytest.approx(0, abs=1e-30)
    assert compute_level_variance([[0.0, 1.0]], [0, 1]) == pytest.approx(0.25)  # one seed: 0.5 / 2


def test_no_interval_of_a_difference_of_fractions_exceeds_one() -> None:
    values = pd.DataFrame([[0.1, 0.9], [0.9, 0.2]], index=["0", "1"], columns=[0, 1])
    noise = fit_noise(values.to_numpy())
    ends = []
    for is_fraction in (True, False):
        outcomes = Outcomes("late_val_success", values, {}, noise, is_fraction=is_fraction)
        row = make_test_columns(outcomes, estimate_difference(outcomes, "1", "0"), 0.05, equal_rows=False)
        ends.append((row["difference_low"], row["difference_high"]))
    assert ends[0] == (-1.0, 1.0)
    assert ends[1][0] < -1 < 1 < ends[1][1]

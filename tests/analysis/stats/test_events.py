"""Tests of times to an event: enumerations written out, SciPy, values by hand and simulated tests and intervals."""

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis.stats import events
from analysis.stats.estimates import Estimate
from analysis.stats.events import EventTimes
from tests.oracles import analysis as oracles
from tests.strategies.examples import draw_examples

HORIZON = 50
"""Steps of the horizon in examples."""

run_lists = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=10)
pair_lists = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), min_size=2, max_size=8)


def compare(
    arm: Sequence[float] | np.ndarray, baseline: Sequence[float] | np.ndarray, horizon: float = HORIZON, seed: int = 0
) -> Estimate:
    """Compare arms whose runs all have the event."""
    runs = (EventTimes(times, np.ones(len(times), dtype=bool)) for times in (arm, baseline))
    return events.compare_restricted_means(*runs, horizon, np.random.default_rng(seed))


def enumerate_p(differences: Sequence[float]) -> float:
    """Share of all sign flips whose sum is at least as far from 0 as the observed one."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * difference for sign, difference in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(value >= observed - 1e-9 for value in sums) / len(sums)


@given(run_lists)
@draw_examples(60)
def test_survival_equals_its_oracle(runs: list[tuple[int, bool]]) -> None:
    ends, has_event = [end for end, _ in runs], [is_event for _, is_event in runs]
    steps, surviving = events.kaplan_meier(ends, has_event)
    assert (steps[0], surviving[0]) == (0, 1)
    assert list(steps[1:]) == sorted({end for end, is_event in runs if is_event})
    assert surviving == pytest.approx([oracles.survival(ends, has_event, int(step)) for step in steps])


def test_what_has_no_event_has_one_point_and_no_difference_or_no_interval() -> None:
    for ends in ([], [5, 9]):
        steps, surviving = events.kaplan_meier(ends, [False] * len(ends))
        assert (list(steps), list(surviving)) == ([0.0], [1.0])
    assert math.isnan(events.restricted_mean([], [], 50))
    sides = [EventTimes([50] * 8, [False] * 8)] * 2, [EventTimes([], [])] * 2
    sides += ([EventTimes([20, 30], [True, is_event]) for is_event in (False, True)],)
    estimate, empty, censored = (
        events.compare_restricted_means(*runs, HORIZON, np.random.default_rng(0)) for runs in sides
    )
    # Without an event before the horizon, nothing is excluded.
    assert (estimate.value, estimate.p, math.isnan(estimate.low)) == (0, 1, True)
    assert empty == pytest.approx(Estimate(), nan_ok=True)
    assert math.isnan(censored.value)


@given(run_lists, st.integers(1, 15))
@draw_examples(100)
def test_restricted_mean_sums_survival_over_steps(runs: list[tuple[int, bool]], horizon: int) -> None:
    ends, has_event = [end for end, _ in runs], [is_event for _, is_event in runs]
    mean = events.restricted_mean(ends, has_event, horizon)
    if max(ends) < horizon and oracles.survival(ends, has_event, max(ends)) > 0:
        assert math.isnan(mean)
    else:
        assert mean == pytest.approx(sum(oracles.survival(ends, has_event, step) for step in range(horizon)))


@given(pair_lists)
@draw_examples(60)
def test_p_equals_the_permutation_test_of_scipy(pairs: list[tuple[int, int]]) -> None:
    arm, baseline = np.array(pairs, dtype=float).T
    expected = scipy_stats.permutation_test(
        (np.minimum(arm, HORIZON), np.minimum(baseline, HORIZON)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    estimate = compare(arm, baseline)
    assert estimate.value == pytest.approx(expected.statistic)
    assert estimate.p == pytest.approx(expected.pvalue)


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), min_size=6, max_size=8))
@draw_examples(30)
def test_interval_has_exactly_the_shifts_that_are_not_rejected(pairs: list[tuple[int, int]]) -> None:
    estimate = compare(*zip(*pairs, strict=True), horizon=80)
    differences = [first - second for first, second in pairs]
    if min(min(pair) for pair in pairs) == 80:
        assert math.isnan(estimate.low)
        return
    if math.isnan(estimate.low):
        # A single shift is not rejected, the difference of most seeds: an interval would have width zero.
        shift = statistics.mode(differences)
        for other in (shift - 1e-4, shift + 1e-4):
            assert enumerate_p([difference - other for difference in differences]) <= 0.05
        return
    for bound, outward in ((estimate.low, -1), (estimate.high, 1)):
        assert enumerate_p([difference - bound for difference in differences]) > 0.05
        assert enumerate_p([difference - bound - outward * 1e-4 for difference in differences]) <= 0.05
    assert (estimate.low <= 0 <= estimate.high) == (estimate.p > 0.05)


@pytest.mark.parametrize("num_seeds", [5, 6])
def test_six_seeds_are_the_fewest_with_a_finite_interval(num_seeds: int) -> None:
    estimate = compare(np.arange(num_seeds) + 20, np.arange(num_seeds) * 2 + 1)
    assert estimate.p == 2 / 2**num_seeds
    # With 6 seeds, 2 of 64 flips may reject, so that the bounds are the smallest and the largest difference.
    expected = (pytest.approx(math.nan, nan_ok=True),) * 2 if num_seeds == 5 else (14, 19)
    assert (estimate.low, estimate.high) == expected


@pytest.mark.parametrize("num_seeds", [7, 20])
@pytest.mark.parametrize("is_censored", [False, True])
def test_exchanged_arms_negate_the_estimate(num_seeds: int, is_censored: bool) -> None:
    generator = np.random.default_rng(1)
    times = generator.exponential(40, (2, num_seeds)) + np.array([[20], [0]])
    is_event = generator.random((2, num_seeds)) < (0.8 if is_censored else 1)
    times[:, -1] = HORIZON
    arm, baseline = (EventTimes(*runs) for runs in zip(times, is_event, strict=True))
    estimate, negated_estimate = (
        events.compare_restricted_means(*runs, HORIZON, np.random.default_rng(2))
        for runs in ((arm, baseline), (baseline, arm))
    )
    expected = (-estimate.value, -estimate.high, -estimate.low, num_seeds)
    assert estimate.value > 0
    assert negated_estimate[:4] == pytest.approx(expected, nan_ok=True)
    assert negated_estimate.p == estimate.p
    assert math.isnan(estimate.low) == is_censored


def test_random_exchanges_include_the_observed_one_and_use_the_generator_only() -> None:
    arm, baseline = np.arange(20) + 30, np.arange(20) + 1
    assert compare(arm, baseline).p == 1 / 10_000
    noisy_baseline = np.random.default_rng(3).permuted(arm)
    first, second, other = (compare(arm, noisy_baseline, seed=seed) for seed in (1, 1, 2))
    assert first == second != other
    exact = compare(arm[:14], noisy_baseline[:14], seed=1)
    assert exact == compare(arm[:14], noisy_baseline[:14], seed=2)


def test_censored_runs_are_compared_by_every_exchange_that_leaves_both_curves_known() -> None:
    sides = [[(44, True), (42, True), (60, False), (22, True)], [(20, True), (30, False), (10, True), (50, True)]]
    estimate = events.compare_restricted_means(
        *(EventTimes(*zip(*side, strict=True)) for side in sides), 45, np.random.default_rng(0)
    )
    differences = []
    for exchange in itertools.product((0, 1), repeat=4):
        exchanged_sides = [[sides[side ^ flip][seed] for seed, flip in enumerate(exchange)] for side in (0, 1)]
        means = [events.restricted_mean(*zip(*side, strict=True), 45) for side in exchanged_sides]
        differences.append(means[0] - means[1])
    is_known = ~np.isnan(differences)
    # Either arm may get the runs that end at 20, 22 and 10 and the one censored at 30: unknown after step 30.
    assert is_known.sum() == 14
    assert estimate.value == pytest.approx(differences[0])
    assert estimate.p == np.mean(np.abs(np.array(differences)[is_known]) >= abs(differences[0]) - 1e-9)
    assert estimate.p < 1
    assert math.isnan(estimate.low)

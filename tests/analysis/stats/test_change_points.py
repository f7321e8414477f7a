import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.stats import change_points
from analysis.stats.change_points import Change, _permute_blocks, find_change
from tests.strategies.examples import thin_out


def make_ramp(steps: np.ndarray, onset: float, end: float, before: float, after: float) -> np.ndarray:
    return before + (after - before) * np.clip((steps - onset) / (end - onset), 0, 1)


def draw_noise(generator: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    noise = generator.normal(size=count)
    for index in range(1, count):
        noise[index] = correlation * noise[index - 1] + math.sqrt(1 - correlation**2) * noise[index]
    return noise


@given(
    st.integers(8, 40).flatmap(
        lambda count: st.tuples(st.just(count), st.integers(1, count - 2)).flatmap(
            lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(pair[1] + 1, pair[0] - 1))
        )
    ),
    st.floats(-5, 5),
    st.sampled_from([-2.0, 3.0]),
    st.integers(1, 7),
)
def test_a_ramp_without_noise_is_recovered(
    places: tuple[int, int, int], before: float, change: float, spacing: int
) -> None:
    count, start, end = places
    steps = spacing * np.arange(count)
    values = make_ramp(steps, steps[start], steps[end], before, before + change)
    estimate = find_change(steps, values, np.random.default_rng(0))
    assert (estimate.onset, estimate.end) == (steps[start], steps[end])
    assert estimate.low <= estimate.onset <= estimate.high
    assert (estimate.before, estimate.after) == pytest.approx((before, before + change), abs=1e-9)


def test_only_changes_in_the_given_direction_count_and_a_long_series_is_searched_on_a_grid() -> None:
    steps = np.arange(40)
    # A large rise, then a small fall.
    values = make_ramp(steps, 5, 10, 0.0, 3.0) + make_ramp(steps, 25, 30, 0.0, -1.0)
    rise, fall, either = (find_change(steps, values, np.random.default_rng(0), sign) for sign in (1, -1, 0))
    assert rise == either
    assert (rise.before < rise.after, fall.before > fall.after) == (True, True)
    assert find_change(steps, -values, np.random.default_rng(0), -1).onset == rise.onset
    assert find_change(steps, steps, np.random.default_rng(0), -1) == pytest.approx(Change(), nan_ok=True)
    steps = np.arange(1, 1001)
    noise = np.random.default_rng(1).normal(size=1000)
    estimate = find_change(steps, make_ramp(steps, 300, 500, 0.0, 4.0) + noise, np.random.default_rng(0))
    assert estimate.low <= 300 <= estimate.high
    assert estimate.high - estimate.low < 60
    assert estimate.p == 0.001


def test_missing_values_are_skipped_and_little_or_constant_data_has_no_change() -> None:
    steps = np.arange(60)
    values = make_ramp(steps, 20, 40, 1.0, 0.0)
    sparse = np.where(steps % 5 == 0, values, math.nan)
    estimate = find_change(steps, sparse, np.random.default_rng(0))
    assert (estimate.onset, estimate.end) == (20, 40)
    few = np.where(steps % 10 == 0, values, math.nan)
    for series in (few, np.ones(60), np.full(60, math.nan)):
        assert find_change(steps, series, np.random.default_rng(0)) == pytest.approx(Change(), nan_ok=True)


@pytest.mark.long
@pytest.mark.parametrize(("count", "spacing"), [(60, 1), (13, 5)], ids=["every step", "validations"])
@pytest.mark.parametrize("correlation", thin_out([0.4, 0.0], 2))
def test_intervals_cover_the_onset_and_noise_alone_is_rarely_a_change(
    count: int, spacing: int, correlation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_points, "NUM_PERMUTATIONS", 99)
    generator, draws = np.random.default_rng(0), 150
    steps = spacing * np.arange(count)
    covered = detected = false = 0
    for _ in range(draws):
        noise = draw_noise(generator, count, correlation)
        onset = spacing * generator.integers(count // 4, count // 2)
        end = onset + spacing * generator.integers(1, count // 3)
        change = find_change(steps, make_ramp(steps, onset, end, 0.0, -6.0) + noise, generator, -1)
        covered += change.low <= onset <= change.high
        detected += change.p <= 0.05
        false += find_change(steps, noise, generator, -1).p <= 0.01
    assert covered >= 0.85 * draws
    assert detected >= 0.95 * draws
    # The level is .01 without correlation; blocks of a few values keep only a part of a correlation.
    assert false <= 0.06 * draws


def test_blocks_of_permutations_stay_together_and_start_anywhere() -> None:
    values = np.arange(100.0, 130.0)  # blocks of three
    orders = _permute_blocks(values, 500, np.random.default_rng(0))
    assert orders.shape == (500, 30)
    assert (np.sort(orders, axis=1) == values).all()
    # Within a block the next value follows, or the first one follows the last.
    gaps = np.diff(orders.reshape(500, 10, 3), axis=2)
    assert np.isin(gaps, [1.0, -29.0]).all()
    # Each value comes first in about a thirtieth of the orders, and a block rarely follows the one that it did before.
    counts = np.bincount((orders[:, 0] - 100).astype(int), minlength=30)
    assert counts.min() > 0
    assert counts.max() < 45
    follows = orders[:, 3::3] - orders[:, 2:-1:3]
    assert np.isin(follows, [1.0, -29.0]).mean() < 0.2
    # Eleven values have blocks of two, and one of a single value.
    short_orders = _permute_blocks(np.arange(11.0), 200, np.random.default_rng(0))
    assert (np.sort(short_orders, axis=1) == np.arange(11.0)).all()

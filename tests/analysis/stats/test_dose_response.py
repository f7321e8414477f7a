"""Tests of edges: the likelihood against scipy, bounds against a dense search, identities, exact coverage."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import optimize, special, stats

from analysis.stats import dose_response
from analysis.stats.dose_response import DoseCounts, bound_edge, compute_log_likelihood, estimate_edge, estimate_shift
from analysis.stats.estimates import Floats
from tests.strategies.examples import draw_examples, thin_out

DOSES = np.log10([1e-4, 3e-4, 1e-3, 1.7e-3, 3e-3])
CRITICAL_VALUE = stats.chi2.ppf(0.95, 1)
Counts = st.lists(st.integers(0, 3), min_size=5, max_size=5)


def make_counts(num_events: list[int] | tuple[int, ...], num_runs: int = 3, doses: Floats = DOSES) -> DoseCounts:
    return DoseCounts(doses, np.array(num_events, dtype=float), np.full(len(doses), float(num_runs)))


def mirror(counts: DoseCounts) -> DoseCounts:
    """The same runs with the doses from high to low, and with the event where there was none."""
    return DoseCounts(-counts.doses[::-1], (counts.num_runs - counts.num_events)[::-1], counts.num_runs[::-1])


@given(Counts, st.floats(-3, 3), st.floats(-2, 4))
def test_the_likelihood_is_that_of_scipy_with_the_jeffreys_prior(num_events: list[int], a: float, b: float) -> None:
    counts = make_counts(num_events)
    x = counts.doses - counts.doses.mean()
    design = np.stack([np.ones_like(x), x], axis=1)
    p = special.expit(a + b * x)
    log_pmf = stats.binom.logpmf(counts.num_events, counts.num_runs, p).sum()
    constant = np.log(special.comb(counts.num_runs, counts.num_events)).sum()
    # The Fisher information as a double sum over coefficients.
    information = [[(counts.num_runs * p * (1 - p) * u * v).sum() for u in design.T] for v in design.T]
    expected = log_pmf - constant + math.log(np.linalg.det(information)) / 2
    assert_allclose(compute_log_likelihood(design, np.array([a, b]), counts), expected, rtol=1e-6)


def profile_edge(counts: DoseCounts, edge: float) -> float:
    """The largest penalized log-likelihood at an edge, over a dense grid of slopes."""
    slopes = np.geomspace(0.1, 1000, 4001)
    design = np.stack([np.ones_like(counts.doses), counts.doses], axis=1)
    return float(compute_log_likelihood(design, np.stack([-slopes * edge, slopes], axis=-1), counts).max())


@pytest.mark.long
@pytest.mark.parametrize(
    "num_events", thin_out([(0, 0, 1, 2, 3), (0, 0, 1, 3, 3), (0, 1, 0, 2, 3), (0, 0, 0, 1, 2)], 2)
)
def test_the_interval_has_the_edges_that_the_likelihood_ratio_does_not_reject(num_events: tuple[int, ...]) -> None:
    counts = make_counts(num_events)
    edge = estimate_edge(counts).edge
    maximum = profile_edge(counts, edge.value)
    for other in np.linspace(counts.doses[0] - 1, counts.doses[-1] + 1, 301):
        value = profile_edge(counts, float(other))
        assert value <= maximum + 1e-6
        is_outside = 2 * (maximum - value) > CRITICAL_VALUE
        assert (
            is_outside == (other < edge.low or other > edge.high) or abs(2 * (maximum - value) - CRITICAL_VALUE) < 0.01
        )
    for bound in (edge.low, edge.high):
        if not math.isnan(bound):
            assert 2 * (maximum - profile_edge(counts, bound)) == pytest.approx(CRITICAL_VALUE, abs=0.01)


@draw_examples(20)
@given(Counts)
def test_an_edge_mirrors_and_moves_with_its_doses(num_events: list[int]) -> None:
    counts = make_counts(num_events)
    result, mirrored, moved = (
        estimate_edge(each) for each in (counts, mirror(counts), counts._replace(doses=counts.doses + 1))
    )
    assert bool(result.refusal) == bool(mirrored.refusal) == bool(moved.refusal)
    assert_allclose(mirrored.edge[:3], [-result.edge.value, -result.edge.high, -result.edge.low], atol=2e-3)
    assert_allclose(moved.edge[:3], [value + 1 for value in result.edge[:3]], atol=2e-3)
    assert_allclose([mirrored.bracket_low, mirrored.bracket_high], [-result.bracket_high, -result.bracket_low])


def test_runs_are_counted_at_their_doses_and_a_known_edge_is_recovered() -> None:
    generator, true_edge = np.random.default_rng(0), -2.9
    num_events = generator.binomial(200, special.expit(6 * (DOSES - true_edge)))
    edge = estimate_edge(make_counts(num_events.tolist(), 200)).edge
    assert edge.value == pytest.approx(true_edge, abs=0.03)
    assert edge.low < true_edge < edge.high < edge.low + 0.1
    assert edge.n == 1000
    counts = dose_response.count_events([1e-3, 1e-4, 1e-3, 1e-2], [True, False, False, True])
    assert_allclose(counts.doses, [-4, -3, -2])
    assert (counts.num_events.tolist(), counts.num_runs.tolist()) == ([0, 1, 1], [1, 2, 1])


def test_separated_runs_have_a_bracket_and_an_exact_interval() -> None:
    result = estimate_edge(make_counts((0, 0, 0, 3, 3)))
    assert result.is_separated
    assert (result.bracket_low, result.bracket_high) == (DOSES[2], DOSES[3])
    assert result.edge.value == pytest.approx((DOSES[2] + DOSES[3]) / 2)
    # Six runs on either side: 2^-6 < .025 < 2^-5.
    assert (result.edge.low, result.edge.high) == (DOSES[1], DOSES[4])
    assert not estimate_edge(make_counts((0, 0, 1, 3, 3))).is_separated
    assert not estimate_edge(make_counts((3, 3, 0, 0, 0))).is_separated


def test_no_event_and_events_everywhere_bound_the_edge_on_one_side_and_five_runs_not_at_all() -> None:
    none, everywhere = estimate_edge(make_counts((0,) * 5)), estimate_edge(make_counts((3,) * 5))
    assert none.refusal == "no event"
    assert everywhere.refusal == "an event in every run"
    assert (none.edge.low, everywhere.edge.high) == (DOSES[3], DOSES[1])
    assert np.isnan([none.edge.value, none.edge.high, everywhere.edge.value, everywhere.edge.low]).all()
    assert (none.bracket_low, everywhere.bracket_high) == (DOSES[4], DOSES[0])
    assert np.isnan(bound_edge(make_counts((0, 0, 0, 0, 1), num_runs=1))).all()
    assert np.isnan(estimate_edge(make_counts((0, 0, 0, 1, 1), num_runs=1)).edge[1:3]).all()


@pytest.mark.parametrize(
    ("counts", "refusal"),
    [
        (make_counts((3, 2, 1, 0, 0)), "the frequency does not rise with the dose"),
        (make_counts((1,), doses=np.zeros(1)), "an edge needs two doses"),
        (make_counts((), doses=np.zeros(0)), "no scored run"),
        (make_counts((0, 0, 1, 1, 2), 30), "the edge lies more than a decade outside the doses"),
    ],
)
def test_what_has_no_edge_says_why(counts: DoseCounts, refusal: str) -> None:
    result = estimate_edge(counts)
    assert result.refusal == refusal
    assert np.isnan(result.edge[:3]).all()


def compute_probabilities(probabilities: Floats, num_runs: int) -> dict[tuple[int, ...], float]:
    """The probability of each outcome: events by dose."""
    return {
        outcome: float(np.prod(stats.binom.pmf(outcome, num_runs, probabilities)))
        for outcome in product(range(num_runs + 1), repeat=len(probabilities))
    }


def contains(low: float, high: float, value: float) -> bool:
    """Whether an interval has a value; a missing bound excludes nothing."""
    return not (low > value or high < value)


@pytest.mark.long
def test_intervals_cover_the_edge_over_all_outcomes() -> None:
    doses = np.array([-1.0, -0.5, 0.0])
    intervals = {
        outcome: estimate_edge(make_counts(outcome, 3, doses)).edge[1:3] for outcome in product(range(4), repeat=3)
    }
    for edge, slope in product((-0.8, -0.5, -0.25, 0.1), (3, 8, 30)):
        probabilities = compute_probabilities(special.expit(slope * (doses - edge)), 3)
        coverage = sum(p for outcome, p in probabilities.items() if contains(*intervals[outcome], edge))
        assert coverage >= 0.95, (edge, slope)


def test_exact_bounds_hold_for_every_shape() -> None:
    # At probabilities of 1/2 the test is as often wrong as it may be: the edge is at every dose.
    doses = np.array([0.0, 1.0, 2.0, 3.0])
    bounds = {outcome: bound_edge(make_counts(outcome, 3, doses)) for outcome in product(range(4), repeat=4)}
    for edge_index in range(4):
        probabilities = np.where(np.arange(4) < edge_index, 0.0, 0.5)
        outcomes = compute_probabilities(probabilities, 3)
        false_claims = sum(p for outcome, p in outcomes.items() if bounds[outcome][0] >= doses[edge_index])
        assert false_claims <= 0.025
    assert bounds[0, 0, 0, 0] == pytest.approx((2.0, math.nan), nan_ok=True)
    assert bounds[3, 3, 3, 3] == pytest.approx((math.nan, 1.0), nan_ok=True)
    # An event at the lowest dose speaks for an edge below all doses, whatever follows.
    assert math.isnan(bounds[1, 0, 0, 0][0])


@pytest.mark.long
def test_equal_lines_have_no_shift_and_exchanged_lines_the_opposite() -> None:
    line, reference = make_counts((0, 0, 0, 1, 3)), make_counts((0, 0, 2, 3, 3))
    shift, exchanged = estimate_shift(line, reference), estimate_shift(reference, line)
    assert 0 < shift.low < shift.value < shift.high
    assert_allclose(exchanged[:3], [-shift.value, -shift.high, -shift.low], atol=2e-3)
    same = estimate_shift(line, line)
    assert same.value == pytest.approx(0, abs=1e-3)
    assert same.low == pytest.approx(-same.high, abs=2e-3)


def test_the_bounds_of_a_shift_are_those_of_the_likelihood_ratio_and_it_moves_with_its_doses() -> None:
    line, reference = make_counts((0, 0, 0, 1, 3)), make_counts((0, 0, 2, 3, 3))
    counts = DoseCounts(*(np.concatenate(fields) for fields in zip(line, reference, strict=True)))
    design = np.stack([np.ones(10), counts.doses, np.repeat([1.0, 0.0], 5)], axis=1)

    def profile(shift: float) -> float:
        def compute_loss(parameters: Floats) -> float:
            edge, log_slope = parameters
            slope = math.exp(log_slope)
            return -float(compute_log_likelihood(design, np.array([-slope * edge, slope, -slope * shift]), counts))

        starts = product((-3.2, -2.9, -2.6), (1.0, 2.5))
        return max(-optimize.minimize(compute_loss, start, method="Nelder-Mead").fun for start in starts)

    shift = estimate_shift(line, reference)
    maximum = profile(shift.value)
    assert all(profile(shift.value + change) < maximum + 1e-6 for change in (-0.05, 0.05))
    for bound in (shift.low, shift.high):
        assert 2 * (maximum - profile(bound)) == pytest.approx(CRITICAL_VALUE, abs=0.01)
    counts = make_counts((0, 0, 1, 2, 3))
    shift = estimate_shift(counts._replace(doses=counts.doses + 0.5), counts)
    assert shift.value == pytest.approx(0.5, abs=1e-3)


@pytest.mark.long
def test_a_line_without_events_bounds_the_shift_on_one_side() -> None:
    none, everywhere, some = make_counts((0,) * 5), make_counts((3,) * 5), make_counts((0, 0, 1, 3, 3))
    assert estimate_shift(none, some).low > 0
    assert np.isnan([estimate_shift(none, some).value, estimate_shift(none, some).high]).all()
    assert estimate_shift(some, none).high < 0
    assert estimate_shift(everywhere, some).high < 0
    assert np.isnan(estimate_shift(everywhere, some).low)
    for counts in (none, everywhere):
        assert np.isnan(estimate_shift(counts, counts)[:3]).all()

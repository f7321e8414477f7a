import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.oracles import algo as oracle
from tests.strategies.algo import examples, matrix, numbers, score_vectors
from trainable.algo.filters import Rule, compute_filter_loss_scale, compute_group_scores, parse_rule, select_groups


def list_kept_groups(scores: list[float], rule: Rule, **options: bool) -> list[int]:
    return select_groups(torch.tensor(scores), rule, **options).nonzero().flatten().tolist()


def make_linear_rule(mass: float) -> Rule:
    return parse_rule("top_p", mass, "linear", eps=0.01)


def make_softmax_rule(mass: float) -> Rule:
    return parse_rule("top_p", mass, "softmax", eps=0.01)


PUBLISHED = [
    ([4, 3, 2, 1], make_linear_rule(0.6), True, [0, 1]),
    ([0, 0, 0, 0], make_linear_rule(0.9), True, []),
    ([1, 1, 1], make_softmax_rule(0.6), True, [0, 1]),
    ([10, 1, 0, 0], make_softmax_rule(0.9), False, [0]),
    ([4, 2, 0, 0], make_softmax_rule(0.9), False, [0, 1]),
    ([10, 1, 0, 0], make_linear_rule(0.9), False, [0]),
    ([4, 2, 0, 0], make_linear_rule(0.9), False, [0, 1]),
    ([3, 1, 1, 0], make_linear_rule(0.9), False, [0, 1, 2]),
    ([0, 2, 0, 1], make_softmax_rule(1.0), True, [0, 1, 2, 3]),
    ([0, 2, 0, 1], make_linear_rule(1.0), False, [1, 3]),
    ([0.002, 0.003, 0.001, 0.002, 0, 0, 0, 0], make_linear_rule(0.9), False, []),
    ([0.002, 0.003, 0.001, 0.002, 0, 0, 0, 0], make_softmax_rule(0.9), False, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("scores", "rule", "include_zero", "expected"), PUBLISHED)
def test_published_vectors(scores: list[float], rule: Rule, include_zero: bool, expected: list[int]) -> None:
    assert list_kept_groups([float(score) for score in scores], rule, include_zero=include_zero) == expected


SOKOBAN = [5.5, 4.2, 3.0, 0.2, 0.15, 0.12, 0.1, 0.0]


@pytest.mark.parametrize(
    ("mass", "by_softmax", "by_linear"),
    [(0.98, 3, 5), (0.95, 3, 3), (0.9, 2, 3), (0.8, 2, 3), (0.6, 1, 2), (0.4, 1, 1), (1.0, 7, 7)],
)
def test_published_counts_on_sokoban_like_scores(mass: float, by_softmax: int, by_linear: int) -> None:
    assert len(list_kept_groups(SOKOBAN, make_softmax_rule(mass), include_zero=False)) == by_softmax
    assert len(list_kept_groups(SOKOBAN, make_linear_rule(mass), include_zero=False)) == by_linear


RULES = [
    *[("top_p", mass, mode) for mass in (0.1, 0.4, 0.6, 0.9, 0.98, 1.0) for mode in ("softmax", "linear")],
    *[("top_k", fraction, "softmax") for fraction in (0.05, 0.29, 0.5, 1.0)],
    *[("top_k_abs", count, "softmax") for count in (1.0, 3.0, 50.0)],
    *[("min_p", ratio, "softmax") for ratio in (0.05, 0.3, 1.0)],
]


@examples
@given(score_vectors(signed=True), st.sampled_from(RULES), st.booleans(), st.booleans())
def test_every_rule_equals_the_loop(
    scores: list[float], rule_settings: tuple[str, float, str], largest: bool, include_zero: bool
) -> None:
    # No dropped group beats a kept one, and ties go to the lower index.
    kept_groups = list_kept_groups(scores, parse_rule(*rule_settings), largest=largest, include_zero=include_zero)
    candidates = [i for i, score in enumerate(scores) if include_zero or not oracle.is_zero(score)]
    rank = {i: (-scores[i] if largest else scores[i], i) for i in candidates}
    assert set(kept_groups) <= set(candidates)
    assert list_kept_groups([0.0] * len(scores), parse_rule(*rule_settings), include_zero=False) == []
    assert sorted(kept_groups, key=lambda i: rank[i]) == sorted(candidates, key=lambda i: rank[i])[: len(kept_groups)]
    strategy, value, mode = rule_settings
    expected, margin = oracle.select_groups(scores, strategy, value, mode, 0.01, largest, include_zero)
    assume(margin > 1e-4)  # closer to the bound, float32 and exact arithmetic may select different groups
    rule = parse_rule(strategy, value, mode, eps=0.01)
    assert select_groups(torch.tensor(scores), rule, largest, include_zero).tolist() == expected


def test_zero_means_at_most_1e_10_in_size_and_no_groups_keep_nothing() -> None:
    assert list_kept_groups([1e-10, -1e-10, 1.1e-10, -2e-10], parse_rule("top_p", 1.0), include_zero=False) == [2, 3]
    assert list_kept_groups([], make_softmax_rule(0.9)) == []


def test_top_k_counts_the_groups_before_zeros_are_dropped() -> None:
    scores = [3.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.5, 0.0]
    assert list_kept_groups(scores, parse_rule("top_k", 0.5), include_zero=False) == [0, 2, 4, 6]
    assert list_kept_groups(scores, parse_rule("top_k", 0.25), include_zero=False) == [0, 2]
    assert list_kept_groups(scores, parse_rule("top_k", 1.0), include_zero=False) == [0, 2, 4, 6]
    assert list_kept_groups(scores, parse_rule("top_k", 0.01)) == [0]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("rule", [make_softmax_rule(0.5), make_linear_rule(0.5), parse_rule("top_k", 0.5)])
def test_ties_go_to_the_lower_index_among_many_groups(rule: Rule, largest: bool) -> None:
    """The order of an unstable sort differs only for more than sixteen numbers."""
    kept_groups = list_kept_groups([1.0] * 128, rule, largest=largest)
    assert kept_groups == list(range(len(kept_groups)))
    assert len(kept_groups) == 64


def test_min_p_by_hand() -> None:
    assert list_kept_groups([1e-9, 0.95e-9, 0.8e-9], parse_rule("min_p", 1.0)) == [0, 1]
    assert list_kept_groups([1e-9, 1.05e-9, 1.2e-9], parse_rule("min_p", 1.0), largest=False) == [0, 1]
    assert list_kept_groups([4.0, 0.0, -1.0], parse_rule("min_p", 0.0)) == [0, 1]
    assert list_kept_groups([1.0, 5.0, 2e10], parse_rule("min_p", 0.0), largest=False) == [0, 1]
    scores = torch.tensor([5.3, 5.3, 6.1], dtype=torch.float64)
    assert select_groups(scores, parse_rule("min_p", 1.0), largest=False).tolist() == [True, True, False]


def test_linear_smallest_stops_at_a_zero() -> None:
    assert list_kept_groups([0.0, 1.0, 2.0], make_linear_rule(0.9), largest=False) == []
    assert list_kept_groups([0.0, 1.0, 2.0], make_linear_rule(0.9), largest=False, include_zero=False) == [1, 2]
    assert list_kept_groups([3.0, 1.0, 2.0], make_linear_rule(0.5), largest=False) == [1, 2]
    assert list_kept_groups([3.0, 1.0, 2.0, 2.0], parse_rule("top_p", 0.625, "linear", eps=0.0)) == [0, 2]


METRICS = [
    ("reward_variance", 0, statistics.stdev),
    ("reward_std", 0, statistics.stdev),
    ("reward", 0, statistics.fmean),
    ("reward_sum", 0, math.fsum),
    ("entropy", 1, statistics.fmean),
    ("entropy_variance", 1, statistics.stdev),
    ("entropy_std", 1, statistics.stdev),
    ("length", 2, statistics.fmean),
]


@pytest.mark.parametrize(("metric", "source", "statistic"), METRICS)
@examples
@given(matrix(numbers, 3, 4), matrix(numbers, 3, 4), matrix(st.integers(1, 400), 3, 4))
def test_group_scores_equal_the_statistics_module(
    metric: str, source: int, statistic: object, rewards: list, entropies: list, lengths: list
) -> None:
    rows = (rewards, entropies, lengths)[source]
    scores = compute_group_scores(metric, torch.tensor(rewards), torch.tensor(entropies), torch.tensor(lengths))
    expected = torch.tensor([statistic([float(x) for x in row]) for row in rows])  # type: ignore[operator]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_the_smallest_groups() -> None:
    """One rollout has no spread, and the spread of two rollouts has the divisor 1."""
    assert compute_group_scores("reward_std", torch.tensor([[3.0], [4.0]])).tolist() == [0, 0]
    torch.testing.assert_close(compute_group_scores("reward_std", torch.tensor([[3.0, 5.0]])), torch.tensor([2.0**0.5]))
    for reward in (10.9, -0.1, 0.3):  # equal rewards have a spread of exactly zero
        assert compute_group_scores("reward_std", torch.full((2, 16), reward)).tolist() == [0, 0]


def test_filter_loss_scale() -> None:
    assert compute_filter_loss_scale("none", 2, 8) == 1
    assert compute_filter_loss_scale("linear", 2, 8) == 0.25
    assert compute_filter_loss_scale("sqrt", 2, 8) == 0.5
    assert compute_filter_loss_scale("sqrt", 0, 8) == 0
    assert compute_filter_loss_scale("linear", 1, 1) == 1

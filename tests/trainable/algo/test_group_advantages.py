import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import algo as oracle
from tests.strategies.algo import Sequences, discounts, examples, grouped_scores, sequences
from trainable.algo.advantages import (
    group_skill,
    grpo,
    prefix_tree_grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)

GroupScores = tuple[list[float], list[int]]


def make_tensors(group_scores: GroupScores) -> tuple[Tensor, Tensor, Tensor]:
    scores, group_ids = group_scores
    mask = torch.tensor([[True, False, i % 3 > 0] for i in range(len(scores))])
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(group_ids), mask


def assert_broadcast(advantages: Tensor, per_sequence: list[float], mask: Tensor) -> None:
    expected = torch.tensor(per_sequence, dtype=advantages.dtype)[:, None] * mask
    torch.testing.assert_close(advantages, expected)


@examples
@given(grouped_scores())
def test_grpo_equals_the_loop(group_scores: GroupScores) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    for norm_by_std in (False, True):
        advantages = grpo(scores, group_ids, mask, norm_by_std=norm_by_std)
        assert_broadcast(advantages, oracle.grpo(*group_scores, norm_by_std=norm_by_std), mask)


@examples
@given(grouped_scores(), st.sampled_from([1e-8, 0.3]))
def test_grpo_of_another_source_equals_the_loop(group_scores: GroupScores, floor: float) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    advantages = grpo(scores, group_ids, mask, norm_by_std=True, correction=0, std_floor=floor, min_std=floor)
    assert_broadcast(advantages, oracle.population_grpo(*group_scores, floor), mask)


@examples
@given(grouped_scores())
def test_grpo_with_the_std_of_the_batch_equals_the_loop(group_scores: GroupScores) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    advantages = grpo(scores, group_ids, mask, norm_by_std=True, has_batch_std=True)
    assert_broadcast(advantages, oracle.batch_grpo(*group_scores), mask)
    # In a single group, both deviations are the same.
    one_group = torch.zeros_like(group_ids)
    plain, batch = (grpo(scores, one_group, mask, norm_by_std=True, has_batch_std=x) for x in (False, True))
    assert torch.equal(plain, batch)


@examples
@given(grouped_scores(), st.data())
def test_prefix_tree_grpo_adds_the_loops_over_groups_and_over_trees(
    group_scores: GroupScores, data: st.DataObject
) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    size = len(scores)
    numbers = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    tree_ids = [3 * group + number for group, number in zip(group_scores[1], numbers, strict=True)]
    for norm_by_std in (False, True):
        advantages = prefix_tree_grpo(scores, group_ids, torch.tensor(numbers), mask, norm_by_std)
        terms = [oracle.grpo(group_scores[0], ids, norm_by_std=norm_by_std) for ids in (group_scores[1], tree_ids)]
        assert_broadcast(advantages, [sum(pair) for pair in zip(*terms, strict=True)], mask)
    # One tree per group doubles the advantages, and trees of one sequence leave them as they are.
    plain = grpo(scores, group_ids, mask, norm_by_std=True)
    for trees, factor in ((torch.zeros_like(group_ids), 2), (torch.arange(size), 1)):
        torch.testing.assert_close(prefix_tree_grpo(scores, group_ids, trees, mask, norm_by_std=True), factor * plain)


def test_a_score_that_is_not_a_number_stays_one_in_its_group() -> None:
    scores, mask = torch.tensor([1.0, torch.nan, 1.0, 2.0]), torch.ones(4, 1, dtype=torch.bool)
    advantages = grpo(scores, torch.tensor([0, 0, 1, 1]), mask, norm_by_std=True, min_std=1e-8)
    assert advantages.isnan().flatten().tolist() == [True, True, False, False]


@examples
@given(grouped_scores())
def test_a_skill_equals_the_loop(group_scores: GroupScores) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    expected = oracle.group_skill(*group_scores)
    assert_broadcast(group_skill(scores, group_ids, mask), expected, mask)
    skills = group_skill(scores, group_ids, mask, factor_dtype=torch.float64)[:, 0]
    assert skills.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@examples
@given(grouped_scores())
def test_rloo_equals_the_mean_of_the_others(group_scores: GroupScores) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    assert_broadcast(rloo(scores, group_ids, mask), oracle.rloo(*group_scores), mask)


@examples
@given(grouped_scores())
def test_reinforce_plus_plus_baseline_whitens_scores_less_their_group_mean(group_scores: GroupScores) -> None:
    scores, group_ids, mask = make_tensors(group_scores)
    centerd = oracle.grpo(*group_scores, norm_by_std=False)
    centerd_tokens = [score for score, row in zip(centerd, mask.tolist(), strict=True) for _ in row]
    expected = torch.tensor(oracle.whiten(centerd_tokens, mask.flatten().tolist()), dtype=torch.float64)
    advantages = reinforce_plus_plus_baseline(scores, group_ids, mask).flatten()
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


@examples
@given(sequences(), discounts)
def test_reinforce_plus_plus_whitens_the_reward_to_go(batch: Sequences, gamma: float) -> None:
    pairs = zip(batch.rewards.tolist(), batch.mask.tolist(), strict=True)
    to_go = [x for rewards, mask in pairs for x in oracle.reward_to_go(rewards, mask, gamma)]
    expected = torch.tensor(oracle.whiten(to_go, batch.mask.flatten().tolist()), dtype=torch.float64)
    advantages = reinforce_plus_plus(batch.rewards, batch.mask, gamma).flatten()
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


MASK = torch.ones(4, 2, dtype=torch.bool)


@pytest.mark.parametrize("score", [10.9, -0.1, 0.3])
def test_equal_scores_give_exactly_zero(score: float) -> None:
    advantages = grpo(torch.full((16,), score), torch.zeros(16, dtype=torch.long), MASK[:1].expand(16, 2), True)
    assert not advantages.any()

"""Which batch is trained on, against the definition written out."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainable.sandbox.batches import drawn_batch, with_candidates
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.batch.slices import flatten_rollouts, slice_member, stack_members, unflatten_rollouts
from trainable.sandbox.config.names import REPLAY_PRIORITIES
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.training.replay import AgeStatistics, ReplayBuffer, make_buffer

NUMBERS = torch.tensor([0.3, 0.8])


def filled(count: int, **settings: object) -> tuple[ReplayBuffer, list[Rollouts]]:
    buffer = make_buffer(UpdateRuleConfig(method="DG", **settings))
    batches = [drawn_batch(seed) for seed in range(count)]
    for batch in batches:
        buffer = buffer.with_batch(batch)
    return buffer, batches


def same(one: Rollouts, other: Rollouts) -> bool:
    return torch.equal(one.rewards, other.rewards) and torch.equal(one.actions, other.actions)


def test_without_delay_and_replay_a_batch_is_trained_on_as_it_comes() -> None:
    buffer, _ = filled(3)
    fresh = drawn_batch(7)
    drawn = buffer.draw(fresh, NUMBERS)
    assert same(drawn.rollouts, fresh)
    assert drawn.rollouts.age.tolist() == [0, 0]
    assert len(drawn.buffer.batches) == 1


@pytest.mark.parametrize("settings", [{"delay": 3}, {"delay": 3, "replay_capacity": 4}])
def test_a_delayed_batch_is_the_one_of_so_many_steps_ago_and_the_fresh_one_before(settings: dict[str, int]) -> None:
    buffer, _ = filled(0, **settings)
    batches = [drawn_batch(seed) for seed in range(8)]
    for step, fresh in enumerate(batches):
        drawn = buffer.draw(fresh, NUMBERS)
        buffer = drawn.buffer
        assert same(drawn.rollouts, batches[step - 3] if step >= 3 else fresh)
        assert drawn.rollouts.age.tolist() == [3 if step >= 3 else 0] * 2


def test_the_oldest_batch_leaves_a_full_buffer_and_the_one_that_was_asked_stays_as_it_was() -> None:
    buffer, batches = filled(6, replay_capacity=4)
    assert [same(stored.rollouts, batch) for stored, batch in zip(buffer.batches, batches[2:], strict=True)] == [
        True
    ] * 4
    buffer.draw(drawn_batch(9), NUMBERS)
    assert same(buffer.batches[0].rollouts, batches[2])


def literal(rule: str, batch: Rollouts, member: int) -> float:
    """The priority of one member's share, token by token."""
    values = []
    for rollout in range(batch.rewards.shape[1]):
        if not batch.keep_mask[member, rollout]:
            continue
        for position in range(batch.actions.shape[2]):
            reward = float(batch.rewards[member, rollout])
            log_prob = float(batch.behavior_log_probs[member, rollout, position])
            baseline = float(batch.behavior_baseline[member, rollout, position])
            if batch.expected_reward is not None:
                baseline = float(batch.expected_reward[member, rollout])
            advantage = reward - baseline
            delight = max(0.0, advantage * -log_prob)
            values.append(
                {
                    "uniform": 1.0,
                    "reward": abs(reward),
                    "advantage": abs(advantage),
                    "surprisal": -log_prob,
                    "delight": delight,
                    "fresh_delight": delight,
                    "freshness": 1.0,
                }[rule]
            )
    return sum(values) / len(values)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(REPLAY_PRIORITIES),
    st.integers(0, 100),
    st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    st.booleans(),
)
def test_members_draw_by_their_own_priorities(rule: str, seed: int, numbers: list[float], is_known: bool) -> None:
    buffer, _ = filled(0, replay_capacity=6, delay=2, replay_priority=rule, replay_age_decay=0.3)
    batches = [drawn_batch(seed + place) for place in range(5)]
    if is_known:
        batches = [replace(batch, expected_reward=batch.rewards.flip(1)) for batch in batches]
    for batch in batches[:-1]:
        buffer = buffer.with_batch(batch)
    drawn = buffer.draw(batches[-1], torch.tensor(numbers, dtype=torch.float64))
    assert drawn.rollouts.age.min() >= 2
    for member in range(2):
        weights = [literal(rule, batch, member) for batch in batches[:3]]
        if rule in ("fresh_delight", "freshness"):
            weights = [weight * math.exp(-0.3 * age) for weight, age in zip(weights, (4, 3, 2), strict=True)]
        place = 4 - int(drawn.rollouts.age[member])
        assert float(drawn.priority[member]) == pytest.approx(weights[place], rel=1e-5, abs=1e-7)
        assert torch.equal(drawn.rollouts.rewards[member], batches[place].rewards[member])
        shares = weights if sum(weights) > 0 else [1.0] * 3
        below, upto = sum(shares[:place]) / sum(shares), sum(shares[: place + 1]) / sum(shares)
        assert below - 1e-6 <= numbers[member] <= upto + 1e-6


def test_batches_without_any_priority_are_equally_likely() -> None:
    flatter = [replace(drawn_batch(seed), rewards=torch.zeros(2, 5)) for seed in range(4)]
    buffer, _ = filled(0, replay_capacity=8, replay_priority="reward")
    for batch in flatter[:-1]:
        buffer = buffer.with_batch(batch)
    ages = [buffer.draw(flatter[-1], torch.tensor([number, number])).rollouts.age[0] for number in (0.1, 0.3, 0.6, 0.9)]
    assert [int(age) for age in ages] == [3, 2, 1, 0]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 31), st.floats(0.01, 1)), max_size=8))
def test_age_statistics_are_those_of_the_batches_since_the_last_row(ages: list[tuple[int, float]]) -> None:
    statistics = AgeStatistics(torch.zeros(1, 5, dtype=torch.float64))
    for age, weight in ages:
        statistics.add(torch.tensor([age]), torch.tensor([weight], dtype=torch.float64))
    found = {name: float(value) for name, value in statistics.compute_and_reset().items()}
    if not ages:
        assert all(math.isnan(value) for value in found.values())
        return
    mean = sum(age for age, _ in ages) / len(ages)
    assert found["age_mean"] == pytest.approx(mean)
    assert found["age_std"] == pytest.approx(math.sqrt(sum((age - mean) ** 2 for age, _ in ages) / len(ages)), abs=1e-6)
    assert found["effective_age"] == pytest.approx(sum(a * w for a, w in ages) / sum(w for _, w in ages))
    assert math.isnan(float(statistics.compute_and_reset()["age_mean"]))


def test_a_batch_is_the_same_when_its_members_are_taken_apart_and_put_together() -> None:
    batch = with_candidates(replace(drawn_batch(3), expected_reward=torch.rand(2, 5)))
    shares = [slice_member(flatten_rollouts(batch), member) for member in range(2)]
    again = unflatten_rollouts(stack_members(shares), batch.group_size)
    assert flatten_rollouts(again).keys() == flatten_rollouts(batch).keys()
    assert all(torch.equal(value, flatten_rollouts(batch)[name]) for name, value in flatten_rollouts(again).items())
    assert (again.group_size, again.score_mask) == (5, None)
    turned = unflatten_rollouts(stack_members(shares[::-1]), batch.group_size)
    assert torch.equal(turned.rewards, batch.rewards.flip(0))

"""Tests of which batch is trained on, against literal definitions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.update_rules.config.settings import REPLAY_PRIORITIES, UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.training.replay import AgeStatistics, ReplayBuffer
from tests.sandboxes.update_rules.batches import make_random_batch
from tests.strategies.examples import draw_examples

UNIFORMS = torch.tensor([0.3, 0.8])


def make_filled_buffer(count: int, **settings: object) -> tuple[ReplayBuffer, list[Rollouts]]:
    buffer = ReplayBuffer(UpdateRuleConfig(method="DG", **settings))
    batches = [make_random_batch(seed) for seed in range(count)]
    for batch in batches:
        buffer = buffer.with_batch(batch)
    return buffer, batches


def are_equal(one: Rollouts, other: Rollouts) -> bool:
    return torch.equal(one.rewards, other.rewards) and torch.equal(one.actions, other.actions)


@pytest.mark.parametrize(("delay", "capacity"), [(0, 0), (3, 0), (3, 4)])
def test_a_delayed_batch_is_that_of_delay_steps_ago_or_the_fresh_one(delay: int, capacity: int) -> None:
    buffer, _ = make_filled_buffer(0, delay=delay, replay_capacity=capacity)
    batches = [make_random_batch(seed) for seed in range(8)]
    for step, fresh_batch in enumerate(batches):
        draw = buffer.draw(fresh_batch, UNIFORMS)
        buffer = draw.buffer
        assert are_equal(draw.rollouts, batches[step - delay] if step >= delay else fresh_batch)
        assert draw.rollouts.age.tolist() == [delay if step >= delay else 0] * 2


def test_the_oldest_batch_leaves_a_full_buffer_and_batches_without_priority_are_equally_likely() -> None:
    buffer, batches = make_filled_buffer(6, replay_capacity=4)
    pairs = zip(buffer.batches, batches[2:], strict=True)
    assert all(are_equal(stored.rollouts, batch) for stored, batch in pairs)
    buffer.draw(make_random_batch(9), UNIFORMS)
    assert are_equal(buffer.batches[0].rollouts, batches[2])
    batches = [replace(make_random_batch(seed), rewards=torch.zeros(2, 5)) for seed in range(4)]
    buffer, _ = make_filled_buffer(0, replay_capacity=8, replay_priority="reward")
    for batch in batches[:-1]:
        buffer = buffer.with_batch(batch)
    for uniform, age in ((0.1, 3), (0.3, 2), (0.6, 1), (0.9, 0)):
        assert int(buffer.draw(batches[-1], torch.tensor([uniform, uniform])).rollouts.age[0]) == age


def compute_literal_priority(priority: str, batch: Rollouts, member: int) -> float:
    """Compute the priority of the batch of one member, token by token."""
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
            priorities = {"uniform": 1.0, "reward": abs(reward), "advantage": abs(advantage), "surprisal": -log_prob}
            values.append({**priorities, "delight": delight, "fresh_delight": delight, "freshness": 1.0}[priority])
    return sum(values) / len(values)


@draw_examples(40)
@given(
    st.sampled_from(REPLAY_PRIORITIES),
    st.integers(0, 100),
    st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    st.booleans(),
)
def test_members_draw_with_their_own_priorities(
    priority: str, seed: int, uniforms: list[float], has_expected_reward: bool
) -> None:
    buffer, _ = make_filled_buffer(0, replay_capacity=6, delay=2, replay_priority=priority, replay_age_decay=0.3)
    batches = [make_random_batch(seed + index) for index in range(5)]
    if has_expected_reward:
        batches = [replace(batch, expected_reward=batch.rewards.flip(1)) for batch in batches]
    for batch in batches[:-1]:
        buffer = buffer.with_batch(batch)
    draw = buffer.draw(batches[-1], torch.tensor(uniforms, dtype=torch.float64))
    assert draw.rollouts.age.min() >= 2
    for member in range(2):
        weights = [compute_literal_priority(priority, batch, member) for batch in batches[:3]]
        if priority in ("fresh_delight", "freshness"):
            weights = [weight * math.exp(-0.3 * age) for weight, age in zip(weights, (4, 3, 2), strict=True)]
        index = 4 - int(draw.rollouts.age[member])
        assert float(draw.priority[member]) == pytest.approx(weights[index], rel=1e-5, abs=1e-7)
        assert torch.equal(draw.rollouts.rewards[member], batches[index].rewards[member])
        shares = weights if sum(weights) > 0 else [1.0] * 3
        below, up_to = sum(shares[:index]) / sum(shares), sum(shares[: index + 1]) / sum(shares)
        assert below - 1e-6 <= uniforms[member] <= up_to + 1e-6


@draw_examples(20)
@given(st.lists(st.tuples(st.integers(0, 31), st.floats(0.01, 1)), max_size=8))
def test_age_statistics_are_those_of_the_batches_since_the_last_row(ages: list[tuple[int, float]]) -> None:
    statistics = AgeStatistics(torch.zeros(1, 5, dtype=torch.float64))
    for age, weight in ages:
        statistics.add(torch.tensor([age]), torch.tensor([weight], dtype=torch.float64))
    values = {name: float(value) for name, value in statistics.compute().items()}
    if not ages:
        assert all(math.isnan(value) for value in values.values())
        return
    mean = sum(age for age, _ in ages) / len(ages)
    assert values["age_mean"] == pytest.approx(mean)
    variance = sum((age - mean) ** 2 for age, _ in ages) / len(ages)
    assert values["age_std"] == pytest.approx(math.sqrt(variance), abs=1e-6)
    assert values["effective_age"] == pytest.approx(sum(a * w for a, w in ages) / sum(w for _, w in ages))
    statistics.reset()
    assert math.isnan(float(statistics.compute()["age_mean"]))

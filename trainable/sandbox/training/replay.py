"""Which batch a step trains on: the one just sampled, one that was delayed, or one drawn from a replay buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.batch.slices import flatten_rollouts, unflatten_rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.kondo import compute_behavior_delight
from trainable.sandbox.rules.rule import compute_behavior_advantages


class StoredBatch(NamedTuple):
    """A batch of the buffer, and its priority [E] before the buffer's own decay with age."""

    rollouts: Rollouts
    priority: Tensor


class ReplayDraw(NamedTuple):
    """The batch to train on, with its `age` set, and where it comes from.

    priority: [E], that of the batch which each member drew. buffer: the buffer with the new batch in it; the one that
    was asked is as it was.
    """

    rollouts: Rollouts
    priority: Tensor
    buffer: "ReplayBuffer"


@dataclass(frozen=True)
class ReplayBuffer:
    """The last batches that were sampled, whole, the oldest first; one is added a step, so places tell ages.

    A delay is a buffer of `delay` + 1 batches: exactly one of them is old enough, so ReplayDG of that capacity is DG
    that is delayed. Batches younger than `delay` are not drawn; where none is old enough, the newest is.
    """

    capacity: int
    delay: int
    priority_rule: str
    age_decay: float
    batches: tuple[StoredBatch, ...] = ()

    def draw(self, new_rollouts: Rollouts, uniforms: Tensor) -> ReplayDraw:
        """Add `fresh` and draw one batch a member, with a probability in proportion to its priority.

        uniforms: [E] in [0, 1), one draw a member. If all priorities of a member are 0, each batch is as likely.
        """
        buffer = self.with_batch(new_rollouts)
        newest_index = len(buffer.batches) - 1
        ages = torch.tensor([age for age in range(newest_index, -1, -1) if age >= self.delay] or [0])
        eligible_batches = [buffer.batches[newest_index - int(age)] for age in ages]
        priorities = torch.stack([stored.priority for stored in eligible_batches], dim=1)  # [E, batches]
        if self.priority_rule in AGE_DISCOUNTED:
            priorities = priorities * torch.exp(-self.age_decay * ages)
        indices = _sample_inverse_cdf(priorities, uniforms)
        rollouts = replace(_gather_batch([stored.rollouts for stored in eligible_batches], indices), age=ages[indices])
        return ReplayDraw(rollouts, priorities.gather(1, indices.unsqueeze(1)).squeeze(1), buffer)

    def with_batch(self, rollouts: Rollouts) -> "ReplayBuffer":
        """The buffer with one batch more, and without the oldest where that is one too many."""
        stored_batch = StoredBatch(
            rollouts, _masked_mean(PRIORITY_FUNCTIONS[self.priority_rule](rollouts), rollouts.keep_mask)
        )
        return replace(self, batches=(*self.batches, stored_batch)[-self.capacity :])

    @property
    def drawable_batches(self) -> tuple[StoredBatch, ...]:
        """The batches that a later step may still draw: all that is worth keeping on disk."""
        return self.batches[max(0, len(self.batches) + 1 - self.capacity) :]


def make_buffer(config: UpdateRuleConfig) -> ReplayBuffer:
    """An empty buffer as `config` wants it: for replay, for a delay, or for the batch of the step alone."""
    capacity = config.replay_capacity or config.delay + 1
    return ReplayBuffer(capacity, config.delay, config.replay_priority, config.replay_age_decay)


PRIORITY_FUNCTIONS: dict[str, Callable[[Rollouts], Tensor]] = {
    "uniform": lambda batch: torch.ones_like(batch.behavior_log_probs),
    "reward": lambda batch: batch.rewards.abs().unsqueeze(-1),
    "advantage": lambda batch: compute_behavior_advantages(batch).abs(),
    "surprisal": lambda batch: -batch.behavior_log_probs,
    "delight": lambda batch: compute_behavior_delight(batch).clamp(min=0),
    "fresh_delight": lambda batch: compute_behavior_delight(batch).clamp(min=0),
    "freshness": lambda batch: torch.ones_like(batch.behavior_log_probs),
}
"""What is averaged over a batch's tokens, [E, B, T] or [E, B, 1], to give its priority."""
AGE_DISCOUNTED = ("fresh_delight", "freshness")
"""Those that exp(-replay_age_decay age) multiplies when a batch is drawn."""


def _masked_mean(values: Tensor, keep_mask: Tensor) -> Tensor:
    """[E], mean over the tokens of rollouts that are kept. values: [E, B, T or 1]. keep: [E, B]."""
    return (values.mean(-1) * keep_mask).sum(-1) / keep_mask.sum(-1)


def _sample_inverse_cdf(priorities: Tensor, uniforms: Tensor) -> Tensor:
    """[E] places, drawn with probabilities in proportion to `priorities` [E, n] by one number of [0, 1) each."""
    has_no_priority = priorities.sum(dim=1, keepdim=True) <= 0
    bounds = torch.where(has_no_priority, 1.0, priorities.double()).cumsum(dim=1)
    is_passed = bounds <= uniforms.unsqueeze(1) * bounds[:, -1:]
    return is_passed.sum(dim=1).clamp(max=priorities.shape[1] - 1)


def _gather_batch(batches: Sequence[Rollouts], indices: Tensor) -> Rollouts:
    """The batch in which the share of member e is that of batches[places[e]]."""
    if len(batches) == 1:
        return batches[0]
    tensors = [flatten_rollouts(batch) for batch in batches]
    gathered_tensors = {
        name: torch.stack([tensors[place][name][member] for member, place in enumerate(indices.tolist())])
        for name in tensors[0]
    }
    return unflatten_rollouts(gathered_tensors, batches[0].group_size)


class AgeStatistics:
    """Ages of the batches that were trained on since the last row.

    sums: [E, 5] over those batches of 1, age, age^2, freshness weight, freshness weight x age.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def add(self, age: Tensor, weight: Tensor) -> None:
        """One more batch. age: [E], updates. weight: [E], freshness weight that the loss gives the batch."""
        age = age.double()
        self.sums = self.sums + torch.stack([torch.ones_like(age), age, age.square(), weight, weight * age], dim=1)

    def compute_and_reset(self) -> dict[str, Tensor]:
        """age_mean, age_std and effective_age, [E] each, NaN where nothing was trained on; counting starts again."""
        count, age_sum, age_square_sum, weight_sum, weighted_age_sum = self.sums.unbind(dim=1)
        self.sums = torch.zeros_like(self.sums)
        mean = age_sum / count
        std = (age_square_sum / count - mean.square()).clamp(min=0).sqrt()
        return {"age_mean": mean, "age_std": std, "effective_age": weighted_age_sum / weight_sum}

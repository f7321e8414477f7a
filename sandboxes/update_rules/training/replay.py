"""Replay buffer: choose the batch to train on: the newest one, a delayed one, or one drawn by priority."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts, flatten_rollouts, unflatten_rollouts
from sandboxes.update_rules.rules.delight import compute_behavior_delight
from sandboxes.update_rules.rules.rule import compute_behavior_advantages


class StoredBatch(NamedTuple):
    """A batch in the buffer, and its priority [E] before the discount for its age."""

    rollouts: Rollouts
    priority: Tensor


class ReplayDraw(NamedTuple):
    """The batch to train on, with its `age` and its priority [E], and the buffer with the new batch."""

    rollouts: Rollouts
    priority: Tensor
    buffer: "ReplayBuffer"


@dataclass(frozen=True)
class ReplayBuffer:
    """The last sampled batches, oldest first. One is added per step, so the position of a batch gives its age.

    Batches younger than `delay` are not drawn; if none is old enough, the newest one is used. A delay without replay is
    a buffer of `delay` + 1 batches, of which exactly one is old enough. So ReplayDG with that capacity equals DG with
    that delay.
    """

    config: UpdateRuleConfig
    batches: tuple[StoredBatch, ...] = ()

    @property
    def capacity(self) -> int:
        """Number of batches of a replay or a delay; without either, a single one."""
        return self.config.replay_capacity or self.config.delay + 1

    def draw(self, new_rollouts: Rollouts, uniforms: Tensor) -> ReplayDraw:
        """Add `new_rollouts`, and draw one batch per member with probability proportional to its priority.

        uniforms: [E] in [0, 1), from which batches are drawn. If all priorities of a member are 0, all batches are
        equally likely.
        """
        buffer = self.with_batch(new_rollouts)
        newest_index = len(buffer.batches) - 1  # batches are in the order of time, so age 0 is the last index
        # Before step `delay` no batch is old enough, and the newest one (age 0) is used.
        ages = torch.tensor([age for age in range(newest_index, -1, -1) if age >= self.config.delay] or [0])
        eligible_batches = [buffer.batches[newest_index - int(age)] for age in ages]
        priorities = torch.stack([stored.priority for stored in eligible_batches], dim=1)  # [E, batches]
        if self.config.replay_priority in AGE_DISCOUNTED:
            priorities = priorities * torch.exp(-self.config.replay_age_decay * ages)
        indices = _sample_inverse_cdf(priorities, uniforms)
        rollouts = replace(_gather_batch([stored.rollouts for stored in eligible_batches], indices), age=ages[indices])
        return ReplayDraw(rollouts, priorities.gather(1, indices.unsqueeze(1)).squeeze(1), buffer)

    def with_batch(self, rollouts: Rollouts) -> "ReplayBuffer":
        """Return the buffer with one more batch, and without the oldest one if it was full."""
        # First the mean over tokens, then over the kept rollouts, of which there is at least one.
        values = PRIORITY_FUNCTIONS[self.config.replay_priority](rollouts).mean(-1)
        stored_batch = StoredBatch(rollouts, (values * rollouts.keep_mask).sum(-1) / rollouts.keep_mask.sum(-1))
        return replace(self, batches=(*self.batches, stored_batch)[-self.capacity :])

    @property
    def drawable_batches(self) -> tuple[StoredBatch, ...]:
        """The batches that a later step may still draw: all that a checkpoint needs."""
        # The next step adds a batch before it draws, which pushes the oldest one out of a full buffer.
        return self.batches[max(0, len(self.batches) + 1 - self.capacity) :]


PRIORITY_FUNCTIONS: dict[str, Callable[[Rollouts], Tensor]] = {
    **dict.fromkeys(("uniform", "freshness"), lambda batch: torch.ones_like(batch.behavior_log_probs)),
    **dict.fromkeys(("delight", "fresh_delight"), lambda batch: compute_behavior_delight(batch).clamp(min=0)),
    "reward": lambda batch: batch.rewards.abs().unsqueeze(-1),
    "advantage": lambda batch: compute_behavior_advantages(batch).abs(),
    "surprisal": lambda batch: -batch.behavior_log_probs,
}
"""The quantity, [E, B, T] or [E, B, 1], whose mean over a batch's tokens is the batch's priority."""
AGE_DISCOUNTED = ("fresh_delight", "freshness")
"""Priorities that are multiplied by exp(-replay_age_decay age) when a batch is drawn."""


def _sample_inverse_cdf(priorities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices [E] with probabilities proportional to `priorities` [E, n], using one uniform number each."""
    has_no_priority = priorities.sum(dim=1, keepdim=True) <= 0
    # In float64: in float32 the bounds of batches with small priorities could coincide.
    bounds = torch.where(has_no_priority, 1.0, priorities.double()).cumsum(dim=1)
    # The product can round up to the last bound; the clamp keeps the index in range.
    is_passed = bounds <= uniforms.unsqueeze(1) * bounds[:, -1:]
    return is_passed.sum(dim=1).clamp(max=priorities.shape[1] - 1)


def _gather_batch(batches: Sequence[Rollouts], indices: Tensor) -> Rollouts:
    """Gather a batch in which the slice of member e comes from batches[indices[e]]."""
    if len(batches) == 1:
        return batches[0]  # without copies
    tensors = [flatten_rollouts(batch) for batch in batches]
    gathered_tensors = {
        name: torch.stack([tensors[index][name][member] for member, index in enumerate(indices.tolist())])
        for name in tensors[0]
    }
    return unflatten_rollouts(gathered_tensors, batches[0].group_size)


class AgeStatistics:
    """Statistics of the ages of the batches trained on since the last row."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums
        """[E, 5] sums over those batches of 1, age, age^2, freshness weight, and freshness weight x age."""

    def add(self, age: Tensor, weight: Tensor) -> None:
        """Add a batch. age: [E] in updates. weight: [E] freshness weight of the batch in the loss."""
        # float64, because squares of ages are summed over many batches before the mean is subtracted.
        age = age.double()
        self.sums = self.sums + torch.stack([torch.ones_like(age), age, age.square(), weight, weight * age], dim=1)

    def reset(self) -> None:
        """Start over, after a row has been written."""
        self.sums = torch.zeros_like(self.sums)

    def compute(self) -> dict[str, Tensor]:
        """Compute age_mean, age_std and effective_age, [E] each, NaN without a batch."""
        count, age_sum, age_square_sum, weight_sum, weighted_age_sum = self.sums.unbind(dim=1)
        mean = age_sum / count
        # Rounding can make the variance slightly negative.
        std = (age_square_sum / count - mean.square()).clamp(min=0).sqrt()
        return {"age_mean": mean, "age_std": std, "effective_age": weighted_age_sum / weight_sum}

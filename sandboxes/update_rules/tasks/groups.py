"""Select the groups of rollouts (which share a prompt) to train on."""

import torch
from torch import Tensor


def keep_all_rollouts(rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of `filter_groups` for ungrouped rollouts with rewards [E, B]: all are kept, without statistics."""
    return torch.ones_like(rewards, dtype=torch.bool), {}


def filter_groups(is_mixed: Tensor, group_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask [E, B] of the rollouts to train on, and statistics of the sampler, [E] each.

    is_mixed: [E, P] bool, groups whose rewards differ. Uniform groups offer no comparison and are dropped, but a member
    without a mixed group keeps all groups. Rollouts i * group_size ... (i + 1) * group_size - 1 are group i.
    """
    is_fallback = ~is_mixed.any(-1)  # an empty batch has no loss, so a member without mixed groups keeps all
    group_mask = is_mixed | is_fallback[:, None]
    scalars = {
        "informative_group_rate": is_mixed.float().mean(-1),
        "retained_group_rate": group_mask.float().mean(-1),
        "used_group_fallback": is_fallback.float(),
    }
    return group_mask.repeat_interleave(group_size, dim=-1), scalars


def find_varied_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[E, P] bool: groups of rewards [E, B] whose standard deviation (divisor K - 1) is above 1e-6.

    Equal rewards can have a standard deviation of a rounding error in float32, which 1e-6 does not pass.
    """
    groups = rewards.unflatten(-1, (-1, group_size))
    # A group of one has no standard deviation with divisor K - 1.
    return groups.std(-1) > 1e-6 if group_size > 1 else torch.zeros_like(groups[..., 0], dtype=torch.bool)


def find_mixed_groups(scores: Tensor, group_size: int) -> Tensor:
    """[E, P] bool: groups of scores [E, B] in [0, 1] that are neither all 0 nor all 1."""
    totals = scores.unflatten(-1, (-1, group_size)).sum(-1)
    return (totals > 0) & (totals < group_size)

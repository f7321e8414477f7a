"""Groups of rollouts that share a prompt: which are trained on."""

import torch
from torch import Tensor


def keep_all_rollouts(rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What `kept_rollouts` gives, of rollouts with rewards [E, B] that are in no group: all, and no numbers."""
    return torch.ones_like(rewards, dtype=torch.bool), {}


def filter_groups(is_mixed: Tensor, group_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Rollouts [E, B] that are trained on, and [E] numbers of the sampler.

    mixed: [E, P] bool, groups whose rewards differ; uniform ones carry no comparison and are left out. A member
    without a mixed group keeps all of them. Rollouts i * group_size ... (i + 1) * group_size - 1 are group i.
    """
    is_fallback = ~is_mixed.any(-1)
    group_mask = is_mixed | is_fallback[:, None]
    scalars = {
        "informative_group_rate": is_mixed.float().mean(-1),
        "retained_group_rate": group_mask.float().mean(-1),
        "used_group_fallback": is_fallback.float(),
    }
    return group_mask.repeat_interleave(group_size, dim=-1), scalars


def find_varied_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[E, P] bool: groups of rewards [E, B] whose standard deviation (divisor K - 1) is above 1e-6."""
    groups = rewards.unflatten(-1, (-1, group_size))
    return groups.std(-1) > 1e-6 if group_size > 1 else torch.zeros_like(groups[..., 0], dtype=torch.bool)


def find_mixed_groups(scores: Tensor, group_size: int) -> Tensor:
    """[E, P] bool: groups of numbers [E, B] in [0, 1] whose sum is neither 0 nor their count."""
    totals = scores.unflatten(-1, (-1, group_size)).sum(-1)
    return (totals > 0) & (totals < group_size)

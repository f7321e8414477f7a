"""Group-relative advantages, and the clipped loss of PPO without its dual clip."""

import torch
from torch import Tensor

from trainable.algo.advantages import grpo as group_relative
from trainable.algo.losses import PolicyLoss, ppo_clip_loss

STD_FLOOR = 1e-8  # keeps divisions finite in groups whose rewards are equal
_NO_DUAL_CLIP = 1e9
"""Above the largest ratio, e^20, so that the dual clip of `ppo_clip_loss` is never active."""


def group_advantages(scores: Tensor, ids: Tensor, divide_by_std: bool) -> Tensor:
    """Compute group-relative advantages G [N]: (R − mean) / (std + 1e-8), or R − mean.

    scores: [N] R. ids: [N] numbers, equal within a group. With `divide_by_std` (divisor K), G = 0 in a group whose std
    is at most 1e-8.
    """
    mask = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    advantages = group_relative(scores, ids, mask, divide_by_std, correction=0, std_floor=STD_FLOOR, min_std=STD_FLOOR)
    return advantages.squeeze(1)


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Compute `ppo_clip_loss` per entry, without a dual clip. log_probs, old_log_probs, advantages: [...]."""
    return ppo_clip_loss(log_probs, old_log_probs, advantages, clip_low, clip_high, _NO_DUAL_CLIP)

"""Advantages of answers that are compared within their group."""

import torch
from torch import Tensor

from trainable.algo.advantages import grpo as group_relative

STD_FLOOR = 1e-8  # keeps divisions finite in groups whose rewards are equal
NO_DUAL_CLIP = 1e9
"""Above e^20, the largest ratio, so that the dual clip of `ppo_clip_loss` is never active."""


def group_advantages(scores: Tensor, ids: Tensor, divide_by_std: bool) -> Tensor:
    """[N] group-relative advantages G: (R − mean) / (std + 1e-8), or R − mean.

    Args:
        scores: [N] R.
        ids: [N] numbers, equal for the members of a group.
        divide_by_std: whether to divide by the std (divisor K). Then G = 0 in a group whose std is at most 1e-8.
    """
    mask = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    advantages = group_relative(scores, ids, mask, divide_by_std, correction=0, std_floor=STD_FLOOR, min_std=STD_FLOOR)
    return advantages.squeeze(1)

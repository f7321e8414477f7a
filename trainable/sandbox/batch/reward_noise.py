"""Rewards that lie: what a share of a batch's rewards becomes, as pure functions of uniform numbers.

Sources: label_flip and random_reward are the common models of a noisy verifier; the false positives pay for a feature
of the answer, so they can be exploited. At a uniform policy of three tokens about 98 of 100 sequences of length 10
hold the rare token.
"""

import torch
from torch import Tensor


def corrupt_rewards(
    rewards: Tensor, uniforms: Tensor, mode: str, noise_rate: float, is_solved: Tensor, has_feature: Tensor
) -> Tensor:
    """Rewards [...] of which each is corrupted with probability `share`.

    uniforms: [..., 2] in [0, 1): which are corrupted, and what a random reward is. mode: one of
    `trainable.sandbox.config.names.NOISE_MODES`. solved: [...], True where the answer is fully right. featured:
    [...], True where the answer has what the mode's false positives pay for (`sequence_feature`, `bandit_feature`).
    """
    if mode == "none":
        return rewards
    is_corrupted = uniforms[..., 0] < noise_rate
    if mode == "label_flip":
        return torch.where(is_corrupted, 1 - rewards, rewards)
    if mode == "random_reward":
        return torch.where(is_corrupted, uniforms[..., 1].to(rewards.dtype), rewards)
    return torch.where(is_corrupted & has_feature & ~is_solved, torch.ones_like(rewards), rewards)


def detect_sequence_feature(mode: str, prompts: Tensor, outputs: Tensor, separator: int) -> Tensor:
    """[...] bool: whether outputs [..., H] after prompts [..., H] have the feature that a mode pays for."""
    if mode == "false_positive_action0":
        return (outputs == 0).any(-1)
    if mode in ("false_positive_rare_token", "false_positive_sep"):
        return (outputs == separator).any(-1)
    if mode == "spurious_feature":
        return outputs[..., 0] == prompts[..., 0]
    return torch.zeros_like(outputs[..., 0], dtype=torch.bool)


def detect_bandit_feature(mode: str, actions: Tensor) -> Tensor:
    """[...] bool: the same of actions [...] of a bandit, where every such mode pays for action 0."""
    if mode in ("false_positive_action0", "spurious_feature"):
        return actions == 0
    return torch.zeros_like(actions, dtype=torch.bool)

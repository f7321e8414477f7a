"""Reward noise: corrupt a fraction of a batch's rewards, as pure functions of uniform random numbers.

label_flip and random_reward are the common models of a noisy verifier. The false-positive modes reward a feature of the
answer, so a policy can exploit them. Under a uniform policy over three tokens, about 98 % of sequences of length 10
contain the rare token.
"""

import torch
from torch import Tensor


def corrupt_rewards(
    rewards: Tensor, uniforms: Tensor, mode: str, noise_rate: float, is_solved: Tensor, has_feature: Tensor
) -> Tensor:
    """Corrupt each of rewards [...] with probability `noise_rate`.

    Args:
        rewards: [...] in [0, 1].
        uniforms: [..., 2] in [0, 1). The first number decides whether a reward is corrupted; the second one is the
            reward in the mode random_reward.
        mode: one of `sandboxes.update_rules.config.names.NOISE_MODES`.
        noise_rate: in [0, 1].
        is_solved: [...], True where the answer is fully correct.
        has_feature: [...], True where the answer has the feature that the mode's false positives reward
            (`detect_sequence_feature`, `detect_bandit_feature`).
    """
    if mode == "none":
        return rewards
    is_corrupted = uniforms[..., 0] < noise_rate
    if mode == "label_flip":
        return torch.where(is_corrupted, 1 - rewards, rewards)
    if mode == "random_reward":
        return torch.where(is_corrupted, uniforms[..., 1].to(rewards.dtype), rewards)
    # All other modes are false positives: failures with the feature earn 1.
    return torch.where(is_corrupted & has_feature & ~is_solved, torch.ones_like(rewards), rewards)


def detect_sequence_feature(mode: str, prompts: Tensor, outputs: Tensor, separator: int) -> Tensor:
    """[...] bool, whether outputs [..., H] after prompts [..., H] have the feature that a mode rewards."""
    if mode == "false_positive_action0":
        return (outputs == 0).any(-1)
    if mode in ("false_positive_rare_token", "false_positive_sep"):
        return (outputs == separator).any(-1)
    if mode == "spurious_feature":
        return outputs[..., 0] == prompts[..., 0]
    return torch.zeros_like(outputs[..., 0], dtype=torch.bool)


def detect_bandit_feature(mode: str, actions: Tensor) -> Tensor:
    """[...] bool, whether actions [...] of a bandit have the feature that a mode rewards; it is always action 0."""
    if mode in ("false_positive_action0", "spurious_feature"):
        return actions == 0
    return torch.zeros_like(actions, dtype=torch.bool)

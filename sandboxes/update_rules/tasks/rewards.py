"""Rewards of a batch: noise that corrupts a fraction of them, and the groups whose rewards differ.

Noise is a pure function of uniform random numbers. label_flip and random_reward are common models of a noisy verifier.
The false-positive modes reward a feature of the answer, which a policy can exploit: under a uniform policy over three
tokens, about 98 % of sequences of length 10 contain the rare token.
"""

import torch
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig


def corrupt_rewards(
    rewards: Tensor, uniforms: Tensor, mode: str, noise_rate: float, is_solved: Tensor, has_feature: Tensor
) -> Tensor:
    """Corrupt each of rewards [...] with probability `noise_rate`. mode: one of `settings.NOISE_MODES`.

    uniforms: [..., 2] in [0, 1): the first decides whether a reward is corrupted, the second is the reward in the mode
    random_reward. is_solved: [...] where the answer is fully correct. has_feature: [...] where it has the feature that
    the mode falsely rewards (`detect_sequence_feature`, `detect_bandit_feature`).
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


def make_noisy_rewards(
    config: UpdateRuleConfig, rngs: MemberRngs, step: int, rewards: Tensor, is_solved: Tensor, has_feature: Tensor
) -> Tensor:
    """Apply `corrupt_rewards` to rewards [E, B] of a step, with the noise of `config`."""
    # Two numbers per rollout in every mode, although only random_reward reads the second.
    uniforms = rngs.uniform("sandbox_noise", step, shape=(config.batch_size, 2))
    return corrupt_rewards(rewards, uniforms, config.reward_noise_mode, config.reward_noise, is_solved, has_feature)


def detect_sequence_feature(mode: str, prompts: Tensor, outputs: Tensor, separator: int) -> Tensor:
    """Check whether outputs [..., H] after prompts [..., H] have the feature that a mode rewards, [...] bool."""
    if mode == "false_positive_action0":
        return (outputs == 0).any(-1)
    if mode in ("false_positive_rare_token", "false_positive_sep"):
        return (outputs == separator).any(-1)
    if mode == "spurious_feature":
        return outputs[..., 0] == prompts[..., 0]
    return torch.zeros_like(outputs[..., 0], dtype=torch.bool)


def detect_bandit_feature(mode: str, actions: Tensor) -> Tensor:
    """Check whether actions [...] of a bandit have the feature that a mode rewards, always action 0; [...] bool."""
    if mode in ("false_positive_action0", "spurious_feature"):
        return actions == 0
    return torch.zeros_like(actions, dtype=torch.bool)


def filter_groups(rewards: Tensor, is_mixed: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Make a mask [E, B] of the rollouts to train on, and statistics of the sampler, [E] each.

    is_mixed: [E, P] bool, groups whose rewards differ. Uniform groups offer no comparison and are dropped, but a member
    without a mixed group keeps all groups. Group i is the i-th of P equal parts of a batch. None for a batch without
    groups, which is kept, without statistics.
    """
    if is_mixed is None:
        return torch.ones_like(rewards, dtype=torch.bool), {}
    is_fallback = ~is_mixed.any(-1)  # an empty batch has no loss, so a member without mixed groups keeps all
    group_mask = is_mixed | is_fallback[:, None]
    scalars = {
        "informative_group_rate": is_mixed.float().mean(-1),
        "retained_group_rate": group_mask.float().mean(-1),
        "used_group_fallback": is_fallback.float(),
    }
    return group_mask.repeat_interleave(rewards.shape[1] // is_mixed.shape[1], dim=-1), scalars


def find_varied_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Find groups of rewards [E, B] whose deviation (divisor K - 1) is above rounding errors, 1e-6; [E, P] bool."""
    groups = rewards.unflatten(-1, (-1, group_size))
    # A group of one has no standard deviation with divisor K - 1.
    return groups.std(-1) > 1e-6 if group_size > 1 else torch.zeros_like(groups[..., 0], dtype=torch.bool)


def find_mixed_groups(scores: Tensor, group_size: int) -> Tensor:
    """Find groups of scores [E, B] in [0, 1] that are neither all 0 nor all 1, [E, P] bool."""
    totals = scores.unflatten(-1, (-1, group_size)).sum(-1)
    return (totals > 0) & (totals < group_size)

"""Compute the targets of the losses, advantages and returns, from the rewards of episodes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo.advantages import (
    AdvantagesReturns,
    bi_level_gae,
    gae,
    group_skill,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from trainable.algo.kl_control import apply_kl_penalty
from trainable.algo.reductions import masked_whiten
from trainable.config.choices import ADVANTAGE_ESTIMATORS
from trainable.config.own_parts import get_part
from trainable.config.sections import AlgorithmConfig
from trainable.ppo.update import Targets
from trainable.rollout.batch import Batch, place_episode_scores


class PreparedBatch(NamedTuple):
    """A batch with its targets, and the order (B,) in which it is split into mini-batches."""

    batch: Batch
    targets: Targets
    order: Tensor


def make_targets(
    batch: Batch,
    values: Tensor | None,
    ref_logprobs: Tensor | None,
    settings: AlgorithmConfig,
    kl_coef: float,
    filter_scale: float,
) -> Targets:
    """Compute advantages and returns of a batch: KL penalty, estimator, whitening, then scaling (published order).

    Args:
        batch: the episodes.
        values: (B, T) of the critic, which gae needs; None without a critic.
        ref_logprobs: (B, T) of the reference; None without one.
        settings: the estimator and the KL penalty. zero_task_advantage sets the advantages to 0, but not the returns.
        kl_coef: coefficient of the KL penalty in the reward, read only with use_kl_in_reward.
        filter_scale: factor of actor.filter_loss_scaling. It is applied after whitening, which would cancel it.
    """
    # As published: GAE over turns needs the reward of each turn, everything else the score at the last sampled token.
    rewards = batch.rewards if settings.bi_level_gae else place_episode_scores(batch)
    if settings.use_kl_in_reward:
        assert ref_logprobs is not None  # a run with a KL in the reward has a reference
        rewards = apply_kl_penalty(rewards, batch.logprobs, ref_logprobs, batch.mask, settings.kl_penalty, kl_coef)
    advantages, returns = _compute_advantages(batch, rewards, values, settings)
    # Only the advantages become 0: KL and entropy alone move the policy, and the critic still learns from the returns.
    advantages = torch.zeros_like(advantages) if settings.zero_task_advantage else advantages * filter_scale
    return Targets(advantages, returns, torch.zeros_like(returns) if values is None else values, ref_logprobs)


def _compute_advantages(
    batch: Batch, rewards: Tensor, values: Tensor | None, settings: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of the estimator; without a critic, returns are 0 and unused."""
    if settings.estimator.needs_critic:
        assert values is not None
        estimate = _compute_gae(batch, rewards, values, settings)
        # As published. The critic-free estimators do their own centering or whitening.
        return masked_whiten(estimate.advantages, batch.mask), estimate.returns
    if settings.adv_estimator not in ADVANTAGE_ESTIMATORS:
        own_estimator = get_part(settings.adv_estimator)
        advantages = own_estimator(_compute_scores(batch, rewards), batch.group_ids, batch.mask)
        # No estimator of the user gets to train tokens that were not sampled.
        return torch.where(batch.mask, advantages.to(rewards.dtype), 0).detach(), torch.zeros_like(rewards)
    return _CRITIC_FREE_ESTIMATORS[settings.adv_estimator](batch, rewards, settings), torch.zeros_like(rewards)


def _compute_gae(batch: Batch, rewards: Tensor, values: Tensor, settings: AlgorithmConfig) -> AdvantagesReturns:
    """GAE over tokens, or with settings.bi_level_gae over turns and then over the tokens of each turn."""
    if settings.bi_level_gae:
        return bi_level_gae(
            rewards, values, batch.mask, batch.turns, settings.gamma, settings.lam, settings.high_level_gamma
        )
    return gae(rewards, values, batch.mask, settings.gamma, settings.lam)


def _compute_scores(batch: Batch, rewards: Tensor) -> Tensor:
    """Score (B,) of each episode: the sum of its rewards, which include the KL penalty if that is on."""
    return (rewards * batch.mask).sum(1)


_CRITIC_FREE_ESTIMATORS: Mapping[str, Callable[[Batch, Tensor, AlgorithmConfig], Tensor]] = {
    "grpo": lambda batch, rewards, settings: grpo(
        _compute_scores(batch, rewards), batch.group_ids, batch.mask, settings.norm_adv_by_std_in_grpo
    ),
    "rloo": lambda batch, rewards, settings: rloo(_compute_scores(batch, rewards), batch.group_ids, batch.mask),
    "reinforce_plus_plus": lambda batch, rewards, settings: reinforce_plus_plus(rewards, batch.mask, settings.gamma),
    "reinforce_plus_plus_baseline": lambda batch, rewards, settings: reinforce_plus_plus_baseline(
        _compute_scores(batch, rewards), batch.group_ids, batch.mask
    ),
    "group_skill": lambda batch, rewards, settings: group_skill(
        _compute_scores(batch, rewards), batch.group_ids, batch.mask
    ),
}
"""Estimators that need no critic, by adv_estimator: functions from batch, rewards (B, T) and settings to advantages
(B, T). Estimators of a whole group see the sum of an episode's rewards, so that a KL penalty reaches them, too."""

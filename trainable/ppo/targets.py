"""Targets of the losses: advantages and returns, made from the scores of episodes."""

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
    """Compute advantages and returns of a batch, in the published order.

    values: (B, T) of the critic, which gae needs. kl_coef: coefficient of the KL penalty in the reward, if that is on.
    filter_scale: factor of filter_loss_scaling, applied to advantages after whitening. zero_task_advantage comes last
    and does not change returns.
    """
    # As published: GAE over turns needs the reward of each turn, everything else the score at the last sampled token.
    rewards = batch.rewards if settings.bi_level_gae else place_episode_scores(batch)
    if settings.use_kl_in_reward:  # for which the trainer always makes the reference pass
        assert ref_logprobs is not None
        rewards = apply_kl_penalty(rewards, batch.logprobs, ref_logprobs, batch.mask, settings.kl_penalty, kl_coef)
    advantages, returns = _compute_advantages(batch, rewards, values, settings)
    # Without task advantage the critic still learns from the returns; only KL and entropy move the policy.
    advantages = torch.zeros_like(advantages) if settings.zero_task_advantage else advantages * filter_scale
    return Targets(advantages, returns, torch.zeros_like(returns) if values is None else values, ref_logprobs)


def _compute_advantages(
    batch: Batch, rewards: Tensor, values: Tensor | None, settings: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of the estimator; without a critic, returns are 0 and unused."""
    if settings.estimator.needs_critic:
        assert values is not None
        estimate = _compute_gae(batch, rewards, values, settings)
        return masked_whiten(estimate.advantages, batch.mask), estimate.returns
    return _CRITIC_FREE_ESTIMATORS[settings.adv_estimator](batch, rewards, settings), torch.zeros_like(rewards)


def _compute_gae(batch: Batch, rewards: Tensor, values: Tensor, settings: AlgorithmConfig) -> AdvantagesReturns:
    """GAE over tokens, or bi-level GAE over turns and tokens."""
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
"""Estimators that need no values: functions of a batch, its rewards (B, T) and settings to advantages (B, T)."""

"""From scores to what the losses aim at: rewards placed on tokens, advantages and returns."""

import torch
from torch import Tensor

from trainable.algo.advantages import (
    bi_level_gae,
    gae,
    group_skill,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from trainable.algo.kl_control import kl_penalised_rewards
from trainable.algo.reductions import masked_whiten
from trainable.config.sections import AlgorithmConfig
from trainable.ppo.update import Targets
from trainable.rollout.batch import Batch, last_token_scores


def make_targets(
    batch: Batch, values: Tensor | None, ref_logprobs: Tensor | None, settings: AlgorithmConfig, kl_coef: float,
    filter_scale: float,
) -> Targets:  # fmt: skip
    """Advantages and returns of a batch, in the published order.

    values (B, T): the critic's, for gae. kl_coef: of the KL penalty in the reward, where that is on. filter_scale:
    factor of filter_loss_scaling, applied after whitening; zero_task_advantage comes last and leaves returns alone.
    """
    rewards = batch.rewards if settings.bi_level_gae else last_token_scores(batch)
    if settings.use_kl_in_reward:
        assert ref_logprobs is not None
        rewards = kl_penalised_rewards(rewards, batch.logprobs, ref_logprobs, batch.mask, settings.kl_penalty, kl_coef)
    advantages, returns = _advantages(batch, rewards, values, settings)
    advantages = torch.zeros_like(advantages) if settings.zero_task_advantage else advantages * filter_scale
    return Targets(advantages, returns, torch.zeros_like(returns) if values is None else values, ref_logprobs)


def _advantages(
    batch: Batch, rewards: Tensor, values: Tensor | None, settings: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of the estimator; without a critic, returns are 0 and not used."""
    if settings.adv_estimator == "gae":
        assert values is not None
        if settings.bi_level_gae:
            estimate = bi_level_gae(
                rewards, values, batch.mask, batch.turns, settings.gamma, settings.lam, settings.high_level_gamma
            )
        else:
            estimate = gae(rewards, values, batch.mask, settings.gamma, settings.lam)
        return masked_whiten(estimate.advantages, batch.mask), estimate.returns
    nothing = torch.zeros_like(rewards)
    if settings.adv_estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(rewards, batch.mask, settings.gamma), nothing
    scores = (rewards * batch.mask).sum(1)
    if settings.adv_estimator == "grpo":
        return grpo(scores, batch.group_ids, batch.mask, settings.norm_adv_by_std_in_grpo), nothing
    estimator = {
        "rloo": rloo, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline, "group_skill": group_skill,
    }[settings.adv_estimator]  # fmt: skip
    return estimator(scores, batch.group_ids, batch.mask), nothing

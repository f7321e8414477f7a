"""Compute the targets of the losses (advantages and returns) from the rewards of episodes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

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
from trainable.algo.kl_control import apply_kl_penalty
from trainable.algo.reductions import masked_whiten
from trainable.algo.trees import compute_tree_weights
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
    has_trees: bool = False,
) -> Targets:
    """Compute advantages and returns of a batch: KL penalty, estimator, whitening, then scaling (published order).

    values: (B, T) of the critic, which gae needs; None without a critic. ref_logprobs: (B, T) of the reference; None
    without one. settings: zero_task_advantage sets the advantages to 0, but not the returns. kl_coef: coefficient of
    the KL penalty in the reward, read only with use_kl_in_reward. filter_scale: factor of actor.filter_loss_scaling,
    applied after whitening, which would cancel it. has_trees: whether the episodes are trees, in which every rollout
    gets the advantage of its root, and weights by settings.tree_weighting.
    """
    # As published: GAE over turns needs the reward of each turn, all others the score at the last sampled token.
    rewards = batch.rewards if settings.bi_level_gae else place_episode_scores(batch)
    if settings.use_kl_in_reward:
        assert ref_logprobs is not None  # a run with a KL in the reward has a reference
        rewards = apply_kl_penalty(rewards, batch.logprobs, ref_logprobs, batch.mask, settings.kl_penalty, kl_coef)
    loss_weights = None
    if not has_trees:
        advantages, returns = _compute_advantages(batch, rewards, values, settings)
    else:
        scores = _compute_scores(batch, rewards)
        advantages = compute_tree_advantages(batch, scores, settings.norm_adv_by_std_in_grpo)
        returns = torch.zeros_like(rewards)
        loss_weights = compute_tree_weights(
            batch.mask, batch.turns, batch.tree_ids, batch.is_root, settings.tree_weighting, settings.train_children
        ).to(advantages.dtype)
    # Only the advantages become 0: just KL and entropy move the policy, and the critic still learns from the returns.
    advantages = torch.zeros_like(advantages) if settings.zero_task_advantage else advantages * filter_scale
    values = torch.zeros_like(returns) if values is None else values
    return Targets(advantages, returns, values, ref_logprobs, loss_weights=loss_weights)


def _compute_advantages(
    batch: Batch, rewards: Tensor, values: Tensor | None, settings: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns (B, T) with the estimator. Without a critic, returns are 0 and unused."""
    if settings.estimator.needs_critic:
        assert values is not None
        if settings.bi_level_gae:
            estimate = bi_level_gae(
                rewards, values, batch.mask, batch.turns, settings.gamma, settings.lam, settings.high_level_gamma
            )
        else:
            estimate = gae(rewards, values, batch.mask, settings.gamma, settings.lam)
        # As published. Critic-free estimators center or whiten themselves.
        return masked_whiten(estimate.advantages, batch.mask), estimate.returns
    if settings.adv_estimator not in ADVANTAGE_ESTIMATORS:
        own_estimator = get_part(settings.adv_estimator)
        advantages = own_estimator(_compute_scores(batch, rewards), batch.group_ids, batch.mask)
        # A plug-in must not train tokens that were not sampled.
        return torch.where(batch.mask, advantages.to(rewards.dtype), 0).detach(), torch.zeros_like(rewards)
    return _CRITIC_FREE_ESTIMATORS[settings.adv_estimator](batch, rewards, settings), torch.zeros_like(rewards)


def _compute_scores(batch: Batch, rewards: Tensor) -> Tensor:
    """Compute the score (B,) of each episode: the sum of its rewards, including any KL penalty."""
    return (rewards * batch.mask).sum(1)


def compute_tree_advantages(batch: Batch, scores: Tensor, norm_by_std: bool) -> Tensor:
    """Compute the advantage of each root among the roots of its group, and give it to all tokens of its tree, (B, T).

    scores: (B,) of each rollout, not read for children. norm_by_std: see `grpo`. The constants are from rlm_grpo: the
    variance divides by G, and a std up to 1e-8 gives advantage 0.
    """
    roots = batch.is_root
    one_token = torch.ones(int(roots.sum()), 1, dtype=torch.bool, device=scores.device)
    root_advantages = grpo(
        scores[roots], batch.group_ids[roots], one_token, norm_by_std, correction=0, std_floor=1e-8, min_std=1e-8
    )
    of_tree = torch.zeros(int(batch.tree_ids.max()) + 1, dtype=scores.dtype, device=scores.device)
    of_tree = of_tree.index_put((batch.tree_ids[roots],), root_advantages[:, 0])
    return torch.where(batch.mask, of_tree[batch.tree_ids][:, None], 0)


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
"""Estimators without a critic, by adv_estimator: functions of batch, rewards (B, T) and settings that return advantages
(B, T). Estimators over groups read the sum of an episode's rewards, so a KL penalty affects them, too."""

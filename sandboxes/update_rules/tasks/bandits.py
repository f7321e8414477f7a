"""Sample the rollouts of a bandit, which have one action each, from the policy's probabilities."""

from typing import Any

import torch
from torch import Tensor

from sandboxes.toys.decoding import sample_actions, select_log_probs
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.tasks.rewards import (
    detect_bandit_feature,
    filter_groups,
    find_mixed_groups,
    make_noisy_rewards,
)


class BanditTask:
    """The forward passes of a bandit (see `sandboxes.update_rules.rollouts.Task`), with T = 1."""

    def compute_logits(self, models: Any, rollouts: Rollouts) -> Tensor:
        """Compute logits [E, B, 1, A], with gradients."""
        logits: Tensor = models.compute_logits(rollouts.observations)
        return logits[:, :, None]

    def compute_oracle_log_probs(self, models: Any, rollouts: Rollouts) -> Tensor:
        """Compute log-probabilities from `compute_logits`: no token precedes the action, so the oracle sees no more."""
        return self.compute_logits(models, rollouts).log_softmax(-1)


def make_bandit_rollouts(
    config: UpdateRuleConfig,
    rngs: MemberRngs,
    step: int,
    observations: Tensor,
    labels: Tensor,
    log_probs: Tensor,
    action_cost: Tensor | None = None,
) -> Rollouts:
    """Sample batch_size actions and their rewards.

    As published, a bandit with action costs filters its groups by correct actions without noise, and knows its expected
    reward in grouped batches too. A bandit without costs filters by rewards, and knows it only in ungrouped batches.

    observations: [E, P, ...]. labels: [E, P] the correct actions, whose reward is 1. log_probs: [E, P, A] of the
    sampling policy. action_cost: [E, P, A], subtracted from the reward after noise; None: no costs.
    """
    is_grouped = config.rule.has_groups
    samples_per_prompt = config.samples_per_prompt
    # With noise, the probability of the correct action is no longer the mean reward.
    has_expected_reward = config.reward_noise == 0 and (action_cost is not None or not is_grouped)
    cost = torch.zeros_like(log_probs) if action_cost is None else action_cost
    expected_reward = select_log_probs(log_probs, labels).exp() - (log_probs.exp() * cost).sum(-1)
    observations, labels, log_probs, cost, expected_reward = (
        tensor.repeat_interleave(samples_per_prompt, dim=1)
        for tensor in (observations, labels, log_probs, cost, expected_reward)
    )
    actions = sample_actions(log_probs, rngs.uniform("sandbox_samples", step, shape=(config.batch_size,)))
    is_solved = actions == labels
    has_feature = detect_bandit_feature(config.reward_noise_mode, actions)
    rewards = make_noisy_rewards(config, rngs, step, is_solved.float(), is_solved, has_feature)
    rewards = rewards - select_log_probs(cost, actions)
    # `find_mixed_groups` needs scores of 0 and 1, unlike rewards minus costs.
    filter_scores = rewards if action_cost is None else is_solved
    is_mixed = find_mixed_groups(filter_scores, samples_per_prompt) if is_grouped else None
    keep_mask, scalars = filter_groups(rewards, is_mixed)
    return Rollouts(
        observations=observations,
        actions=actions[..., None],
        labels=labels[..., None],
        rewards=rewards,
        behavior_log_probs=select_log_probs(log_probs, actions)[..., None],
        behavior_baseline=log_probs.exp().square().sum(-1, keepdim=True),
        keep_mask=keep_mask,
        age=torch.zeros(len(rewards), dtype=torch.int64),
        group_size=samples_per_prompt if is_grouped else None,
        expected_reward=expected_reward if has_expected_reward else None,
        scalars=scalars,
    )

"""Delightful policy gradients: gate each sample by its advantage times its surprisal.

    delight = A · s,    g = σ(delight / eta)

The gate is open for good unlikely actions and closed for bad unlikely ones; g is 1/2 where either factor is 0.
"""

import torch
from torch import Tensor

from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    compute_advantages,
    compute_reward_std,
    gather_log_probs,
    policy_gradient_loss,
)


def compute_gate(advantage: Tensor, action_log_probs: Tensor, eta: float) -> Tensor:
    """g = σ(A · s / eta), without gradient, of the shape of `advantage` and `action_log_probs` (l); eta > 0."""
    # −l is the surprisal. Detached: the gate is a weight, and its own gradient is not part of the rule.
    return torch.sigmoid(-advantage * action_log_probs.detach() / eta)


def dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ(A · s / eta).

    Source: Osband 2026, arXiv:2603.14608.
    Reduces to: half of REINFORCE as eta grows; for small eta, REINFORCE on samples of positive advantage only.
    Axis: influence. The weight of a sample depends on its surprisal as well as on its advantage.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = compute_advantages(rollouts, log_probs, config)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    return policy_gradient_loss(rollouts, action_log_probs, gates * advantage, gate_mean=gates)


def replay_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) on a batch from the replay buffer, without any correction for its age.

    Source: this sandbox.
    Reduces to: DG; with replay_capacity = delay + 1 to DG with that delay, because only one batch can be drawn.
    Axis: support. It assumes that old samples are still informative for the current policy.
    """
    return dg(rollouts, log_probs, config)


def fresh_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(f · g · A) ),  f = exp(−replay_age_decay · age).

    Source: this sandbox.
    Reduces to: DG at age 0 or decay 0; at a constant age, to DG with its loss scaled.
    Axis: support. The weight of a sample decays with every update since it was drawn.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = compute_advantages(rollouts, log_probs, config)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    age = rollouts.age.to(action_log_probs.dtype)[:, None, None].expand(action_log_probs.shape)
    freshness = torch.exp(-config.replay_age_decay * age)
    sample_metrics = {"gate_mean": gates, "freshness_weight": freshness, "batch_age": age}
    return policy_gradient_loss(rollouts, action_log_probs, freshness * gates * advantage, **sample_metrics)


def dg_entropy_guard(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(h · g · A) ), with a lower weight for good actions that are already likely.

        h = 1 − guard_strength · clip(π(a) − 1/n, 0, 1) where A > 0, otherwise 1

    n is the number of actions, so 1/n is the mean probability of an action.

    Source: this sandbox.
    Reduces to: DG at guard_strength 0, or if no good action is likelier than chance.
    Axis: geometry. It protects entropy through the probability of the sampled action, after the advantage is computed.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = compute_advantages(rollouts, log_probs, config)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    excess_prob = (action_log_probs.detach().exp() - 1 / log_probs.shape[-1]).clamp(0, 1)
    guard = torch.where(advantage > 0, 1 - config.guard_strength * excess_prob, 1)
    weight = guard * gates * advantage
    return policy_gradient_loss(rollouts, action_log_probs, weight, gate_mean=gates, entropy_guard_mean=guard)


def uncertainty_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ( (A · s − κ u) / eta ),  κ = uncertainty_scale.

    u is the standard deviation of rewards in the group, or in the batch if there are no groups.

    Source: this sandbox.
    Reduces to: DG at κ = 0 or if all rewards are equal.
    Axis: reward uncertainty. The gate closes where rewards vary.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = compute_advantages(rollouts, log_probs, config)
    reward_std = compute_reward_std(rollouts)
    delight = -advantage * action_log_probs.detach()
    gates = torch.sigmoid((delight - config.uncertainty_scale * reward_std.unsqueeze(-1)) / config.eta)
    return policy_gradient_loss(
        rollouts, action_log_probs, gates * advantage, gate_mean=gates, uncertainty_mean=reward_std
    )


def filtered_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(1[u <= uncertainty_threshold] · g · A) ); filtered samples count in the mean, with weight 0.

    Without groups, u is one number for the batch, so the filter passes the whole batch or nothing.

    Source: this sandbox.
    Reduces to: DG at a threshold of 0.5 or more if rewards lie in [0, 1], whose standard deviation is at most 0.5.
    Axis: reward uncertainty, by a hard threshold.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = compute_advantages(rollouts, log_probs, config)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    reward_std = compute_reward_std(rollouts)
    trust_mask = (reward_std <= config.uncertainty_threshold).to(action_log_probs.dtype)
    sample_metrics = {"gate_mean": gates, "uncertainty_mean": reward_std, "kept_frac": trust_mask}
    return policy_gradient_loss(
        rollouts, action_log_probs, trust_mask.unsqueeze(-1) * gates * advantage, **sample_metrics
    )


def reward_variance_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A') ),  A' = A / (1 + κ u),  g = σ(A' · s / eta),  κ = uncertainty_scale.

    Source: this sandbox.
    Reduces to: DG at κ = 0 or if all rewards are equal.
    Axis: reward uncertainty. Advantages shrink where rewards vary, in the gate as well.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    reward_std = compute_reward_std(rollouts)
    scaled_advantage = compute_advantages(rollouts, log_probs, config) / (
        1 + config.uncertainty_scale * reward_std.unsqueeze(-1)
    )
    gates = compute_gate(scaled_advantage, action_log_probs, config.eta)
    return policy_gradient_loss(
        rollouts, action_log_probs, gates * scaled_advantage, gate_mean=gates, uncertainty_mean=reward_std
    )

"""Delightful policy gradients: a gate on each sample, from its advantage times its surprisal.

    delight = A · s,    g = σ(delight / eta)

A good action that was unlikely passes, a bad one that was unlikely does not; g is 1/2 where either factor is 0.
"""

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.rule import RuleLoss, advantages, log_probs_of, policy_gradient_loss, uncertainty


def gate(advantage: Tensor, taken: Tensor, eta: float) -> Tensor:
    """g = σ(A · s / eta), a constant of the shape of `advantage` and `taken` (l); eta > 0."""
    return torch.sigmoid(-advantage * taken.detach() / eta)


def dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ(A · s / eta).

    Source: Osband 2026, arXiv:2603.14608.
    Reduces to: half of REINFORCE as eta grows; for small eta, REINFORCE on samples of positive advantage alone.
    Axis: influence. Surprisal decides, beside the advantage, how much a sample counts.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = advantages(rollouts, log_probs, config)
    passed = gate(advantage, taken, config.eta)
    return policy_gradient_loss(rollouts, taken, passed * advantage, gate_mean=passed)


def replay_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) on a batch of the replay buffer, without any correction for its age.

    Source: this sandbox.
    Reduces to: DG; and with replay_capacity = delay + 1 to DG with that delay, since one batch can be drawn.
    Axis: support. It bets that old samples still inform the policy that learns.
    """
    return dg(rollouts, log_probs, config)


def fresh_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(f · g · A) ),  f = exp(−replay_age_decay · age).

    Source: this sandbox.
    Reduces to: DG at age 0 or decay 0; at a constant age, to DG with its loss scaled.
    Axis: support. A sample is worth less with every update since it was drawn.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = advantages(rollouts, log_probs, config)
    passed = gate(advantage, taken, config.eta)
    age = rollouts.age.to(taken.dtype)[:, None, None].expand(taken.shape)
    freshness = torch.exp(-config.replay_age_decay * age)
    samples = {"gate_mean": passed, "freshness_weight": freshness, "batch_age": age}
    return policy_gradient_loss(rollouts, taken, freshness * passed * advantage, **samples)


def dg_entropy_guard(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(h · g · A) ), with less weight on good actions that are already likely.

        h = 1 − guard_strength · clip(π(a) − 1/n, 0, 1) where A > 0, else 1

    with n actions, so that 1/n is the mean probability of an action.

    Source: this sandbox.
    Reduces to: DG at guard_strength 0, or where no good action is likelier than chance.
    Axis: geometry. It holds entropy at the probability of the sampled action, downstream of the advantage.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = advantages(rollouts, log_probs, config)
    passed = gate(advantage, taken, config.eta)
    above_chance = (taken.detach().exp() - 1 / log_probs.shape[-1]).clamp(0, 1)
    guard = torch.where(advantage > 0, 1 - config.guard_strength * above_chance, 1)
    weight = guard * passed * advantage
    return policy_gradient_loss(rollouts, taken, weight, gate_mean=passed, entropy_guard_mean=guard)


def uncertainty_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ( (A · s − κ u) / eta ),  κ = uncertainty_scale.

    u is the standard deviation of rewards in the group, or of the batch where there are no groups.

    Source: this sandbox.
    Reduces to: DG at κ = 0 or where all rewards are equal.
    Axis: reward uncertainty. The gate closes where rewards scatter.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = advantages(rollouts, log_probs, config)
    doubt = uncertainty(rollouts)
    delight = -advantage * taken.detach()
    passed = torch.sigmoid((delight - config.uncertainty_scale * doubt.unsqueeze(-1)) / config.eta)
    return policy_gradient_loss(rollouts, taken, passed * advantage, gate_mean=passed, uncertainty_mean=doubt)


def filtered_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(1[u <= uncertainty_threshold] · g · A) ); what is left out still counts in the mean.

    Without groups u is one number of the batch, so a batch passes as a whole or not at all.

    Source: this sandbox.
    Reduces to: DG at a threshold of 0.5 or more where rewards lie in [0, 1], whose deviation is at most 0.5.
    Axis: reward uncertainty, by a hard threshold.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = advantages(rollouts, log_probs, config)
    passed = gate(advantage, taken, config.eta)
    doubt = uncertainty(rollouts)
    trusted = (doubt <= config.uncertainty_threshold).to(taken.dtype)
    samples = {"gate_mean": passed, "uncertainty_mean": doubt, "kept_frac": trusted}
    return policy_gradient_loss(rollouts, taken, trusted.unsqueeze(-1) * passed * advantage, **samples)


def reward_variance_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A') ),  A' = A / (1 + κ u),  g = σ(A' · s / eta),  κ = uncertainty_scale.

    Source: this sandbox.
    Reduces to: DG at κ = 0 or where all rewards are equal.
    Axis: reward uncertainty. Advantages shrink where rewards scatter, in the gate as well.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    doubt = uncertainty(rollouts)
    shrunk = advantages(rollouts, log_probs, config) / (1 + config.uncertainty_scale * doubt.unsqueeze(-1))
    passed = gate(shrunk, taken, config.eta)
    return policy_gradient_loss(rollouts, taken, passed * shrunk, gate_mean=passed, uncertainty_mean=doubt)

"""Delightful policy gradients: gate each sample by its advantage times its surprisal.

    delight = A · s,    g = σ(delight / eta)

The gate is open for good unlikely actions and closed for bad unlikely ones; g is 1/2 where either factor is 0.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    compute_advantages,
    compute_behavior_advantages,
    compute_reward_std,
    masked_mean,
    policy_gradient_loss,
)


def compute_gate(advantage: Tensor, action_log_probs: Tensor, eta: float) -> Tensor:
    """Compute the gate g = σ(A · s / eta), without gradient, in the shape of both arguments; eta > 0."""
    # −l is the surprisal. Detached: the gate is a weight, and the rule does not include its gradient.
    return torch.sigmoid(-advantage * action_log_probs.detach() / eta)


def _gate_samples(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Compute l, A and g of every sample, [E, B, T] each."""
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    advantage = compute_advantages(rollouts, log_probs, config)
    return action_log_probs, advantage, compute_gate(advantage, action_log_probs, config.eta)


def dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ(A · s / eta).

    Source: Osband 2026, arXiv:2603.14608.
    Reduces to: half of REINFORCE as eta grows; for small eta, REINFORCE on samples of positive advantage only.
    Axis: influence. The weight of a sample depends on its surprisal as well as on its advantage.

    ReplayDG (this sandbox) uses the same formula on batches from the replay buffer, without any correction for their
    age. It reduces to DG with a delay at replay_capacity = delay + 1, because only one batch can be drawn. Axis:
    support. It assumes that old samples are still informative for the current policy.

    Kondo (the Kondo gate, arXiv:2603.20526) uses it on the rollouts that `screen_rollouts` keeps, which runs once,
    before the inner epochs. It keeps or drops a sequence as a whole, and reduces to DG at kondo_keep = 1.
    """
    action_log_probs, advantage, gates = _gate_samples(rollouts, log_probs, config)
    return policy_gradient_loss(rollouts, action_log_probs, gates * advantage, gate_mean=gates)


def fresh_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(f · g · A) ),  f = exp(−replay_age_decay · age).

    Source: this sandbox.
    Reduces to: DG at age 0 or decay 0; at a constant age, to DG with its loss scaled.
    Axis: support. The weight of a sample decays with every update since it was drawn.
    """
    action_log_probs, advantage, gates = _gate_samples(rollouts, log_probs, config)
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
    action_log_probs, advantage, gates = _gate_samples(rollouts, log_probs, config)
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
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    advantage = compute_advantages(rollouts, log_probs, config)
    reward_std = compute_reward_std(rollouts)
    delight = -advantage * action_log_probs.detach()
    gates = torch.sigmoid((delight - config.uncertainty_scale * reward_std.unsqueeze(-1)) / config.eta)
    return policy_gradient_loss(
        rollouts, action_log_probs, gates * advantage, gate_mean=gates, uncertainty_mean=reward_std
    )


def filtered_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(1[u <= uncertainty_threshold] · g · A) ); filtered samples count in the mean, with weight 0.

    Without groups, u is one number for the batch, so the filter passes either the whole batch or nothing.

    Source: this sandbox.
    Reduces to: DG at a threshold of 0.5 or more if rewards lie in [0, 1], whose standard deviation is at most 0.5.
    Axis: reward uncertainty, by a hard threshold.
    """
    action_log_probs, advantage, gates = _gate_samples(rollouts, log_probs, config)
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
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    reward_std = compute_reward_std(rollouts)
    scaled_advantage = compute_advantages(rollouts, log_probs, config) / (
        1 + config.uncertainty_scale * reward_std.unsqueeze(-1)
    )
    gates = compute_gate(scaled_advantage, action_log_probs, config.eta)
    return policy_gradient_loss(
        rollouts, action_log_probs, gates * scaled_advantage, gate_mean=gates, uncertainty_mean=reward_std
    )


BISECTIONS = 20  # a range of 20 eta is halved to 2e-5 eta, too little to change a fraction of rollouts
MARGIN = 10.0
"""Search margin around the scores, in units of eta. σ(±10) is within 5e-5 of 1 and 0, so the threshold lies inside."""


def compute_behavior_delight(rollouts: Rollouts) -> Tensor:
    """Compute A · (−μ) [E, B, T] under the sampling policy; A is R minus its expected reward or Σ_a π(a)²."""
    return compute_behavior_advantages(rollouts) * -rollouts.behavior_log_probs


def find_threshold(scores: Tensor, keep_mask: Tensor, keep_fraction: float, eta: float) -> Tensor:
    """Find λ [E] such that the mean over kept rollouts of σ((score − λ) / eta) is `keep_fraction`, by bisection.

    The mean decreases with λ, so there is only one root. scores, keep_mask: [E, B]. keep_fraction: below 1.
    """
    low = scores.masked_fill(~keep_mask, torch.inf).amin(1) - MARGIN * eta
    high = scores.masked_fill(~keep_mask, -torch.inf).amax(1) + MARGIN * eta
    for _ in range(BISECTIONS):
        midpoint = (low + high) / 2
        too_many = masked_mean(torch.sigmoid((scores - midpoint[:, None]) / eta), keep_mask) > keep_fraction
        low, high = torch.where(too_many, midpoint, low), torch.where(too_many, high, midpoint)
    return (low + high) / 2


def screen_rollouts(
    rollouts: Rollouts, uniforms: Tensor, config: UpdateRuleConfig
) -> tuple[Rollouts, dict[str, Tensor]]:
    """Keep each rollout with probability σ((score − λ) / eta), so that on average a fraction kondo_keep stays.

    The score of a rollout is its largest delight at any position. If a member would keep none, it keeps the rollout
    with the best score. Rollouts outside `keep_mask` stay out. uniforms: [E, B] in [0, 1).

    Returns the batch with a smaller `keep_mask`, and kept_frac and gate_prob_mean, [E] each, as fractions of the
    previously kept rollouts.
    """
    keep_mask = rollouts.keep_mask
    if config.kondo_keep == 1:
        # No finite threshold keeps everything.
        kept_fraction = masked_mean(torch.ones_like(rollouts.rewards), keep_mask)
        return rollouts, {"kept_frac": kept_fraction, "gate_prob_mean": kept_fraction}
    scores = compute_behavior_delight(rollouts).amax(-1)
    cutoff = find_threshold(scores, keep_mask, config.kondo_keep, config.eta)
    keep_probability = torch.sigmoid((scores - cutoff[:, None]) / config.eta)
    screened_mask = keep_mask & (uniforms < keep_probability)
    # If the draws leave no rollout, the one with the best score is kept.
    best_index = scores.masked_fill(~keep_mask, -torch.inf).argmax(1, keepdim=True)
    fallback_mask = torch.zeros_like(keep_mask).scatter(1, best_index, True)
    screened_mask = torch.where(screened_mask.any(1, keepdim=True), screened_mask, fallback_mask)
    metrics = {
        "kept_frac": masked_mean(screened_mask.to(scores.dtype), keep_mask),
        "gate_prob_mean": masked_mean(keep_probability, keep_mask),
    }
    return replace(rollouts, keep_mask=screened_mask), metrics

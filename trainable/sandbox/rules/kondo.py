"""Kondo: a batch is screened by delight before it costs a backward pass, and DG learns from what is left."""

from dataclasses import replace

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.delight import dg
from trainable.sandbox.rules.rule import RuleLoss, compute_behavior_advantages, masked_mean

BISECTIONS = 20
MARGIN = 10.0
"""In units of eta. σ(±10) is within 5e-5 of 1 and 0, so a share between those has its threshold inside."""


def kondo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean over what `screen` kept of l · sg(g · A); the trainer screens a batch once, before its inner epochs.

    Source: the Kondo gate, arXiv:2603.20526; a sequence is kept or not as a whole, by its largest delight.
    Reduces to: DG at kondo_keep = 1.
    Axis: influence. Samples of little delight get no weight, and no backward pass.
    """
    return dg(rollouts, log_probs, config)


def compute_behavior_delight(rollouts: Rollouts) -> Tensor:
    """[E, B, T] A · (−μ) under the policy that sampled: R minus its expected reward, or minus its Σ_a π(a)²."""
    return compute_behavior_advantages(rollouts) * -rollouts.behavior_log_probs


def find_threshold(scores: Tensor, keep_mask: Tensor, keep_fraction: float, eta: float) -> Tensor:
    """[E] λ with mean over kept of σ((score − λ)/eta) = share, by 20 bisections; scores and keep [E, B].

    share is below 1. The mean falls with λ, so the root is the only one.
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
    """Keep each rollout with probability σ((score − λ)/eta), so that a share of kondo_keep stays on average.

    A rollout's score is its largest delight at any position. Where a member would keep none, the best score stays.

    Args:
        rollouts: a batch; what it does not keep stays out, and counts nowhere.
        uniforms: [E, B] numbers in [0, 1), one a rollout.
        config: kondo_keep in (0, 1], eta > 0.

    Returns:
        The batch with a smaller `keep`, and kept_frac and gate_prob_mean, [E] each: shares of what came in.
    """
    keep_mask = rollouts.keep_mask
    if config.kondo_keep == 1:
        kept_fraction = masked_mean(torch.ones_like(rollouts.rewards), keep_mask)
        return rollouts, {"kept_frac": kept_fraction, "gate_prob_mean": kept_fraction}
    scores = compute_behavior_delight(rollouts).amax(-1)
    cutoff = find_threshold(scores, keep_mask, config.kondo_keep, config.eta)
    keep_probability = torch.sigmoid((scores - cutoff[:, None]) / config.eta)
    screened_mask = keep_mask & (uniforms < keep_probability)
    best_index = scores.masked_fill(~keep_mask, -torch.inf).argmax(1, keepdim=True)
    fallback_mask = torch.zeros_like(keep_mask).scatter(1, best_index, True)
    screened_mask = torch.where(screened_mask.any(1, keepdim=True), screened_mask, fallback_mask)
    metrics = {
        "kept_frac": masked_mean(screened_mask.to(scores.dtype), keep_mask),
        "gate_prob_mean": masked_mean(keep_probability, keep_mask),
    }
    return replace(rollouts, keep_mask=screened_mask), metrics

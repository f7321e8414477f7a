"""Kondo: screen a batch by delight before it costs a backward pass, then train DG on the rollouts that are left."""

from dataclasses import replace

import torch
from torch import Tensor

from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.delight import dg
from sandboxes.update_rules.rules.rule import RuleLoss, compute_behavior_advantages, masked_mean

BISECTIONS = 20  # a range of 20 eta is halved to 2e-5 eta, far below what changes a fraction of rollouts
MARGIN = 10.0
"""Search margin around the scores, in units of eta. σ(±10) is within 5e-5 of 1 and 0, so the threshold lies inside."""


def kondo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) over the rollouts that `screen_rollouts` keeps, which runs once, before the inner epochs.

    Source: the Kondo gate, arXiv:2603.20526; a sequence is kept or dropped as a whole, by its largest delight.
    Reduces to: DG at kondo_keep = 1.
    Axis: influence. Samples with little delight get no weight, and no backward pass.
    """
    return dg(rollouts, log_probs, config)


def compute_behavior_delight(rollouts: Rollouts) -> Tensor:
    """[E, B, T] A · (−μ) under the sampling policy; A is R minus its expected reward, or minus its Σ_a π(a)²."""
    return compute_behavior_advantages(rollouts) * -rollouts.behavior_log_probs


def find_threshold(scores: Tensor, keep_mask: Tensor, keep_fraction: float, eta: float) -> Tensor:
    """[E] λ such that the mean over kept rollouts of σ((score − λ) / eta) is `keep_fraction`, by bisection.

    The mean falls with λ, so there is only one root. scores, keep_mask: [E, B]. keep_fraction: below 1.
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
    with the best score.

    Args:
        rollouts: a batch; rollouts outside its `keep_mask` stay out and count nowhere.
        uniforms: [E, B] numbers in [0, 1), one per rollout.
        config: kondo_keep in (0, 1], eta > 0.

    Returns:
        The batch with a smaller `keep_mask`, and kept_frac and gate_prob_mean, [E] each: fractions of the rollouts that
        were kept before.
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
    # The rollout with the best score stays if the draws leave none.
    best_index = scores.masked_fill(~keep_mask, -torch.inf).argmax(1, keepdim=True)
    fallback_mask = torch.zeros_like(keep_mask).scatter(1, best_index, True)
    screened_mask = torch.where(screened_mask.any(1, keepdim=True), screened_mask, fallback_mask)
    metrics = {
        "kept_frac": masked_mean(screened_mask.to(scores.dtype), keep_mask),
        "gate_prob_mean": masked_mean(keep_probability, keep_mask),
    }
    return replace(rollouts, keep_mask=screened_mask), metrics

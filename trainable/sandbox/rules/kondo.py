"""Kondo: a batch is screened by delight before it costs a backward pass, and DG learns from what is left."""

from dataclasses import replace

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.delight import dg
from trainable.sandbox.rules.rule import RuleLoss, actor_advantages, kept_mean

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


def actor_delight(rollouts: Rollouts) -> Tensor:
    """[E, B, T] A · (−μ) under the policy that sampled: R minus its expected reward, or minus its Σ_a π(a)²."""
    return actor_advantages(rollouts) * -rollouts.actor_log_probs


def threshold(scores: Tensor, keep: Tensor, share: float, eta: float) -> Tensor:
    """[E] λ with mean over kept of σ((score − λ)/eta) = share, by 20 bisections; scores and keep [E, B].

    share is below 1. The mean falls with λ, so the root is the only one.
    """
    low = scores.masked_fill(~keep, torch.inf).amin(1) - MARGIN * eta
    high = scores.masked_fill(~keep, -torch.inf).amax(1) + MARGIN * eta
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_many = kept_mean(torch.sigmoid((scores - middle[:, None]) / eta), keep) > share
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return (low + high) / 2


def screen(rollouts: Rollouts, uniforms: Tensor, config: UpdateRuleConfig) -> tuple[Rollouts, dict[str, Tensor]]:
    """Keep each rollout with probability σ((score − λ)/eta), so that a share of kondo_keep stays on average.

    A rollout's score is its largest delight at any position. Where a member would keep none, the best score stays.

    Args:
        rollouts: a batch; what it does not keep stays out, and counts nowhere.
        uniforms: [E, B] numbers in [0, 1), one a rollout.
        config: kondo_keep in (0, 1], eta > 0.

    Returns:
        The batch with a smaller `keep`, and kept_frac and gate_prob_mean, [E] each: shares of what came in.
    """
    keep = rollouts.keep
    if config.kondo_keep == 1:
        everything = kept_mean(torch.ones_like(rollouts.rewards), keep)
        return rollouts, {"kept_frac": everything, "gate_prob_mean": everything}
    scores = actor_delight(rollouts).amax(-1)
    level = threshold(scores, keep, config.kondo_keep, config.eta)
    probability = torch.sigmoid((scores - level[:, None]) / config.eta)
    survives = keep & (uniforms < probability)
    best = scores.masked_fill(~keep, -torch.inf).argmax(1, keepdim=True)
    fallback = torch.zeros_like(keep).scatter(1, best, True)
    survives = torch.where(survives.any(1, keepdim=True), survives, fallback)
    metrics = {
        "kept_frac": kept_mean(survives.to(scores.dtype), keep),
        "gate_prob_mean": kept_mean(probability, keep),
    }
    return replace(rollouts, keep=survives), metrics

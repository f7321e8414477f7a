"""Rules that give every token a credit of its own, from a verifier that knows which token is right."""

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Candidates, Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.delight import gate
from trainable.sandbox.rules.grouped import advantages_in_group, clipped_surrogate
from trainable.sandbox.rules.rule import (
    RuleLoss,
    kept_mean,
    log_probs_of,
    policy_gradient_loss,
    rule_loss,
    squared_mass,
)


def scored(rollouts: Rollouts) -> Tensor:
    """[E, B, T] bool: positions that count for the reward."""
    mask = rollouts.score_mask
    return torch.ones_like(rollouts.actions, dtype=torch.bool) if mask is None else mask


def right_and_scored(rollouts: Rollouts) -> Tensor:
    """[E, B, T] bool: the sampled token is the right one, at a position that counts."""
    return (rollouts.actions == rollouts.labels) & scored(rollouts)


def dg_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ(A · s / eta),  A_t = G_t − m_t Σ_a π(a)².

        G_t = Σ_{u>=t} m_u 1[a_u right] / max(1, Σ_{u>=t} m_u)

    m_t is 1 where a position counts. At positions that do not, the baseline is 0 but G_t is not: whatever was sampled
    there is pushed up by the share of later tokens that are right.

    Source: this sandbox.
    Reduces to: on bandits, DG with baseline `expected`; at the last position, SelfDistillDG's first term.
    Axis: granularity. A token answers for what comes from it on.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    mask = scored(rollouts).to(taken.dtype)
    right = right_and_scored(rollouts).to(taken.dtype)
    to_go = _sum_from(right) / _sum_from(mask).clamp(min=1)
    advantage = to_go - mask * squared_mass(log_probs)
    passed = gate(advantage, taken, config.eta)
    return policy_gradient_loss(rollouts, taken, passed * advantage, gate_mean=passed, rtg_mean=to_go)


def _sum_from(x: Tensor) -> Tensor:
    """[E, B, T] Σ_{u>=t} x_u."""
    return x.flip(-1).cumsum(-1).flip(-1)


def candidates_of(rollouts: Rollouts) -> Candidates:
    """The batch's candidates; ValueError where it has none."""
    if rollouts.candidates is None:
        raise ValueError("This update rule compares candidates for each token; this batch has none.")
    return rollouts.candidates


def row_ids(x: Tensor) -> Tensor:
    """[N] numbers, equal for the entries of a row (of the last axis) of `x`, whose N entries are counted in order."""
    return torch.arange(x.numel()) // x.shape[-1]


def candidate_metrics(rollouts: Rollouts) -> dict[str, Tensor]:
    """[E] mean reward of all candidates, and of those that the behaviour sequences took."""
    rewards = candidates_of(rollouts).rewards
    return {
        "candidate_reward": kept_mean(rewards, rollouts.keep),
        "behavior_token_reward": kept_mean(rewards[..., 0], rollouts.keep),
    }


def grpo_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over prefixes of Σ_k [ −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ], of K candidates each.

        G = (R_k − mean) / (std + 1e-8) over the candidates (divisor K), r = π(a_k) / μ(a_k), kl as in GRPO

    Source: this sandbox: GRPO at every prefix.
    Reduces to: at r = 1 to −mean over prefixes of Σ_k log π(a_k) · sg(G_k).
    Axis: granularity. Each position has rewards of its own, and the push of GRPO.
    ValueError: the batch has no candidates.
    """
    candidates = candidates_of(rollouts)
    taken = log_probs.gather(-1, candidates.actions)
    group = (
        advantages_in_group(candidates.rewards.flatten(), row_ids(taken), divide=True).view_as(taken).to(taken.dtype)
    )
    clip = (config.clip_low, config.clip_low)
    losses, metrics = clipped_surrogate(taken, candidates.log_probs, group, rollouts.keep, clip, config.grpo_beta)
    loss = kept_mean(losses.sum(-1), rollouts.keep)
    return rule_loss(rollouts, loss, **metrics, **candidate_metrics(rollouts))

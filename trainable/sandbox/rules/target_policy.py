"""Target policy optimisation: rewards make a target distribution over candidates, and the policy is fitted to it."""

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.grouped import skill
from trainable.sandbox.rules.rule import (
    RuleLoss,
    by_group,
    group_spread,
    kept_mean,
    log_probs_of,
    rule_loss,
    spread,
    squared_mass,
)
from trainable.sandbox.rules.token_credit import candidate_metrics, candidates_of

ABSENT = -1e9
"""Score of a candidate that is not kept: its probability is exactly 0, and 0 times its logarithm is 0."""


def entropy(probabilities: Tensor) -> Tensor:
    """[...] −Σ q log q over the last axis, nats."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def fit(scores: Tensor, target: Tensor) -> Tensor:
    """[...] cross-entropy −Σ_i q_i log p_i of p = softmax(scores) over the last axis; its gradient is p − q.

    scores: [..., n]. target: q, of the same shape, a constant.
    """
    return -(target.detach() * torch.log_softmax(scores, -1)).sum(-1)


def _group_loss(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig, anchored: bool) -> RuleLoss:
    taken = log_probs_of(rollouts.actions, log_probs)
    absent = ~by_group(rollouts.keep, rollouts)
    skills = skill(group_spread(rollouts)).to(taken.dtype) / config.tpo_eta
    old = by_group(rollouts.actor_log_probs.sum(-1), rollouts) if anchored else torch.zeros_like(skills)
    target = torch.softmax((old + skills).masked_fill(absent, ABSENT), -1)
    scores = by_group(taken.sum(-1), rollouts).masked_fill(absent, ABSENT)
    groups = ~absent.all(-1)
    metrics = {
        "tpo_target_entropy": kept_mean(entropy(target), groups),
        "tpo_target_top_prob": kept_mean(target.amax(-1), groups),
    }
    return rule_loss(rollouts, kept_mean(fit(scores, target), groups), **metrics)


def tpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over groups of −Σ_i q_i log p_i, of the K rollouts of a prompt.

        p = softmax(c),  c_i = Σ_t l_i,t       q = sg softmax( log softmax(o) + z / tpo_eta ),  o_i = Σ_t μ_i,t

    z = (R − mean) / std in the group (divisor K). The gradient by c_i is p_i − q_i: at most 1, and 0 once p = q; only
    the share of probability inside the group matters.

    Source: Kaddour 2026, arXiv:2604.06159.
    Reduces to: at π = μ, with equal o and large tpo_eta, GroupPG divided by K.
    Axis: influence. It replaces weights of samples by a target for all of them.
    """
    return _group_loss(rollouts, log_probs, config, anchored=True)


def tpo_no_anchor(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """TPO with q = sg softmax(z / tpo_eta): the target does not start from the policy that sampled.

    Source: this sandbox's ablation of TPO.
    Reduces to: TPO where the sampling policy gave all rollouts of a group equal probability.
    Axis: influence. Without the anchor equal rewards pull towards equal probabilities.
    """
    return _group_loss(rollouts, log_probs, config, anchored=False)


def tpo_full_action(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean Σ_a q_a log π(a),  q = sg softmax( log π + z / tpo_eta ), over all actions of a bandit.

    z standardises (divisor n) the scores of the n actions, which are 0 but for R − Σ_a π(a)² of the taken one. So z is
    ±√(n − 1) there and ∓1/√(n − 1) elsewhere: the sign of the advantage counts, its size does not.

    Source: Kaddour 2026, arXiv:2604.06159, in this sandbox's form with one sample a prompt.
    Reduces to: zero gradient where R = Σ_a π(a)².
    Axis: influence. A target over all actions from one sample.
    ValueError: T is not 1.
    """
    if rollouts.actions.shape[-1] != 1:
        raise ValueError("TPOFullAction has a target over the actions of one choice. Set task=mnist.")
    now = log_probs.squeeze(2)  # [E, B, A]
    advantage = (rollouts.rewards.unsqueeze(-1) - squared_mass(log_probs)).to(now.dtype)  # [E, B, 1]
    scores = torch.zeros_like(now.detach()).scatter(-1, rollouts.actions, advantage)
    skills = skill(spread(scores, torch.ones_like(scores, dtype=torch.bool))).to(now.dtype)
    target = torch.softmax(now.detach() + skills / config.tpo_eta, -1)
    loss = kept_mean(-(target * now).sum(-1), rollouts.keep)
    metrics = {"tpo_target_entropy": entropy(target), "tpo_sample_adv_mean": advantage}
    return rule_loss(rollouts, loss, **{name: kept_mean(value, rollouts.keep) for name, value in metrics.items()})


def tpo_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over prefixes of −Σ_k q_k log p_k, of the K candidates for the next token.

        p = softmax(c),  c_k = log π(a_k)       q = sg softmax( log softmax(o) + z / tpo_eta ),  o_k = log μ(a_k)

    z standardises (divisor K) the candidates' rewards. A token that was drawn twice is two candidates.

    Source: this sandbox: TPO at every prefix.
    Reduces to: zero gradient at π = μ for prefixes whose candidates have equal rewards.
    Axis: granularity. Each position has rewards, and a target, of its own.
    ValueError: the batch has no candidates.
    """
    candidates = candidates_of(rollouts)
    scores = log_probs.gather(-1, candidates.actions)
    everything = torch.ones_like(candidates.rewards, dtype=torch.bool)
    skills = skill(spread(candidates.rewards, everything)).to(scores.dtype)
    target = torch.softmax(candidates.log_probs + skills / config.tpo_eta, -1)
    loss = kept_mean(fit(scores, target), rollouts.keep)
    metrics = candidate_metrics(rollouts)
    return rule_loss(rollouts, loss, tpo_target_entropy=kept_mean(entropy(target), rollouts.keep), **metrics)

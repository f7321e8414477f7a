"""Target policy optimization: rewards define a target distribution over candidates, and the policy is fitted to it."""

from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.rules.grouped import group_skills
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    make_group_ids,
    make_rule_loss,
    masked_mean,
    sum_squared_probs,
    unflatten_groups,
)
from sandboxes.update_rules.rules.token_credit import get_candidate_metrics, get_candidates, make_row_ids
from trainable.algo.target_policy import compute_group_distributions


class TargetFit(NamedTuple):
    """Fit of p to q over the n candidates of each choice. loss: [...] with gradient. log_target: [..., n] log q."""

    loss: Tensor
    log_target: Tensor

    @property
    def entropy(self) -> Tensor:
        """−Σ q log q [...], in nats."""
        return -(self.log_target.exp() * self.log_target).sum(-1)


def fit_target(scores: Tensor, old_log_probs: Tensor, skills: Tensor, ids: Tensor, eta: float) -> TargetFit:
    """Compute −Σ_i q_i log p_i over the last axis, p = softmax(scores), q = softmax(log softmax(old) + skills / eta).

    scores, old_log_probs, skills: [..., n] c, o and z; only c has a gradient, p − q. ids: [N] number of the choice of
    each of the N entries, in order; an entry with a unique number is not a candidate and contributes nothing.
    """
    distributions = compute_group_distributions(scores.flatten(), old_log_probs.flatten(), skills.flatten(), ids, eta)
    log_p, log_q = distributions.log_p.view_as(scores), distributions.log_q.view_as(scores)
    return TargetFit(-(log_q.exp() * log_p).sum(-1).to(scores.dtype), log_q.to(scores.dtype))


def _compute_group_loss(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig, anchored: bool) -> RuleLoss:
    """Compute TPO's loss. anchored: whether the target starts from the sampling policy instead of a uniform one."""
    ids, keep_mask = make_group_ids(rollouts), unflatten_groups(rollouts.keep_mask, rollouts)
    sequence_log_probs = unflatten_groups(select_log_probs(log_probs, rollouts.actions).sum(-1), rollouts)
    skills = group_skills(rollouts.rewards.flatten(), ids).view_as(sequence_log_probs)
    behavior_log_probs = unflatten_groups(rollouts.behavior_log_probs.sum(-1), rollouts)
    old_log_probs = behavior_log_probs if anchored else torch.zeros_like(sequence_log_probs)
    target_fit = fit_target(sequence_log_probs, old_log_probs, skills, ids, config.tpo_eta)
    group_mask = keep_mask.any(-1)  # groups that are trained on
    # A dropped rollout forms a separate group, with a target probability of 1.
    top_prob = target_fit.log_target.exp().masked_fill(~keep_mask, 0).amax(-1)
    metrics = {
        "tpo_target_entropy": masked_mean(target_fit.entropy, group_mask),
        "tpo_target_top_prob": masked_mean(top_prob, group_mask),
    }
    return make_rule_loss(rollouts, masked_mean(target_fit.loss, group_mask), **metrics)


def tpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over groups of −Σ_i q_i log p_i, over the K rollouts i of a prompt.

        p = softmax(c),  c_i = Σ_t l_i,t       q = sg softmax( log softmax(o) + z / tpo_eta ),  o_i = Σ_t μ_i,t

    z = (R − mean) / std in the group (divisor K). The gradient with respect to c_i is p_i − q_i: at most 1 in size, and
    0 once p = q. Only probabilities relative to the group matter.

    Source: Kaddour 2026, arXiv:2604.06159.
    Reduces to: at π = μ, with equal o and large tpo_eta, GroupPG divided by K.
    Axis: influence. It replaces the weights of samples by one target for all of them.
    """
    return _compute_group_loss(rollouts, log_probs, config, anchored=True)


def tpo_no_anchor(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """TPO with q = sg softmax(z / tpo_eta): the target is not anchored at the sampling policy.

    Source: this sandbox's ablation of TPO.
    Reduces to: TPO if the sampling policy gives all rollouts of a group equal probability.
    Axis: influence. Without the anchor, equal rewards pull probabilities toward equality.
    """
    return _compute_group_loss(rollouts, log_probs, config, anchored=False)


def tpo_full_action(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean Σ_a q_a log π(a),  q = sg softmax( log π + z / tpo_eta ), over all actions of a bandit.

    z standardizes (divisor n) the scores of the n actions: R − Σ_a π(a)² for the taken action, 0 for the others. So z
    is ±√(n − 1) for the taken action and ∓1/√(n − 1) for the others: only the sign of the advantage matters.

    Source: Kaddour 2026, arXiv:2604.06159, in this sandbox's form with one sample per prompt.
    Reduces to: zero gradient where R = Σ_a π(a)².
    Axis: influence. A target over all actions from one sample.
    """
    current_log_probs = log_probs.squeeze(2)  # [E, B, A]
    advantage = (rollouts.rewards.unsqueeze(-1) - sum_squared_probs(log_probs)).to(current_log_probs.dtype)  # [E, B, 1]
    scores = torch.zeros_like(current_log_probs.detach()).scatter(-1, rollouts.actions, advantage)
    skills = group_skills(scores.flatten(), make_row_ids(scores)).view_as(scores)
    target_fit = fit_target(
        current_log_probs.detach(), current_log_probs.detach(), skills, make_row_ids(current_log_probs), config.tpo_eta
    )
    loss = masked_mean(-(target_fit.log_target.exp() * current_log_probs).sum(-1), rollouts.keep_mask)
    metrics = {"tpo_target_entropy": target_fit.entropy, "tpo_sample_adv_mean": advantage}
    return make_rule_loss(rollouts, loss, **metrics)


def tpo_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over prefixes of −Σ_k q_k log p_k, where k runs over the K candidates for the next token.

        p = softmax(c),  c_k = log π(a_k)       q = sg softmax( log softmax(o) + z / tpo_eta ),  o_k = log μ(a_k)

    z are the candidates' rewards, standardized with divisor K. A token that was drawn twice is two candidates.

    Source: this sandbox: TPO at every prefix.
    Reduces to: zero gradient at π = μ for prefixes whose candidates have equal rewards.
    Axis: granularity. Each position has its own rewards and its own target.
    ValueError: the batch has no candidates.
    """
    candidates = get_candidates(rollouts)
    scores = log_probs.gather(-1, candidates.actions)
    ids = make_row_ids(scores)
    skills = group_skills(candidates.rewards.flatten(), ids).view_as(scores)
    target_fit = fit_target(scores, candidates.log_probs, skills, ids, config.tpo_eta)
    metrics = {"tpo_target_entropy": target_fit.entropy, **get_candidate_metrics(rollouts)}
    return make_rule_loss(rollouts, masked_mean(target_fit.loss, rollouts.keep_mask), **metrics)

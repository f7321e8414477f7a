"""Rules that know the correct token: credit for every token, the oracle, and two rules in between."""

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs
from sandboxes.toys.losses import group_advantages
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Candidates, Rollouts
from sandboxes.update_rules.rules.delight import compute_gate, dg
from sandboxes.update_rules.rules.grouped import clipped_surrogate
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    make_rule_loss,
    masked_mean,
    policy_gradient_loss,
    sum_squared_probs,
)


def get_score_mask(rollouts: Rollouts) -> Tensor:
    """Return the positions that count for the reward, [E, B, T] bool."""
    score_mask = rollouts.score_mask
    return torch.ones_like(rollouts.actions, dtype=torch.bool) if score_mask is None else score_mask


def find_correct_tokens(rollouts: Rollouts) -> Tensor:
    """Mark where the sampled token is correct, at positions that count, [E, B, T] bool."""
    return (rollouts.actions == rollouts.labels) & get_score_mask(rollouts)


def dg_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ),  g = σ(A · s / eta),  A_t = G_t − m_t Σ_a π(a)².

        G_t = Σ_{u>=t} m_u 1[a_u correct] / max(1, Σ_{u>=t} m_u)

    m_t is 1 where a position counts. At other positions the baseline is 0 but G_t is not: the sampled token is
    reinforced by the fraction of later tokens that are correct, whatever it is.

    Source: this sandbox.
    Reduces to: on bandits, DG with baseline `expected`; at the last position, SelfDistillDG's first term.
    Axis: granularity. A token is credited with the rewards from its position onwards.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    score_mask = get_score_mask(rollouts).to(action_log_probs.dtype)
    correct = find_correct_tokens(rollouts).to(action_log_probs.dtype)
    # After the last scored position both sums are 0, and so is the reward-to-go.
    reward_to_go = _reverse_cumsum(correct) / _reverse_cumsum(score_mask).clamp(min=1)
    advantage = reward_to_go - score_mask * sum_squared_probs(log_probs)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    return policy_gradient_loss(rollouts, action_log_probs, gates * advantage, gate_mean=gates, rtg_mean=reward_to_go)


def _reverse_cumsum(x: Tensor) -> Tensor:
    """Compute Σ_{u>=t} x_u [E, B, T]."""
    return x.flip(-1).cumsum(-1).flip(-1)


def get_candidates(rollouts: Rollouts) -> Candidates:
    """Return the batch's candidates; ValueError if it has none."""
    if rollouts.candidates is None:
        raise ValueError("This update rule compares candidates for each token, but this batch has none.")
    return rollouts.candidates


def make_row_ids(x: Tensor) -> Tensor:
    """Number the rows of `x` (slices along the last axis) for each of its N entries, in order: [N]."""
    return torch.arange(x.numel()) // x.shape[-1]


def get_candidate_metrics(rollouts: Rollouts) -> dict[str, Tensor]:
    """Return the rewards of all candidates, and of those in the sampled sequences."""
    rewards = get_candidates(rollouts).rewards
    return {"candidate_reward": rewards, "behavior_token_reward": rewards[..., 0]}


def grpo_token(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over prefixes of Σ_k [ −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ], over K candidates k.

        G = (R_k − mean) / (std + 1e-8) over the candidates (divisor K), r = π(a_k) / μ(a_k), kl as in GRPO

    Source: this sandbox: GRPO at every prefix.
    Reduces to: at r = 1 to −mean over prefixes of Σ_k log π(a_k) · sg(G_k).
    Axis: granularity. Each position has separate rewards, and GRPO's update.
    ValueError: the batch has no candidates.
    """
    candidates = get_candidates(rollouts)
    candidate_log_probs = log_probs.gather(-1, candidates.actions)
    advantages = group_advantages(candidates.rewards.flatten(), make_row_ids(candidate_log_probs), divide_by_std=True)
    advantages = advantages.view_as(candidate_log_probs).to(candidate_log_probs.dtype)
    clip_range = (config.clip_low, config.clip_low)
    losses, metrics = clipped_surrogate(
        candidate_log_probs, candidates.log_probs, advantages, clip_range, config.grpo_beta
    )
    loss = masked_mean(losses.sum(-1), rollouts.keep_mask)
    return make_rule_loss(rollouts, loss, **metrics, **get_candidate_metrics(rollouts))


def cross_entropy(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean log π(y_t) of the correct token y_t at every position; `log_probs` are conditioned on correct tokens.

    The rule reads neither rewards nor which positions count.

    Source: definition (maximum likelihood).
    Reduces to: nothing simpler; equal to REINFORCE with baseline 0 if every sampled token, and so every prefix, is
    correct.
    Axis: privileged acquisition, at its limit: the rollout is replaced by the correct one.
    """
    return make_rule_loss(rollouts, -masked_mean(select_log_probs(log_probs, rollouts.labels), rollouts.keep_mask))


def self_distill_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) + distill_alpha · mean( sg(g) · −log π(y_t) ),  g = σ(A · s / eta).

        A_t = 1[a_t correct] − Σ_a π(a)², and 0 at positions that do not count

    Log-probabilities are conditioned on the sampled tokens. The second term is over all positions, including those that
    do not count.

    Source: this sandbox; labels on prefixes sampled by the learner as in Ross et al. 2011, arXiv:1011.0686 (DAgger).
    Reduces to: on bandits at distill_alpha 0, DG with baseline `expected`.
    Axis: granularity and privileged acquisition. Every token is judged and corrected; sequence rewards are not used.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    correct = find_correct_tokens(rollouts).to(action_log_probs.dtype)
    advantage = correct - get_score_mask(rollouts) * sum_squared_probs(log_probs)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    policy_objective = masked_mean(action_log_probs * (gates * advantage), rollouts.keep_mask)
    distill_loss = masked_mean(-gates * select_log_probs(log_probs, rollouts.labels), rollouts.keep_mask)
    loss = config.distill_alpha * distill_loss - policy_objective
    return make_rule_loss(rollouts, loss, gate_mean=gates, distill_loss=distill_loss)


def scope_lite(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """DG + distill_alpha · (sum of −log π(y_t) over corrected positions) / max(1, corrected positions).

    Corrected positions are those from the first wrong token of a sequence onwards. Positions that do not count are
    neither wrong nor corrected.

    Source: this sandbox.
    Reduces to: DG at distill_alpha 0, or if no sequence has a wrong token.
    Axis: granularity and privileged acquisition. A failed sequence is corrected from its first error onwards.
    """
    dg_result = dg(rollouts, log_probs, config)
    score_mask = get_score_mask(rollouts)
    is_wrong = (rollouts.actions != rollouts.labels) & score_mask
    # The count of wrong tokens so far is above 0 from the first one onwards.
    correction_mask = (is_wrong.long().cumsum(-1) > 0) & score_mask & rollouts.keep_mask.unsqueeze(-1)
    surprisals = -select_log_probs(log_probs, rollouts.labels)
    total_surprisal = torch.where(correction_mask, surprisals, 0).sum((1, 2))
    correction_loss = total_surprisal / correction_mask.sum((1, 2)).clamp(min=1)
    metrics = {
        "gate_mean": dg_result.metrics["gate_mean"],
        "first_error_frac": correction_mask.to(surprisals.dtype),
        "correction_loss": correction_loss,
    }
    return make_rule_loss(rollouts, dg_result.loss + config.distill_alpha * correction_loss, **metrics)

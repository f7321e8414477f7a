"""Rules that train on the correct tokens: the oracle, with which others are compared, and two rules in between."""

import torch
from torch import Tensor

from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.delight import compute_gate, dg
from sandboxes.update_rules.rules.rule import RuleLoss, gather_log_probs, make_rule_loss, masked_mean, sum_squared_probs
from sandboxes.update_rules.rules.token_credit import find_correct_tokens, get_score_mask


def cross_entropy(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean log π(y_t) of the correct token y_t at every position; `log_probs` are those after correct tokens.

    The rule reads neither rewards nor which positions count.

    Source: definition (maximum likelihood).
    Reduces to: nothing simpler; equal to REINFORCE with baseline 0 if every sampled token, and so every prefix, is
    correct.
    Axis: privileged acquisition, at its limit: the rollout is replaced by the correct one.
    """
    return make_rule_loss(rollouts, -masked_mean(gather_log_probs(rollouts.labels, log_probs), rollouts.keep_mask))


def self_distill_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) + distill_alpha · mean( sg(g) · −log π(y_t) ),  g = σ(A · s / eta).

        A_t = 1[a_t correct] − Σ_a π(a)², and 0 at positions that do not count

    Log-probabilities are those after the sampled tokens. The second term is over all positions, including those that do
    not count.

    Source: this sandbox; labels on the learner's own prefixes as in Ross et al. 2011, arXiv:1011.0686 (DAgger).
    Reduces to: on bandits at distill_alpha 0, DG with baseline `expected`.
    Axis: granularity and privileged acquisition. Every token is judged and corrected; sequence rewards are not used.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    correct = find_correct_tokens(rollouts).to(action_log_probs.dtype)
    advantage = correct - get_score_mask(rollouts) * sum_squared_probs(log_probs)
    gates = compute_gate(advantage, action_log_probs, config.eta)
    policy_objective = masked_mean(action_log_probs * (gates * advantage), rollouts.keep_mask)
    distill_loss = masked_mean(-gates * gather_log_probs(rollouts.labels, log_probs), rollouts.keep_mask)
    metrics = {"gate_mean": masked_mean(gates, rollouts.keep_mask), "distill_loss": distill_loss}
    return make_rule_loss(rollouts, config.distill_alpha * distill_loss - policy_objective, **metrics)


def scope_lite(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """DG + distill_alpha · (sum of −log π(y_t) over corrected positions) / max(1, corrected positions).

    Corrected positions are those from the first wrong token of a sequence onwards. If not all positions count, only
    those that do can be wrong or corrected.

    Source: this sandbox.
    Reduces to: DG at distill_alpha 0, or if no sequence has a wrong token.
    Axis: granularity and privileged acquisition. A failed sequence is corrected from its first error onwards.
    """
    dg_result = dg(rollouts, log_probs, config)
    score_mask = get_score_mask(rollouts)
    is_wrong = (rollouts.actions != rollouts.labels) & score_mask
    # The count of wrong tokens so far is above 0 from the first one onwards.
    correction_mask = (is_wrong.long().cumsum(-1) > 0) & score_mask & rollouts.keep_mask.unsqueeze(-1)
    surprisals = -gather_log_probs(rollouts.labels, log_probs)
    total_surprisal = torch.where(correction_mask, surprisals, 0).sum((1, 2))
    correction_loss = total_surprisal / correction_mask.sum((1, 2)).clamp(min=1)
    corrected_fraction = masked_mean(correction_mask.to(surprisals.dtype), rollouts.keep_mask)
    metrics = {
        "gate_mean": dg_result.metrics["gate_mean"],
        "first_error_frac": corrected_fraction,
        "correction_loss": correction_loss,
    }
    return make_rule_loss(rollouts, dg_result.loss + config.distill_alpha * correction_loss, **metrics)

"""Rules that train on the right tokens themselves: the oracle that others are measured against, and two in between."""

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.delight import dg, gate
from trainable.sandbox.rules.rule import RuleLoss, kept_mean, log_probs_of, rule_loss, squared_mass
from trainable.sandbox.rules.token_credit import right_and_scored, scored


def cross_entropy(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean log π(y_t) of the right token y_t at every position; `log_probs` are those after right tokens.

    Rewards, and which positions count, play no part.

    Source: definition (maximum likelihood).
    Reduces to: nothing simpler; REINFORCE with baseline 0 where every sample is right and was sampled after right ones.
    Axis: privileged acquisition, at its limit: the rollout itself is replaced by the right one.
    """
    return rule_loss(rollouts, -kept_mean(log_probs_of(rollouts.labels, log_probs), rollouts.keep))


def self_distill_dg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(g · A) ) + distill_alpha · mean( sg(g) · −log π(y_t) ),  g = σ(A · s / eta).

        A_t = 1[a_t right] − Σ_a π(a)², and 0 at positions that do not count

    after the sampled tokens. The second term is over all positions, those that do not count included.

    Source: this sandbox; labels on the learner's own prefixes as in Ross et al. 2011, arXiv:1011.0686 (DAgger).
    Reduces to: on bandits at distill_alpha 0, DG with baseline `expected`.
    Axis: granularity and privileged acquisition. Every token is judged and corrected; sequence rewards are not read.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    right = right_and_scored(rollouts).to(taken.dtype)
    advantage = right - scored(rollouts) * squared_mass(log_probs)
    passed = gate(advantage, taken, config.eta)
    learned = kept_mean(taken * (passed * advantage), rollouts.keep)
    distilled = kept_mean(-passed * log_probs_of(rollouts.labels, log_probs), rollouts.keep)
    metrics = {"gate_mean": kept_mean(passed, rollouts.keep), "distill_loss": distilled}
    return rule_loss(rollouts, config.distill_alpha * distilled - learned, **metrics)


def scope_lite(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """DG + distill_alpha · (sum of −log π(y_t) over corrected positions) / max(1, corrected positions).

    Corrected are, of sequences with a wrong token, the positions from the first wrong one on; where not all positions
    count, only those that do are wrong or corrected.

    Source: this sandbox.
    Reduces to: DG at distill_alpha 0, or where no sequence has a wrong token.
    Axis: granularity and privileged acquisition. Failures are corrected from where they failed.
    """
    base = dg(rollouts, log_probs, config)
    counts = scored(rollouts)
    wrong = (rollouts.actions != rollouts.labels) & counts
    corrected = (wrong.long().cumsum(-1) > 0) & counts & rollouts.keep.unsqueeze(-1)
    surprisals = -log_probs_of(rollouts.labels, log_probs)
    total = torch.where(corrected, surprisals, 0).sum((1, 2))
    correction = total / corrected.sum((1, 2)).clamp(min=1)
    share = kept_mean(corrected.to(surprisals.dtype), rollouts.keep)
    metrics = {"gate_mean": base.metrics["gate_mean"], "first_error_frac": share, "correction_loss": correction}
    return rule_loss(rollouts, base.loss + config.distill_alpha * correction, **metrics)

"""REINFORCE and its relatives: one weight per sample, from its advantage and its importance ratio."""

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    capped_ratios,
    compute_advantages,
    log_ratios,
    make_rule_loss,
    masked_mean,
    masked_moments,
    policy_gradient_loss,
)


def reinforce(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A) ): the advantage is the weight; stale samples are not corrected.

    Source: Williams 1992, doi:10.1007/BF00992696; the baseline is this sandbox's.
    Reduces to: nothing simpler; PG, TrajPG, ASPO and R2VPO have its gradient at r = 1.
    Axis: influence. The weight is the advantage alone, regardless of how likely the sample was.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    return policy_gradient_loss(rollouts, action_log_probs, compute_advantages(rollouts, log_probs, config))


def pg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ), with the ratio of each token.

    Source: this sandbox; importance sampling truncated as in Ionides 2008, doi:10.1198/106186008X320456.
    Reduces to: REINFORCE at r = 1.
    Axis: support. The ratio says how representative a sample still is of the current policy.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    weight = capped_ratios(action_log_probs, rollouts, config.iw_cap)
    return policy_gradient_loss(
        rollouts, action_log_probs, weight * compute_advantages(rollouts, log_probs, config), iw_mean=weight
    )


def traj_pg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(exp(Σ_t x_t), iw_cap)) ): PG with one ratio per sequence.

    Source: this sandbox; the ratio of whole trajectories is the one of exact importance sampling.
    Reduces to: PG on bandits (T = 1); REINFORCE at r = 1.
    Axis: support, at the granularity of a sequence.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    # The sum can be large, so that exp overflows to infinity, which the cap makes finite again.
    sequence_log_ratio = (action_log_probs.detach() - rollouts.behavior_log_probs).sum(-1, keepdim=True)
    weight = sequence_log_ratio.exp().clamp(max=config.iw_cap).expand(action_log_probs.shape)
    return policy_gradient_loss(
        rollouts, action_log_probs, weight * compute_advantages(rollouts, log_probs, config), iw_mean=weight
    )


def aspo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(w · A) ) with the ratio of good samples inverted.

        w = min(1/r, 1 + clip_high) where A > 0,    w = max(r, 1 − clip_low) where A <= 0

    Good samples that have become less likely get a weight above 1, those that have become more likely a weight below 1.

    Source: ASPO, arXiv:2510.06062, scoped to this sandbox: no dual clip, and this sandbox's advantage.
    Reduces to: REINFORCE at r = 1, so on policy with one inner epoch.
    Axis: reward uncertainty and geometry. The sign of a sample's advantage decides how its weight is bounded.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    advantage = compute_advantages(rollouts, log_probs, config)
    is_positive = advantage > 0
    ratio = log_ratios(action_log_probs.detach(), rollouts).exp()
    flipped_ratio = torch.where(is_positive, 1 / ratio, ratio)
    weight = torch.where(
        is_positive, flipped_ratio.clamp(max=1 + config.clip_high), flipped_ratio.clamp(min=1 - config.clip_low)
    )
    sample_metrics = {
        "ratio_mean": flipped_ratio,
        "weight_mean": weight,
        "pos_frac": is_positive.to(action_log_probs.dtype),
    }
    return policy_gradient_loss(rollouts, action_log_probs, weight * advantage, **sample_metrics)


def r2vpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg( r (A − 2 λ (r − 1)) ) ), the gradient of r A − λ (r − 1)², with λ = eta.

    Source: Luo et al. 2026, arXiv:2601.03320, scoped to this sandbox: λ is fixed, not a dual variable.
    Reduces to: REINFORCE at r = 1, for every λ; PG without a cap at λ = 0.
    Axis: reward uncertainty and geometry. The variance of the ratio is penalized instead of clipped.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    ratio = log_ratios(action_log_probs.detach(), rollouts).exp()
    weight = ratio * (compute_advantages(rollouts, log_probs, config) - 2 * config.eta * (ratio - 1))
    penalty = config.eta * (ratio - 1).square()
    return policy_gradient_loss(rollouts, action_log_probs, weight, ratio_mean=ratio, var_penalty_mean=penalty)


def log_growth(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · w) ), w = 1/π(a) where the action is correct and 1 where it is wrong. Bandits only.

    A correct action of probability π is sampled with probability π and has the weight 1/π, so in expectation every
    prompt reinforces its correct action equally, like the cross-entropy.

    Source: this sandbox.
    Reduces to: REINFORCE if only wrong actions were sampled; in expectation, with baseline 0, to CE.
    Axis: influence. The weight grows with surprisal, without a bound, for correct actions only.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    weight = torch.where(rollouts.actions == rollouts.labels, (-action_log_probs.detach()).exp(), 1)
    return policy_gradient_loss(
        rollouts, action_log_probs, weight * compute_advantages(rollouts, log_probs, config), weight_mean=weight
    )


def pmd_mean(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over sequences of ( τ Σ_t x_t − sg(A) )², with τ = eta.

        A = R − E[R] where the sampling policy's mean reward is known, otherwise R − mean of the batch's rewards

    Policy mirror descent as a regression: at the optimum of its step the log-ratio is A/τ.

    Source: Kimi k1.5, arXiv:2501.12599, sec. 2.3.2; the analysis of PMD with the batch mean, arXiv:2602.05933.
    Reduces to: at r = 1 the gradient of a REINFORCE on sequences, −2 τ A Σ_t ∇l, with this A.
    Axis: geometry. The target log-ratio bounds the step.
    """
    sequence_log_ratio = (select_log_probs(log_probs, rollouts.actions) - rollouts.behavior_log_probs).sum(-1)
    if rollouts.expected_reward is not None:
        advantage = rollouts.rewards - rollouts.expected_reward
    else:
        advantage = masked_moments(rollouts.rewards, rollouts.keep_mask).deviations.to(sequence_log_ratio.dtype)
    loss = masked_mean((config.eta * sequence_log_ratio - advantage).square(), rollouts.keep_mask)
    return make_rule_loss(rollouts, loss, log_ratio_mean=sequence_log_ratio)

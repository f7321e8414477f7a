"""Rules that compare the rollouts of a prompt: each is weighted by how far its reward is from the group's mean."""

import math

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs
from sandboxes.toys.losses import STD_FLOOR, clipped_policy_loss, group_advantages
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.rules.rule import (
    RuleLoss,
    capped_ratios,
    group_moments,
    make_group_ids,
    make_rule_loss,
    masked_mean,
    policy_gradient_loss,
    unflatten_groups,
)
from trainable.algo.advantages import group_skill
from trainable.algo.losses import estimate_kl


def group_skills(scores: Tensor, ids: Tensor) -> Tensor:
    """Compute skills z [N] of scores [N] in groups `ids` [N]: (R − mean) / std, or R − mean where std <= 1e-6."""
    mask = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    return group_skill(scores, ids, mask, factor_dtype=torch.float64).squeeze(1)


def clipped_surrogate(
    action_log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
    beta: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss −min(r G, clip(r, 1 − low, 1 + high) G) + beta · kl(x) [E, B, ...], and the terms of metrics.

    action_log_probs, old_log_probs, advantages: [E, B, ...] l, μ and G. beta: coefficient of kl(x), which is k3 of
    `estimate_kl` without its limit; None: no KL term and no KL metric. Samples come from μ, so kl(x) has the
    expectation E_μ[μ/π] − 1 − KL(μ‖π), which equals KL(π‖μ) only to second order in x. Its mean is `reverse_kl_mean`.
    """
    policy_loss = clipped_policy_loss(action_log_probs, old_log_probs, advantages, *clip_range)
    metrics = {"ratio_mean": policy_loss.ratio, "adv_abs_mean": advantages.abs()}
    if beta is None:
        return policy_loss.loss, metrics
    kl = estimate_kl(action_log_probs, old_log_probs, "k3", limit=math.inf)
    return policy_loss.loss + beta * kl, {**metrics, "reverse_kl_mean": kl}


def _compute_surrogate(
    rollouts: Rollouts, log_probs: Tensor, divide_by_std: bool, clip_range: tuple[float, float], beta: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `clipped_surrogate` of every token [E, B, T], with the group-relative advantage of its rollout."""
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    advantages = group_advantages(rollouts.rewards.flatten(), make_group_ids(rollouts), divide_by_std)
    advantages = advantages.view_as(rollouts.rewards).to(action_log_probs.dtype)
    advantages = advantages.unsqueeze(-1).expand(action_log_probs.shape)
    return clipped_surrogate(action_log_probs, rollouts.behavior_log_probs, advantages, clip_range, beta)


def grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ),  G = (R − mean) / (std + 1e-8).

        kl(x) = exp(−x) + x − 1, which draws the current policy to the sampling policy (not to a frozen reference)

    mean and std (divisor K) are the group's; a group of equal rewards has G = 0. Without std_normalization,
    G = R − mean.

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3, scoped to this sandbox: its KL is to the sampling policy.
    Reduces to: at r = 1 (the first inner epoch) to −mean( l · sg(G) ), where clip and KL have no effect.
    Axis: influence. The weight of a rollout is its standardized reward within its group.
    """
    clip_range = (config.clip_low, config.clip_low)
    losses, metrics = _compute_surrogate(rollouts, log_probs, config.std_normalization, clip_range, config.grpo_beta)
    return make_rule_loss(rollouts, masked_mean(losses, rollouts.keep_mask), **metrics)


def dr_grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over sequences of Σ_t [ −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ],  G = R − mean.

    Source: Liu et al. 2025, arXiv:2503.20783.
    Reduces to: T times GRPO without std_normalization; at r = 1 to −mean over sequences of Σ_t l · sg(G).
    Axis: geometry. No division, neither by the standard deviation of a group nor by the length of a sequence.
    """
    clip_range = (config.clip_low, config.clip_low)
    losses, metrics = _compute_surrogate(rollouts, log_probs, False, clip_range, config.grpo_beta)
    return make_rule_loss(rollouts, masked_mean(losses.sum(-1), rollouts.keep_mask), **metrics)


def dapo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 − clip_low, 1 + clip_high) G) ),  G as in GRPO; no KL. DAPOLite is the same rule.

    Source: Yu et al. 2025, arXiv:2503.14476: its two clip bounds and token mean. The sampler drops groups of equal
    rewards but does not draw new ones.
    Reduces to: GRPO at grpo_beta 0 and clip_high = clip_low; at r = 1 to −mean( l · sg(G) ).
    Axis: geometry. The wider clip range leaves more room upwards for unlikely actions; the normalization is GRPO's.
    """
    clip_range = (config.clip_low, config.clip_high)
    losses, metrics = _compute_surrogate(rollouts, log_probs, config.std_normalization, clip_range, None)
    return make_rule_loss(rollouts, masked_mean(losses, rollouts.keep_mask), **metrics)


def group_pg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over groups of −Σ_i (z_i / tpo_eta) c_i,  c_i = Σ_t l_i,t,  z = (R − mean) / std.

    Source: this sandbox: TPO's skills as plain weights, without its target.
    Reduces to: REINFORCE with the advantage z, times K T / tpo_eta, if all groups are kept.
    Axis: influence. The weight is the standardized reward, and no target bounds the update.
    """
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    skills = group_skills(rollouts.rewards.flatten(), make_group_ids(rollouts))
    skills = skills.view_as(rollouts.rewards).to(action_log_probs.dtype)
    # Groups, not rollouts, are averaged: the sum over the kept rollouts of each group, then the mean over kept groups.
    products = unflatten_groups(skills / config.tpo_eta * action_log_probs.sum(-1), rollouts)
    group_mask = unflatten_groups(rollouts.keep_mask, rollouts)
    loss = -masked_mean(torch.where(group_mask, products, 0).sum(-1), group_mask.any(-1))
    return make_rule_loss(rollouts, loss, tpo_skill_abs_mean=skills.abs())


def max_rl(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A = (R − mean) / (mean + 1e-8) in each group; rewards 0 or 1.

    If m of K rollouts are correct, a correct one has the weight K/m − 1: prompts that are rarely solved count most.

    Source: Tajwar et al. 2026, arXiv:2602.02710; the ratios, truncated at iw_cap, are an addition of this sandbox.
    Reduces to: at r = 1 to group-baseline PG divided by the group's success rate; 0 if no rollout is correct.
    Axis: influence. The gradient raises log success rates instead of success rates.
    ValueError: no groups.
    """
    moments = group_moments(rollouts)
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    advantage = (moments.deviations / (moments.mean + STD_FLOOR)).flatten(1).to(action_log_probs.dtype).unsqueeze(-1)
    weight = capped_ratios(action_log_probs, rollouts, config.iw_cap)
    return policy_gradient_loss(rollouts, action_log_probs, weight * advantage, iw_mean=weight)


def tempo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A_i,t = (R_i − mean + V_i,t+1 − V_i,t) / std.

    A group is a tree of prefixes: V_i,t is the mean reward of its rollouts that share the first t tokens of rollout i,
    so V_i,0 is the group's mean. Groups with a standard deviation below 1e-8 have A = 0.

    Source: Tran et al. 2025, arXiv:2509.18314, scoped to this sandbox: every token is a node of the tree.
    Reduces to: GRPO's gradient at r = 1, at tokens where V does not change because they decide nothing.
    Axis: granularity. The tree shows which token decided the reward.
    """
    moments = group_moments(rollouts)
    action_log_probs = select_log_probs(log_probs, rollouts.actions)
    values = _compute_prefix_values(rollouts)
    value_changes = values[..., 1:] - values[..., :-1]
    credit = (moments.deviations.unsqueeze(-1) + value_changes) / moments.std.clamp(min=STD_FLOOR).unsqueeze(-1)
    advantage = torch.where(moments.std.unsqueeze(-1) < STD_FLOOR, 0, credit).flatten(1, 2).to(action_log_probs.dtype)
    ratio = capped_ratios(action_log_probs, rollouts, config.iw_cap)
    td_nonzero = (value_changes.abs() > STD_FLOOR).flatten(1, 2).to(action_log_probs.dtype)
    return policy_gradient_loss(
        rollouts, action_log_probs, ratio * advantage, ratio_mean=ratio, td_nonzero_frac=td_nonzero
    )


def _compute_prefix_values(rollouts: Rollouts) -> Tensor:
    """Compute V [E, P, K, T + 1] in float64: mean reward of kept rollouts with the same first t tokens, t = 0 ... T."""
    actions, keep_mask = unflatten_groups(rollouts.actions, rollouts), unflatten_groups(rollouts.keep_mask, rollouts)
    # Entry (i, j, t) is 1 while rollouts i and j agree up to token t: a product stays 0 after the first difference.
    same_prefix = (actions.unsqueeze(3) == actions.unsqueeze(2)).long().cumprod(-1)  # [E, P, K, K, T]
    # All rollouts share the empty prefix, t = 0.
    prefix_mask = torch.nn.functional.pad(same_prefix, (1, 0), value=1).double() * keep_mask[:, :, None, :, None]
    rewards = torch.where(keep_mask, unflatten_groups(rollouts.rewards, rollouts).double(), 0)
    return (prefix_mask * rewards[:, :, None, :, None]).sum(3) / prefix_mask.sum(3).clamp(min=1)

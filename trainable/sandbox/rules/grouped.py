"""Rules that compare the rollouts of a prompt and weight each by how far its reward is from the group's mean."""

import math

import torch
from torch import Tensor

from trainable.algo.advantages import group_skill
from trainable.algo.advantages import grpo as group_relative
from trainable.algo.losses import estimate_kl, ppo_clip_loss
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.rule import (
    RuleLoss,
    capped_ratios,
    gather_log_probs,
    group_moments,
    make_group_ids,
    make_rule_loss,
    masked_mean,
    policy_gradient_loss,
    unflatten_groups,
)

STD_FLOOR = 1e-8
NO_DUAL_CLIP = 1e9
"""Above e^20, the largest ratio, so that the dual clip of `ppo_clip` never binds."""


def group_advantages(scores: Tensor, ids: Tensor, divide_by_std: bool) -> Tensor:
    """[N] G of scores [N], whose groups have numbers `ids` [N]: (R − mean) / (std + 1e-8), or R − mean.

    divide: by the std, of divisor K; a group whose std is at most 1e-8 then has G = 0.
    """
    mask = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    advantages = group_relative(scores, ids, mask, divide_by_std, correction=0, std_floor=STD_FLOOR, min_std=STD_FLOOR)
    return advantages.squeeze(1)


def group_skills(scores: Tensor, ids: Tensor) -> Tensor:
    """[N] z of scores [N], whose groups have numbers `ids` [N]: (R − mean) / std, and R − mean where std <= 1e-6."""
    mask = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    return group_skill(scores, ids, mask, factor_dtype=torch.float64).squeeze(1)


def clipped_surrogate(
    action_log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    keep_mask: Tensor,
    clip_range: tuple[float, float],
    beta: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """−min(r G, clip(r, 1 − clip[0], 1 + clip[1]) G) + beta · kl(x), with the metrics [E] of what it is made of.

    Args:
        taken: [E, B, ...] l; old: μ and group: G, of the same shape.
        keep: [E, B].
        clip: low and high.
        beta: coefficient of kl(x), k3 of `kl_estimate` without its limit; None: no such term, and no metric of it.
    """
    policy_loss = ppo_clip_loss(action_log_probs, old_log_probs, advantages, *clip_range, NO_DUAL_CLIP)
    metrics = {
        "ratio_mean": masked_mean(policy_loss.ratio, keep_mask),
        "adv_abs_mean": masked_mean(advantages.abs(), keep_mask),
    }
    if beta is None:
        return policy_loss.loss, metrics
    kl = estimate_kl(action_log_probs, old_log_probs, "k3", limit=math.inf)
    return policy_loss.loss + beta * kl, {**metrics, "reverse_kl_mean": masked_mean(kl, keep_mask)}


def _broadcast_group_advantages(rollouts: Rollouts, divide_by_std: bool, like: Tensor) -> Tensor:
    """[E, B, T] G, one number per rollout, for `like` of that shape: its reward in its group, normalised or centred."""
    advantages = group_advantages(rollouts.rewards.flatten(), make_group_ids(rollouts), divide_by_std)
    return advantages.view_as(rollouts.rewards).to(like.dtype).unsqueeze(-1).expand(like.shape)


def grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ),  G = (R − mean) / (std + 1e-8).

        kl(x) = exp(−x) + x − 1, of the policy that learns from the one that sampled (not from a frozen reference)

    std is the group's (divisor K); a group of equal rewards has G = 0. Without std_normalization G = R − mean.

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3, scoped to this sandbox: its KL is to the sampling policy.
    Reduces to: at r = 1 (the first inner epoch) to −mean( l · sg(G) ), where clip and KL have no effect.
    Axis: influence. Which rollouts of a prompt count, and how much, is their standardised reward.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantages = _broadcast_group_advantages(rollouts, config.std_normalization, action_log_probs)
    clip_range = (config.clip_low, config.clip_low)
    keep_mask = rollouts.keep_mask
    losses, metrics = clipped_surrogate(
        action_log_probs, rollouts.behavior_log_probs, advantages, keep_mask, clip_range, config.grpo_beta
    )
    return make_rule_loss(rollouts, masked_mean(losses, keep_mask), **metrics)


def dr_grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over sequences of Σ_t [ −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ],  G = R − mean.

    Source: Liu et al. 2025, arXiv:2503.20783.
    Reduces to: T times GRPO without std_normalization; at r = 1 to −mean over sequences of Σ_t l · sg(G).
    Axis: geometry. Nothing divides: neither the deviation of a group nor the length of a sequence.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantages = _broadcast_group_advantages(rollouts, divide_by_std=False, like=action_log_probs)
    clip_range = (config.clip_low, config.clip_low)
    keep_mask = rollouts.keep_mask
    losses, metrics = clipped_surrogate(
        action_log_probs, rollouts.behavior_log_probs, advantages, keep_mask, clip_range, config.grpo_beta
    )
    return make_rule_loss(rollouts, masked_mean(losses.sum(-1), keep_mask), **metrics)


def dapo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 − clip_low, 1 + clip_high) G) ),  G as in GRPO; no KL. DAPOLite is the same rule.

    Source: Yu et al. 2025, arXiv:2503.14476: its two clip bounds and token mean; groups without a spread are left
    out by the sampler, not drawn again.
    Reduces to: GRPO at grpo_beta 0 and clip_high = clip_low; at r = 1 to −mean( l · sg(G) ).
    Axis: geometry. More level upwards for what was unlikely; the normalisation is GRPO's.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantages = _broadcast_group_advantages(rollouts, config.std_normalization, action_log_probs)
    clip_range = (config.clip_low, config.clip_high)
    keep_mask = rollouts.keep_mask
    losses, metrics = clipped_surrogate(
        action_log_probs, rollouts.behavior_log_probs, advantages, keep_mask, clip_range, beta=None
    )
    return make_rule_loss(rollouts, masked_mean(losses, keep_mask), **metrics)


def group_pg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over groups of −Σ_i (z_i / tpo_eta) c_i,  c_i = Σ_t l_i,t,  z = (R − mean) / std.

    Source: this sandbox: TPO's skills as plain weights, without its target.
    Reduces to: REINFORCE with the advantage z, times K T / tpo_eta, where all groups are kept.
    Axis: influence. The standardised reward is the weight, and nothing ends the push.
    """
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    skills = (
        group_skills(rollouts.rewards.flatten(), make_group_ids(rollouts))
        .view_as(rollouts.rewards)
        .to(action_log_probs.dtype)
    )
    products = unflatten_groups(skills / config.tpo_eta * action_log_probs.sum(-1), rollouts)
    group_mask = unflatten_groups(rollouts.keep_mask, rollouts)
    loss = -masked_mean(torch.where(group_mask, products, 0).sum(-1), group_mask.any(-1))
    return make_rule_loss(rollouts, loss, tpo_skill_abs_mean=masked_mean(skills.abs(), rollouts.keep_mask))


def max_rl(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A = (R − mean) / (mean + 1e-8) in each group; rewards 0 or 1.

    With m right rollouts of K, a right one has the weight K/m − 1: prompts that are rarely solved count most.

    Source: Tajwar et al. 2026, arXiv:2602.02710; the ratios, truncated at iw_cap, are this sandbox's.
    Reduces to: at r = 1 to group-baseline PG divided by the group's success rate; 0 where no rollout is right.
    Axis: influence. The gradient is that of log success rates rather than of success rates.
    ValueError: no groups, or a kept reward is neither 0 nor 1.
    """
    moments = group_moments(rollouts)
    if not torch.isin(rollouts.rewards[rollouts.keep_mask], rollouts.rewards.new_tensor([0.0, 1.0])).all():
        raise ValueError("MaxRL needs rewards of 0 and 1; others are in this batch. Set binary_reward=true.")
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
    advantage = (moments.deviations / (moments.mean + STD_FLOOR)).flatten(1).to(action_log_probs.dtype).unsqueeze(-1)
    weight = capped_ratios(action_log_probs, rollouts, config.iw_cap)
    return policy_gradient_loss(rollouts, action_log_probs, weight * advantage, iw_mean=weight)


def tempo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A_i,t = (R_i − mean + V_i,t+1 − V_i,t) / std.

    V_i,t is the mean reward of the rollouts of the group that share the first t tokens of rollout i, so V_i,0 is the
    group's mean and a group is read as a tree. Groups with a deviation below 1e-8 have A = 0.

    Source: Tran et al. 2025, arXiv:2509.18314, scoped to this sandbox: every token is a node of the tree.
    Reduces to: where V does not change, at tokens that decide nothing, GRPO's gradient at r = 1.
    Axis: granularity. The tree of a group tells at which token it was decided.
    """
    moments = group_moments(rollouts)
    action_log_probs = gather_log_probs(rollouts.actions, log_probs)
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
    """[E, P, K, T + 1] float64 V: mean reward of the kept rollouts with the same first t tokens, for t = 0 ... T."""
    actions, keep_mask = unflatten_groups(rollouts.actions, rollouts), unflatten_groups(rollouts.keep_mask, rollouts)
    same_prefix = (actions.unsqueeze(3) == actions.unsqueeze(2)).long().cumprod(-1)  # [E, P, K, K, T]
    prefix_mask = torch.nn.functional.pad(same_prefix, (1, 0), value=1).double() * keep_mask[:, :, None, :, None]
    rewards = torch.where(keep_mask, unflatten_groups(rollouts.rewards, rollouts).double(), 0)
    return (prefix_mask * rewards[:, :, None, :, None]).sum(3) / prefix_mask.sum(3).clamp(min=1)

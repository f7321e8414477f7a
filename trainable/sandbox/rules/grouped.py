"""Rules that compare the rollouts of a prompt and weight each by how far its reward is from the group's mean."""

import math

import torch
from torch import Tensor

from trainable.algo.advantages import group_skill
from trainable.algo.advantages import grpo as group_relative
from trainable.algo.losses import kl_estimate, ppo_clip
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.rule import (
    RuleLoss,
    by_group,
    capped_ratios,
    group_ids,
    group_spread,
    kept_mean,
    log_probs_of,
    policy_gradient_loss,
    rule_loss,
)

STD_FLOOR = 1e-8
NO_DUAL_CLIP = 1e9
"""Above e^20, the largest ratio, so that the dual clip of `ppo_clip` never binds."""


def advantages_in_group(scores: Tensor, ids: Tensor, divide: bool) -> Tensor:
    """[N] G of scores [N], whose groups have numbers `ids` [N]: (R − mean) / (std + 1e-8), or R − mean.

    divide: by the std, of divisor K; a group whose std is at most 1e-8 then has G = 0.
    """
    whole = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    group = group_relative(scores, ids, whole, divide, correction=0, floor=STD_FLOOR, least_std=STD_FLOOR)
    return group.squeeze(1)


def skills_in_group(scores: Tensor, ids: Tensor) -> Tensor:
    """[N] z of scores [N], whose groups have numbers `ids` [N]: (R − mean) / std, and R − mean where std <= 1e-6."""
    whole = torch.ones_like(scores, dtype=torch.bool).unsqueeze(1)
    return group_skill(scores, ids, whole, precision=torch.float64).squeeze(1)


def clipped_surrogate(
    taken: Tensor, old: Tensor, group: Tensor, keep: Tensor, clip: tuple[float, float], beta: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """−min(r G, clip(r, 1 − clip[0], 1 + clip[1]) G) + beta · kl(x), with the metrics [E] of what it is made of.

    Args:
        taken: [E, B, ...] l; old: μ and group: G, of the same shape.
        keep: [E, B].
        clip: low and high.
        beta: coefficient of kl(x), k3 of `kl_estimate` without its limit; None: no such term, and no metric of it.
    """
    clipped = ppo_clip(taken, old, group, *clip, NO_DUAL_CLIP)
    metrics = {"ratio_mean": kept_mean(clipped.ratio, keep), "adv_abs_mean": kept_mean(group.abs(), keep)}
    if beta is None:
        return clipped.loss, metrics
    kl = kl_estimate(taken, old, "k3", limit=math.inf)
    return clipped.loss + beta * kl, {**metrics, "reverse_kl_mean": kept_mean(kl, keep)}


def _group_advantages(rollouts: Rollouts, divide: bool, like: Tensor) -> Tensor:
    """[E, B, T] G, one number per rollout, for `like` of that shape: its reward in its group, normalised or centred."""
    group = advantages_in_group(rollouts.rewards.flatten(), group_ids(rollouts), divide)
    return group.view_as(rollouts.rewards).to(like.dtype).unsqueeze(-1).expand(like.shape)


def grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ),  G = (R − mean) / (std + 1e-8).

        kl(x) = exp(−x) + x − 1, of the policy that learns from the one that sampled (not from a frozen reference)

    std is the group's (divisor K); a group of equal rewards has G = 0. Without std_normalization G = R − mean.

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3, scoped to this sandbox: its KL is to the sampling policy.
    Reduces to: at r = 1 (the first inner epoch) to −mean( l · sg(G) ), where clip and KL have no effect.
    Axis: influence. Which rollouts of a prompt count, and how much, is their standardised reward.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    group = _group_advantages(rollouts, config.std_normalization, taken)
    clip = (config.clip_low, config.clip_low)
    keep = rollouts.keep
    losses, metrics = clipped_surrogate(taken, rollouts.actor_log_probs, group, keep, clip, config.grpo_beta)
    return rule_loss(rollouts, kept_mean(losses, keep), **metrics)


def dr_grpo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over sequences of Σ_t [ −min(r G, clip(r, 1 ± clip_low) G) + grpo_beta · kl(x) ],  G = R − mean.

    Source: Liu et al. 2025, arXiv:2503.20783.
    Reduces to: T times GRPO without std_normalization; at r = 1 to −mean over sequences of Σ_t l · sg(G).
    Axis: geometry. Nothing divides: neither the deviation of a group nor the length of a sequence.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    group = _group_advantages(rollouts, divide=False, like=taken)
    clip = (config.clip_low, config.clip_low)
    keep = rollouts.keep
    losses, metrics = clipped_surrogate(taken, rollouts.actor_log_probs, group, keep, clip, config.grpo_beta)
    return rule_loss(rollouts, kept_mean(losses.sum(-1), keep), **metrics)


def dapo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean( −min(r G, clip(r, 1 − clip_low, 1 + clip_high) G) ),  G as in GRPO; no KL. DAPOLite is the same rule.

    Source: Yu et al. 2025, arXiv:2503.14476: its two clip bounds and token mean; groups without a spread are left
    out by the sampler, not drawn again.
    Reduces to: GRPO at grpo_beta 0 and clip_high = clip_low; at r = 1 to −mean( l · sg(G) ).
    Axis: geometry. More level upwards for what was unlikely; the normalisation is GRPO's.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    group = _group_advantages(rollouts, config.std_normalization, taken)
    clip = (config.clip_low, config.clip_high)
    keep = rollouts.keep
    losses, metrics = clipped_surrogate(taken, rollouts.actor_log_probs, group, keep, clip, beta=None)
    return rule_loss(rollouts, kept_mean(losses, keep), **metrics)


def group_pg(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """mean over groups of −Σ_i (z_i / tpo_eta) c_i,  c_i = Σ_t l_i,t,  z = (R − mean) / std.

    Source: this sandbox: TPO's skills as plain weights, without its target.
    Reduces to: REINFORCE with the advantage z, times K T / tpo_eta, where all groups are kept.
    Axis: influence. The standardised reward is the weight, and nothing ends the push.
    """
    taken = log_probs_of(rollouts.actions, log_probs)
    skills = skills_in_group(rollouts.rewards.flatten(), group_ids(rollouts)).view_as(rollouts.rewards).to(taken.dtype)
    products = by_group(skills / config.tpo_eta * taken.sum(-1), rollouts)
    used = by_group(rollouts.keep, rollouts)
    loss = -kept_mean(torch.where(used, products, 0).sum(-1), used.any(-1))
    return rule_loss(rollouts, loss, tpo_skill_abs_mean=kept_mean(skills.abs(), rollouts.keep))


def max_rl(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A = (R − mean) / (mean + 1e-8) in each group; rewards 0 or 1.

    With m right rollouts of K, a right one has the weight K/m − 1: prompts that are rarely solved count most.

    Source: Tajwar et al. 2026, arXiv:2602.02710; the ratios, truncated at iw_cap, are this sandbox's.
    Reduces to: at r = 1 to group-baseline PG divided by the group's success rate; 0 where no rollout is right.
    Axis: influence. The gradient is that of log success rates rather than of success rates.
    ValueError: no groups, or a kept reward is neither 0 nor 1.
    """
    found = group_spread(rollouts)
    if not torch.isin(rollouts.rewards[rollouts.keep], rollouts.rewards.new_tensor([0.0, 1.0])).all():
        raise ValueError("MaxRL needs rewards of 0 and 1; others are in this batch. Set binary_reward=true.")
    taken = log_probs_of(rollouts.actions, log_probs)
    advantage = (found.centred / (found.mean + STD_FLOOR)).flatten(1).to(taken.dtype).unsqueeze(-1)
    weight = capped_ratios(taken, rollouts, config.iw_cap)
    return policy_gradient_loss(rollouts, taken, weight * advantage, iw_mean=weight)


def tempo(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
    """−mean( l · sg(A · min(r, iw_cap)) ),  A_i,t = (R_i − mean + V_i,t+1 − V_i,t) / std.

    V_i,t is the mean reward of the rollouts of the group that share the first t tokens of rollout i, so V_i,0 is the
    group's mean and a group is read as a tree. Groups with a deviation below 1e-8 have A = 0.

    Source: Tran et al. 2025, arXiv:2509.18314, scoped to this sandbox: every token is a node of the tree.
    Reduces to: where V does not change, at tokens that decide nothing, GRPO's gradient at r = 1.
    Axis: granularity. The tree of a group tells at which token it was decided.
    """
    found = group_spread(rollouts)
    taken = log_probs_of(rollouts.actions, log_probs)
    values = _prefix_values(rollouts)
    changes = values[..., 1:] - values[..., :-1]
    credit = (found.centred.unsqueeze(-1) + changes) / found.std.clamp(min=STD_FLOOR).unsqueeze(-1)
    advantage = torch.where(found.std.unsqueeze(-1) < STD_FLOOR, 0, credit).flatten(1, 2).to(taken.dtype)
    ratio = capped_ratios(taken, rollouts, config.iw_cap)
    moved = (changes.abs() > STD_FLOOR).flatten(1, 2).to(taken.dtype)
    return policy_gradient_loss(rollouts, taken, ratio * advantage, ratio_mean=ratio, td_nonzero_frac=moved)


def _prefix_values(rollouts: Rollouts) -> Tensor:
    """[E, P, K, T + 1] float64 V: mean reward of the kept rollouts with the same first t tokens, for t = 0 ... T."""
    actions, keep = by_group(rollouts.actions, rollouts), by_group(rollouts.keep, rollouts)
    same = (actions.unsqueeze(3) == actions.unsqueeze(2)).long().cumprod(-1)  # [E, P, K, K, T]
    shares = torch.nn.functional.pad(same, (1, 0), value=1).double() * keep[:, :, None, :, None]
    rewards = torch.where(keep, by_group(rollouts.rewards, rollouts).double(), 0)
    return (shares * rewards[:, :, None, :, None]).sum(3) / shares.sum(3).clamp(min=1)

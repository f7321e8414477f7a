"""Building blocks of update rules: their result type, and the quantities in their formulas.

Axes: E members, B rollouts, T positions, A actions, P groups, K rollouts of a group. In the formulas of all rules, l is
the log-probability of the taken action under the current policy π, μ its log-probability under the sampling policy
(also called μ), s = −l the surprisal, x = l − μ, r = exp(x), R the reward of a rollout, sg(.) a stop-gradient, σ the
logistic function, and `mean` is over the kept rollouts of a member and their positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from trainable.algo import reductions
from trainable.algo.losses import LOG_RATIO_LIMIT

CONSTANT_BASELINE = 0.5  # for baseline=constant


@dataclass(frozen=True)
class RuleLoss:
    """loss: [E], with gradients. metrics: [E] each, without gradients; columns of `RULE_COLUMNS`."""

    loss: Tensor
    metrics: dict[str, Tensor]


UpdateRule = Callable[[Rollouts, Tensor, UpdateRuleConfig], RuleLoss]
"""rule(rollouts, log_probs [E, B, T, A], config) returns the loss of one inner epoch.

Raises ValueError if the batch does not fit.
"""


def masked_mean(x: Tensor, keep_mask: Tensor) -> Tensor:
    """Compute the mean [E] of `x` [E, B] or [E, B, ...] over the rollouts in `keep_mask` [E, B]; 0 for an empty mask.

    Entries of `x` outside the mask are not read and may be NaN.
    """
    rows = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    return reductions.masked_mean(rows, keep_mask.unsqueeze(-1).expand_as(rows), (1, 2))


def make_rule_loss(rollouts: Rollouts, loss: Tensor, **metrics: Tensor) -> RuleLoss:
    """Make a rule's result: `loss` [E], metrics, and the mean reward, which every rule reports.

    metrics: values [E], or values [E, B, ...] whose means over the kept rollouts are the metrics.
    """
    all_metrics = {"reward": rollouts.rewards, **metrics}
    means = {
        name: value if value.dim() == 1 else masked_mean(value, rollouts.keep_mask)
        for name, value in all_metrics.items()
    }
    return RuleLoss(loss, {name: value.detach() for name, value in means.items()})


def policy_gradient_loss(rollouts: Rollouts, action_log_probs: Tensor, weights: Tensor, **metrics: Tensor) -> RuleLoss:
    """Compute −mean( l · sg(w) ): the loss of every rule that only weights its samples; l and w are [E, B, T]."""
    loss = -masked_mean(action_log_probs * weights.detach(), rollouts.keep_mask)
    return make_rule_loss(rollouts, loss, **metrics)


def log_ratios(action_log_probs: Tensor, rollouts: Rollouts) -> Tensor:
    """Compute x = l − μ [E, B, T], clamped to ±20 nats, beyond which a ratio is not informative."""
    return (action_log_probs - rollouts.behavior_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def capped_ratios(action_log_probs: Tensor, rollouts: Rollouts, cap: float) -> Tensor:
    """Compute min(r, cap) [E, B, T], without gradient."""
    return (action_log_probs.detach() - rollouts.behavior_log_probs).exp().clamp(max=cap)


def sum_squared_probs(log_probs: Tensor) -> Tensor:
    """Compute Σ_a π(a)² [E, B, T], without gradient: the mean reward of a calibrated policy."""
    return log_probs.detach().exp().square().sum(-1)


def compute_advantages(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> Tensor:
    """Compute A = R − b [E, B, T], without gradient; R is the rollout's reward at each of its positions.

    b is the exact mean reward of the sampling policy if the batch has it; otherwise, by `config.baseline`, Σ_a π(a)² of
    the current policy, 0, or 0.5.
    """
    rewards = rollouts.rewards.unsqueeze(-1).expand(rollouts.actions.shape)
    if rollouts.expected_reward is not None:
        return rewards - rollouts.expected_reward.unsqueeze(-1)
    if config.baseline == "expected":
        return rewards - sum_squared_probs(log_probs)
    return rewards - (CONSTANT_BASELINE if config.baseline == "constant" else 0.0)


def compute_behavior_advantages(rollouts: Rollouts) -> Tensor:
    """Compute R − b [E, B, T] of the sampling policy: b is its mean reward if known, otherwise its Σ_a π(a)²."""
    expected_reward = rollouts.expected_reward
    return rollouts.rewards.unsqueeze(-1) - (
        rollouts.behavior_baseline if expected_reward is None else expected_reward.unsqueeze(-1)
    )


class MaskedMoments(NamedTuple):
    """Moments of kept values along the last axis, in float64.

    deviations: [..., n] value minus mean, and 0 outside the mask. mean, std (divisor N): [..., 1].
    """

    deviations: Tensor
    mean: Tensor
    std: Tensor


def masked_moments(values: Tensor, keep_mask: Tensor) -> MaskedMoments:
    """Compute the moments of the values [..., n] inside `keep_mask`.

    In float32, rounding could make the mean of equal rewards differ from them, which a division by the standard
    deviation would amplify; hence float64.
    """
    count = keep_mask.sum(-1, keepdim=True).clamp(min=1)
    exact_values = torch.where(keep_mask, values.double(), 0)
    mean = exact_values.sum(-1, keepdim=True) / count
    deviations = torch.where(keep_mask, exact_values - mean, 0)
    return MaskedMoments(deviations, mean, (deviations.square().sum(-1, keepdim=True) / count).sqrt())


def unflatten_groups(x: Tensor, rollouts: Rollouts) -> Tensor:
    """Split `x` [E, B, ...] into groups, [E, P, K, ...]; ValueError if the batch has no groups."""
    if rollouts.group_size is None:
        raise ValueError("This update rule compares the rollouts of a prompt, but this batch has no groups.")
    return x.unflatten(1, (-1, rollouts.group_size))


def make_group_ids(rollouts: Rollouts) -> Tensor:
    """Make numbers [E · B] that are equal for the kept rollouts of a group; any other rollout is a separate group.

    With these, functions of `trainable.algo` that work by group handle all members at once, and use kept rollouts only.
    ValueError if the batch has no groups.
    """
    keep_mask = unflatten_groups(rollouts.keep_mask, rollouts)
    indices = torch.arange(keep_mask.numel()).unflatten(0, keep_mask.shape)
    # A kept rollout has the index of its group's first rollout. The offset separates all other numbers from these.
    return torch.where(keep_mask, indices[..., :1], keep_mask.numel() + indices).flatten()


def group_moments(rollouts: Rollouts) -> MaskedMoments:
    """Compute `masked_moments` of the kept rewards of each group: [E, P, K], [E, P, 1], [E, P, 1]."""
    return masked_moments(unflatten_groups(rollouts.rewards, rollouts), unflatten_groups(rollouts.keep_mask, rollouts))


def compute_reward_std(rollouts: Rollouts) -> Tensor:
    """Compute u [E, B], the standard deviation (divisor N) of rewards in each group, or in the batch without groups.

    Across prompts, it measures not only how reliable rewards are, but also how much the prompts differ in difficulty.
    """
    if rollouts.group_size is None:
        std = masked_moments(rollouts.rewards, rollouts.keep_mask).std
        return std.to(rollouts.rewards.dtype).expand(rollouts.rewards.shape)
    moments = group_moments(rollouts)
    return moments.std.expand(moments.deviations.shape).flatten(1).to(rollouts.rewards.dtype)

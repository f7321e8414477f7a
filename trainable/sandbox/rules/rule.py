"""What all update rules share: their result, and the quantities that their formulas are made of.

Axes: E members, B rollouts, T positions, A actions, P groups, K rollouts of a group. In the formulas of all rules l is
the log-probability of the taken action under the policy π that learns, μ the one under the policy that sampled (named μ
too), s = −l the surprisal, x = l − μ, r = exp(x), R the reward of a rollout, sg(.) a constant without gradient, σ the
logistic function, and `mean` runs over the kept rollouts of a member and their positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo.losses import LOG_RATIO_LIMIT
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig

CONSTANT_BASELINE = 0.5


@dataclass(frozen=True)
class RuleLoss:
    """loss: [E], with gradients. metrics: [E] each, without, named as in `RULE_COLUMNS` of the sandbox's records."""

    loss: Tensor
    metrics: dict[str, Tensor]


UpdateRule = Callable[[Rollouts, Tensor, UpdateRuleConfig], RuleLoss]
"""rule(rollouts, log_probs [E, B, T, A], config): the loss of one inner epoch. ValueError: the batch does not fit."""


def kept_mean(x: Tensor, keep: Tensor) -> Tensor:
    """[E] mean of `x` [E, B] or [E, B, ...] over what `keep` [E, B] keeps; 0 where it keeps nothing.

    What `x` holds elsewhere, NaN included, is not read.
    """
    rows = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    kept = torch.where(keep.unsqueeze(-1), rows, 0)
    return kept.sum((1, 2)) / (keep.sum(1) * rows.shape[2]).clamp(min=1)


def rule_loss(rollouts: Rollouts, loss: Tensor, **metrics: Tensor) -> RuleLoss:
    """`loss` [E] with its `metrics` [E] and the mean reward, which every rule reports."""
    found = {"reward": kept_mean(rollouts.rewards, rollouts.keep), **metrics}
    return RuleLoss(loss, {name: value.detach() for name, value in found.items()})


def policy_gradient_loss(rollouts: Rollouts, taken: Tensor, weights: Tensor, **samples: Tensor) -> RuleLoss:
    """−mean( l · sg(w) ): the loss of every rule that only weights what was sampled.

    taken: [E, B, T] l. weights: w, of the same shape. samples: numbers [E, B] or [E, B, T] whose means are metrics.
    """
    loss = -kept_mean(taken * weights.detach(), rollouts.keep)
    return rule_loss(rollouts, loss, **{name: kept_mean(value, rollouts.keep) for name, value in samples.items()})


def log_probs_of(actions: Tensor, log_probs: Tensor) -> Tensor:
    """[E, B, T] log-probabilities, of `log_probs` [E, B, T, A], of one action [E, B, T] at each position."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def log_ratios(taken: Tensor, rollouts: Rollouts) -> Tensor:
    """[E, B, T] x = l − μ, clamped to ±20 nats, beyond which a ratio says nothing."""
    return (taken - rollouts.actor_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def capped_ratios(taken: Tensor, rollouts: Rollouts, cap: float) -> Tensor:
    """[E, B, T] min(r, cap), a constant."""
    return (taken.detach() - rollouts.actor_log_probs).exp().clamp(max=cap)


def squared_mass(log_probs: Tensor) -> Tensor:
    """[E, B, T] Σ_a π(a)², a constant: the mean reward of a policy that is right as often as it is sure."""
    return log_probs.detach().exp().square().sum(-1)


def advantages(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> Tensor:
    """[E, B, T] A = R − b, a constant; R is the rollout's reward at each of its positions.

    b is the exact mean reward of the sampling policy where the batch has it; otherwise, by `config.baseline`, Σ_a π(a)²
    of the policy that learns, 0, or 0.5.
    """
    rewards = rollouts.rewards.unsqueeze(-1).expand(rollouts.actions.shape)
    if rollouts.expected_reward is not None:
        return rewards - rollouts.expected_reward.unsqueeze(-1)
    if config.baseline == "expected":
        return rewards - squared_mass(log_probs)
    return rewards - (CONSTANT_BASELINE if config.baseline == "constant" else 0.0)


def actor_advantages(rollouts: Rollouts) -> Tensor:
    """[E, B, T] R − b of the policy that sampled: b is its mean reward where that is known, or its Σ_a π(a)²."""
    known = rollouts.expected_reward
    return rollouts.rewards.unsqueeze(-1) - (rollouts.actor_baseline if known is None else known.unsqueeze(-1))


class Spread(NamedTuple):
    """Of kept values along the last axis, in float64: values minus mean [..., n], mean and std (divisor N) [..., 1]."""

    centred: Tensor
    mean: Tensor
    std: Tensor


def spread(values: Tensor, keep: Tensor) -> Spread:
    """Mean, and distance from it, of the values [..., n] that `keep` keeps; values that it does not are 0 in `centred`.

    In float32 the mean of equal rewards can miss them by a rounding, which a division by the deviation would blow up.
    """
    count = keep.sum(-1, keepdim=True).clamp(min=1)
    exact = torch.where(keep, values.double(), 0)
    mean = exact.sum(-1, keepdim=True) / count
    centred = torch.where(keep, exact - mean, 0)
    return Spread(centred, mean, (centred.square().sum(-1, keepdim=True) / count).sqrt())


def by_group(x: Tensor, rollouts: Rollouts) -> Tensor:
    """[E, P, K, ...] of `x` [E, B, ...]; ValueError where rollouts are not in groups."""
    if rollouts.group_size is None:
        raise ValueError("This update rule compares the rollouts of a prompt; this batch has no groups.")
    return x.unflatten(1, (-1, rollouts.group_size))


def group_ids(rollouts: Rollouts) -> Tensor:
    """[E · B] numbers, equal for the kept rollouts of a group; one that is not kept is a group by itself.

    So what `trainable.algo` computes by group is computed for all members at once, and reads kept rollouts only.
    ValueError where rollouts are not in groups.
    """
    keep = by_group(rollouts.keep, rollouts)
    places = torch.arange(keep.numel()).unflatten(0, keep.shape)
    return torch.where(keep, places[..., :1], keep.numel() + places).flatten()


def group_spread(rollouts: Rollouts) -> Spread:
    """`spread` of the kept rewards of each group: [E, P, K], [E, P, 1], [E, P, 1]."""
    return spread(by_group(rollouts.rewards, rollouts), by_group(rollouts.keep, rollouts))


def uncertainty(rollouts: Rollouts) -> Tensor:
    """[E, B] u, the standard deviation (divisor N) of rewards inside a group; ungrouped: one number, of the batch.

    A deviation over different prompts measures how hard they are as well as how far rewards can be trusted.
    """
    if rollouts.group_size is None:
        std = spread(rollouts.rewards, rollouts.keep).std
        return std.to(rollouts.rewards.dtype).expand(rollouts.rewards.shape)
    found = group_spread(rollouts)
    return found.std.expand(found.centred.shape).flatten(1).to(rollouts.rewards.dtype)

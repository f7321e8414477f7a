"""What an update did to the policy, of each member alone: ratios, entropies, directions of gradients."""

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.rules.rule import actor_advantages


def ratio_statistics(log_probs: Tensor, rollouts: Rollouts, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Mean, standard deviation (divisor N) and maximum of pi(a) / pi_actor(a) over trained tokens; share outside.

    log_probs: [E, B, T, A]. Trained tokens are those of kept rollouts, or all candidates there. Outside:
    [1 - clip_low, 1 + clip_high]. Named as RATIO_COLUMNS of trainable.sandbox.measure.records, [E] each.
    """
    candidates = rollouts.candidates
    actions = rollouts.actions.unsqueeze(-1) if candidates is None else candidates.actions
    actor = rollouts.actor_log_probs.unsqueeze(-1) if candidates is None else candidates.log_probs
    ratios = torch.exp(log_probs.detach().gather(-1, actions) - actor).flatten(1)
    kept = _kept(rollouts.keep, actions)
    mean = _mean(ratios, kept)
    return {
        "importance_ratio_mean": mean,
        "importance_ratio_std": _mean((ratios - mean.unsqueeze(1)).square(), kept).sqrt(),
        "importance_ratio_max": ratios.masked_fill(~kept, -torch.inf).amax(1),
        "clip_frac": _mean(((ratios < 1 - clip_low) | (ratios > 1 + clip_high)).float(), kept),
    }


def entropy_statistics(before: Tensor, after: Tensor, rollouts: Rollouts) -> dict[str, Tensor]:
    """What an update did to the entropy at the tokens of a batch.

    before, after: raw logits [E, B, T, A] at the batch's positions before and after the update. The advantage is reward
    minus the actor's expected reward or baseline, whatever the rule's own is; surprisal and probability are of the
    policy before the update. Thirds end at the quantiles 1/3 and 2/3 of a member's kept tokens, which belong to the
    lower one. Named as DIAGNOSTIC_COLUMNS of trainable.sandbox.measure.records, [E] each; NaN where no token is of the
    kind.
    """
    log_probs, actions = before.log_softmax(-1), rollouts.actions.unsqueeze(-1)
    first, second = entropies(log_probs).flatten(1), entropies(after.log_softmax(-1)).flatten(1)
    taken = log_probs.gather(-1, actions).flatten(1)
    moved = (after - before).gather(-1, actions).flatten(1)
    advantages = actor_advantages(rollouts).flatten(1)
    kept, drop = _kept(rollouts.keep, actions), first - second
    return {
        "batch_entropy_before": _mean(first, kept),
        "batch_entropy_after": _mean(second, kept),
        "batch_delta_entropy": _mean(-drop, kept),
        "cov_prob_delta_logit": _covariance(taken.exp(), moved, kept),
        "entropy_drop_pos_adv": _mean(drop, kept & (advantages > 0)),
        "entropy_drop_neg_adv": _mean(drop, kept & (advantages < 0)),
        **_by_thirds("surprisal", -taken, drop, kept),
        **_by_thirds("delight", advantages * -taken, drop, kept),
    }


def entropies(log_probs: Tensor) -> Tensor:
    """Entropy of each distribution, in nats. log_probs: [..., A]; a probability of 0 adds nothing."""
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


def correlation(x: Tensor, y: Tensor, kept: Tensor) -> Tensor:
    """[E], Pearson's, over the entries of each row where `kept`; all [E, N]. NaN where one of them does not vary."""
    spread = _covariance(x, x, kept) * _covariance(y, y, kept)
    return _covariance(x, y, kept) / spread.sqrt()


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """[E], cosine of the rows of two matrices [E, P]; NaN where one is zero."""
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


def _by_thirds(name: str, values: Tensor, drop: Tensor, kept: Tensor) -> dict[str, Tensor]:
    present = values.masked_fill(~kept, torch.nan)
    low, high = torch.nanquantile(present, torch.tensor([1 / 3, 2 / 3], dtype=values.dtype), dim=1).unsqueeze(-1)
    thirds = {"low": values <= low, "mid": (values > low) & (values <= high), "high": values > high}
    return {f"entropy_drop_{name}_{third}": _mean(drop, kept & inside) for third, inside in thirds.items()}


def _kept(keep: Tensor, like: Tensor) -> Tensor:
    """[E, N], whether each of a batch's entries is of a kept rollout. keep: [E, B]. like: [E, B, ...] of N entries."""
    return keep.reshape(*keep.shape, *[1] * (like.dim() - 2)).expand_as(like).flatten(1)


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    """[E], mean of [E, N] where `kept`; NaN where nothing is."""
    return torch.where(kept, values, 0.0).sum(1) / kept.sum(1)


def _covariance(x: Tensor, y: Tensor, kept: Tensor) -> Tensor:
    """[E], population covariance of [E, N] where `kept`."""
    return _mean((x - _mean(x, kept).unsqueeze(1)) * (y - _mean(y, kept).unsqueeze(1)), kept)

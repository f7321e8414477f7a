"""Effect of an update on each member's policy: importance ratios, entropies, directions of gradients."""

import torch
from torch import Tensor

from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.rules.rule import compute_behavior_advantages


def compute_ratio_statistics(
    log_probs: Tensor, rollouts: Rollouts, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Mean, standard deviation (divisor N), maximum and clipped fraction of pi(a) / pi_actor(a) over trained tokens.

    log_probs: [E, B, T, A]. Trained tokens are those of kept rollouts, or all candidates at their positions. A ratio
    counts as clipped outside [1 - clip_low, 1 + clip_high]. Returns RATIO_COLUMNS of update_rules.measure.records,
    [E] each.
    """
    candidates = rollouts.candidates
    actions = rollouts.actions.unsqueeze(-1) if candidates is None else candidates.actions
    behavior_log_probs = rollouts.behavior_log_probs.unsqueeze(-1) if candidates is None else candidates.log_probs
    ratios = torch.exp(log_probs.detach().gather(-1, actions) - behavior_log_probs).flatten(1)
    token_mask = _expand_keep_mask(rollouts.keep_mask, actions)
    mean = _masked_mean(ratios, token_mask)
    return {
        "importance_ratio_mean": mean,
        "importance_ratio_std": _masked_mean((ratios - mean.unsqueeze(1)).square(), token_mask).sqrt(),
        "importance_ratio_max": ratios.masked_fill(~token_mask, -torch.inf).amax(1),
        "clip_frac": _masked_mean(((ratios < 1 - clip_low) | (ratios > 1 + clip_high)).float(), token_mask),
    }


def compute_entropy_statistics(logits_before: Tensor, logits_after: Tensor, rollouts: Rollouts) -> dict[str, Tensor]:
    """Effect of an update on the entropy at the tokens of a batch.

    The advantage is the reward minus the sampling policy's expected reward or baseline, regardless of the rule's own
    baseline. Surprisal and probability are those of the policy before the update. Thirds end at the quantiles 1/3 and
    2/3 of a member's kept tokens; a quantile itself belongs to the lower third.

    Args:
        logits_before, logits_after: [E, B, T, A] at the batch's positions, before and after the update.
        rollouts: the batch.

    Returns:
        DIAGNOSTIC_COLUMNS of sandboxes.update_rules.measure.records, [E] each; NaN for a mean over no tokens.
    """
    log_probs, actions = logits_before.log_softmax(-1), rollouts.actions.unsqueeze(-1)
    entropy_before, entropy_after = entropies(log_probs).flatten(1), entropies(logits_after.log_softmax(-1)).flatten(1)
    action_log_probs = log_probs.gather(-1, actions).flatten(1)
    logit_changes = (logits_after - logits_before).gather(-1, actions).flatten(1)
    advantages = compute_behavior_advantages(rollouts).flatten(1)
    token_mask, entropy_drop = _expand_keep_mask(rollouts.keep_mask, actions), entropy_before - entropy_after
    return {
        "batch_entropy_before": _masked_mean(entropy_before, token_mask),
        "batch_entropy_after": _masked_mean(entropy_after, token_mask),
        "batch_delta_entropy": _masked_mean(-entropy_drop, token_mask),
        "cov_prob_delta_logit": _masked_covariance(action_log_probs.exp(), logit_changes, token_mask),
        "entropy_drop_pos_adv": _masked_mean(entropy_drop, token_mask & (advantages > 0)),
        "entropy_drop_neg_adv": _masked_mean(entropy_drop, token_mask & (advantages < 0)),
        **_mean_by_thirds("surprisal", -action_log_probs, entropy_drop, token_mask),
        **_mean_by_thirds("delight", advantages * -action_log_probs, entropy_drop, token_mask),
    }


def entropies(log_probs: Tensor) -> Tensor:
    """Entropy of each distribution, in nats. log_probs: [..., A]; a probability of 0 contributes 0."""
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


def correlation(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """[E], Pearson correlation of each row over the entries where `mask`; all [E, N]. NaN if x or y is constant."""
    # A constant row has a variance of 0, and 0 / 0 is NaN: the row of the run then omits the column.
    variance_product = _masked_covariance(x, x, mask) * _masked_covariance(y, y, mask)
    return _masked_covariance(x, y, mask) / variance_product.sqrt()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """[E], cosine between the rows of two matrices [E, P]; NaN where a row is zero."""
    return (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))


def _mean_by_thirds(name: str, values: Tensor, entropy_drop: Tensor, token_mask: Tensor) -> dict[str, Tensor]:
    # nanquantile ignores the tokens that are not kept.
    masked_values = values.masked_fill(~token_mask, torch.nan)
    low, high = torch.nanquantile(masked_values, torch.tensor([1 / 3, 2 / 3], dtype=values.dtype), dim=1).unsqueeze(-1)
    third_masks = {"low": values <= low, "mid": (values > low) & (values <= high), "high": values > high}
    return {
        f"entropy_drop_{name}_{third}": _masked_mean(entropy_drop, token_mask & inside)
        for third, inside in third_masks.items()
    }


def _expand_keep_mask(keep_mask: Tensor, like: Tensor) -> Tensor:
    """[E, N], whether each entry is of a kept rollout. keep_mask: [E, B]. like: [E, B, ...], N entries per member."""
    return keep_mask.reshape(*keep_mask.shape, *[1] * (like.dim() - 2)).expand_as(like).flatten(1)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[E], mean of values [E, N] where `mask`; NaN for an empty mask."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1)


def _masked_covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """[E], population covariance of x and y [E, N] where `mask`."""
    return _masked_mean((x - _masked_mean(x, mask).unsqueeze(1)) * (y - _masked_mean(y, mask).unsqueeze(1)), mask)

"""Effect of an update on each member's policy: ratios, entropies, gradients, and how samples influence the oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sandboxes.toys.decoding import select_log_probs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import ModelEnsemble, Rollouts, Task
from sandboxes.update_rules.rules.rule import compute_advantages, compute_behavior_advantages


def compute_ratio_statistics(
    log_probs: Tensor, rollouts: Rollouts, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Compute mean, std (divisor N), maximum and clipped fraction of pi(a) / pi_actor(a) over trained tokens.

    log_probs: [E, B, T, A]. Trained tokens are the tokens of kept rollouts, or all candidates at their positions. A
    ratio counts as clipped outside [1 - clip_low, 1 + clip_high]. Returns columns, [E] each.
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
    """Measure the effect of an update on the entropy at the tokens of a batch.

    The advantage is the reward minus the sampling policy's expected reward or baseline, whatever baseline the rule
    uses. Surprisal and probability are from the policy before the update. Thirds end at the quantiles 1/3 and 2/3 of a
    member's kept tokens; a quantile itself belongs to the lower third. Logits are [E, B, T, A]. Returns columns, [E]
    each; NaN for a mean over no tokens.
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
    """Compute the entropy of each distribution, in nats. log_probs: [..., A]; a probability of 0 contributes 0."""
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


def correlation(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Compute the Pearson correlation [E] of each row inside `mask`; all [E, N]. NaN if x or y is constant."""
    # A constant row has variance 0, and 0 / 0 is NaN: the run's row then omits the column.
    variance_product = _masked_covariance(x, x, mask) * _masked_covariance(y, y, mask)
    return _masked_covariance(x, y, mask) / variance_product.sqrt()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Compute the cosine [E] between the rows of two matrices [E, P]; NaN where a row is zero."""
    return (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))


def _mean_by_thirds(name: str, values: Tensor, entropy_drop: Tensor, token_mask: Tensor) -> dict[str, Tensor]:
    # nanquantile ignores tokens outside the mask.
    masked_values = values.masked_fill(~token_mask, torch.nan)
    low, high = torch.nanquantile(masked_values, torch.tensor([1 / 3, 2 / 3], dtype=values.dtype), dim=1).unsqueeze(-1)
    third_masks = {"low": values <= low, "mid": (values > low) & (values <= high), "high": values > high}
    return {
        f"entropy_drop_{name}_{third}": _masked_mean(entropy_drop, token_mask & inside)
        for third, inside in third_masks.items()
    }


def _expand_keep_mask(keep_mask: Tensor, like: Tensor) -> Tensor:
    """Mark the entries of kept rollouts, [E, N]. keep_mask: [E, B]. like: [E, B, ...] with N entries per member."""
    return keep_mask.reshape(*keep_mask.shape, *[1] * (like.dim() - 2)).expand_as(like).flatten(1)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean [E] of values [E, N] inside `mask`; NaN for an empty mask."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1)


def _masked_covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Compute the population covariance [E] of x and y [E, N] inside `mask`."""
    return _masked_mean((x - _masked_mean(x, mask).unsqueeze(1)) * (y - _masked_mean(y, mask).unsqueeze(1)), mask)


def compute_fit_statistics(
    task: Task, models: ModelEnsemble, rollouts: Rollouts, oracle_gradients: Sequence[Tensor], config: UpdateRuleConfig
) -> dict[str, Tensor]:
    """Correlate [E] each taken token's influence on the oracle's loss with the quantities by which rules weight it.

    The influence is the inner product of the gradients of the token's log-probability and of the oracle's
    cross-entropy: negative if raising the log-probability lowers the oracle's loss. So a correlation is below 0 if the
    quantity is large for tokens that help the oracle. Over the tokens of kept rollouts, under the current policy.
    """
    # Only the math implementation of attention can be differentiated twice.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        log_probs = task.compute_logits(models, rollouts).log_softmax(-1)
        action_log_probs = select_log_probs(log_probs, rollouts.actions)
        projection = _compute_projections(action_log_probs, list(models.weights.values()), oracle_gradients)
    surprisal = -action_log_probs.detach()
    advantage = compute_advantages(rollouts, log_probs, config)
    delight = advantage * surprisal
    # Rules without a gate may have eta 0. The sigmoid of delight / eta then tends to a step at a delight of 0.
    gate = torch.sigmoid(delight / config.eta) if config.eta else (delight > 0).to(delight.dtype)
    quantities = {"delight": delight, "advantage": advantage, "surprisal": surprisal, "gate": gate}
    token_mask = _expand_keep_mask(rollouts.keep_mask, projection)
    return {
        f"oracle_fit_{name}_correlation": correlation(projection.flatten(1), values.flatten(1), token_mask)
        for name, values in quantities.items()
    }


def _compute_projections(
    action_log_probs: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]
) -> Tensor:
    """Compute the inner product [E, B, T] of each taken token's gradient with `directions`, for all tokens at once.

    The inner product of the gradient of sum_t v_t l_t with the direction is linear in v. Its gradient with respect to
    v_t is the projection of token t, so two backward passes suffice for all tokens.
    """
    # The product is linear in v, so its gradient is the same at every v, and zeros will do.
    weights = torch.zeros_like(action_log_probs, requires_grad=True)
    gradients = torch.autograd.grad(
        (weights * action_log_probs).sum(), parameters, create_graph=True, materialize_grads=True
    )
    product = torch.stack(
        [(gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True)]
    ).sum()
    (projection,) = torch.autograd.grad(product, weights)
    return projection

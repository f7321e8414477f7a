"""Compare the weight that a rule gives a sample with the sample's influence on the oracle's loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.measure.diagnostics import correlation
from sandboxes.update_rules.rules.rule import compute_advantages, gather_log_probs
from sandboxes.update_rules.tasks.task import ModelEnsemble, Task


class SampleInfluence(NamedTuple):
    """Quantities of each taken token of a batch, [E, N] each; N samples in the order of the batch.

    Attributes:
        projection: inner product of the gradients of the token's log-probability and of the oracle's cross-entropy. It
            is negative if raising the log-probability lowers the oracle's loss.
        advantage: reward minus baseline, for every rule.
        surprisal: under the current policy.
        delight: advantage times surprisal.
        gate: sigmoid(delight / eta).
        keep_mask: whether the token's rollout is trained on.
    """

    projection: Tensor
    advantage: Tensor
    surprisal: Tensor
    delight: Tensor
    gate: Tensor
    keep_mask: Tensor


def compute_sample_influence(
    task: Task, models: ModelEnsemble, rollouts: Rollouts, oracle_gradients: Sequence[Tensor], config: UpdateRuleConfig
) -> SampleInfluence:
    """Influence of every taken token of `rollouts` on the oracle's loss, and the quantities that rules weight it with.

    oracle_gradients: gradients of the oracle's loss, in the order of the models' parameters, [E, ...] each.
    """
    # Only the math implementation of attention can be differentiated twice.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        log_probs = task.compute_log_probs(models, rollouts)
        action_log_probs = gather_log_probs(rollouts.actions, log_probs)
        projection = _compute_projections(action_log_probs, list(models.get_parameters().values()), oracle_gradients)
    surprisal = -action_log_probs.detach()
    advantage = compute_advantages(rollouts, log_probs, config)
    delight = advantage * surprisal
    # Rules without a gate may have eta 0. The sigmoid of delight / eta then tends to a step at a delight of 0.
    gate = torch.sigmoid(delight / config.eta) if config.eta else (delight > 0).to(delight.dtype)
    keep_mask = rollouts.keep_mask.unsqueeze(-1).expand_as(action_log_probs)
    quantities = (projection, advantage, surprisal, delight, gate, keep_mask)
    return SampleInfluence(*(quantity.flatten(1) for quantity in quantities))


def compute_fit_statistics(samples: SampleInfluence) -> dict[str, Tensor]:
    """Pearson correlation over a member's samples between the projection and each quantity; [E] each.

    The correlation is negative if the quantity is large for samples that help the oracle, and NaN if the quantity is
    constant.
    """
    quantities = {name: getattr(samples, name) for name in ("delight", "advantage", "surprisal", "gate")}
    return {
        f"oracle_fit_{name}_correlation": correlation(samples.projection, values, samples.keep_mask)
        for name, values in quantities.items()
    }


def _compute_projections(
    action_log_probs: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]
) -> Tensor:
    """[E, B, T], the inner product of each taken token's gradient with `directions`, for all tokens at once.

    The inner product of the gradient of sum_t v_t l_t with the direction is linear in v. Its gradient with respect to
    v_t is the projection of token t, so two backward passes suffice for all tokens.
    """
    # The product is linear in v, so its gradient with respect to v is the same at every v, and zeros are as good as
    # any.
    weights = torch.zeros_like(action_log_probs, requires_grad=True)
    gradients = torch.autograd.grad(
        (weights * action_log_probs).sum(), parameters, create_graph=True, materialize_grads=True
    )
    product = torch.stack(
        [(gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True)]
    ).sum()
    (projection,) = torch.autograd.grad(product, weights)
    return projection

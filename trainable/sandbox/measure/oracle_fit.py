"""Does a rule's weight of a sample say how far training on it would help? Influence of samples against the oracle."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.diagnostics import correlation
from trainable.sandbox.rules.rule import compute_advantages, gather_log_probs
from trainable.sandbox.tasks.task import ModelEnsemble, Task


class SampleInfluence(NamedTuple):
    """Of each taken token of a batch, [E, N] each; N samples in the order of the batch.

    projection: product of the gradient of its log-probability with that of the oracle's cross-entropy, a loss: a token
    whose log-probability should rise for the oracle's sake has a negative one. advantage: reward minus baseline,
    whatever the rule is. surprisal: of the policy that learns. delight: advantage times surprisal. gate: sigmoid of
    delight / eta. kept: whether the token's rollout is trained on.
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
    """What every taken token of `rollouts` would do to the oracle's loss, beside what rules weight it with.

    oracle_gradients: of the oracle's loss, in the order of the models' parameters, [E, ...] each.
    """
    # Only the plain form of attention can be differentiated twice.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        log_probs = task.compute_log_probs(models, rollouts)
        action_log_probs = gather_log_probs(rollouts.actions, log_probs)
        projection = _compute_projections(action_log_probs, list(models.get_parameters().values()), oracle_gradients)
    surprisal = -action_log_probs.detach()
    advantage = compute_advantages(rollouts, log_probs, config)
    delight = advantage * surprisal
    gate = torch.sigmoid(delight / config.eta) if config.eta else (delight > 0).to(delight.dtype)
    keep_mask = rollouts.keep_mask.unsqueeze(-1).expand_as(action_log_probs)
    quantities = (projection, advantage, surprisal, delight, gate, keep_mask)
    return SampleInfluence(*(part.flatten(1) for part in quantities))


def compute_fit_statistics(samples: SampleInfluence) -> dict[str, Tensor]:
    """Pearson correlation, over a member's samples, of the projection with each quantity; [E] each.

    A quantity that picks what helps has a negative one. NaN where it is the same for all samples.
    """
    quantities = {name: getattr(samples, name) for name in ("delight", "advantage", "surprisal", "gate")}
    return {
        f"oracle_fit_{name}_correlation": correlation(samples.projection, values, samples.keep_mask)
        for name, values in quantities.items()
    }


def _compute_projections(
    action_log_probs: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]
) -> Tensor:
    """[E, B, T], the product of each taken token's gradient with `directions`, all tokens at once.

    The gradient of sum(v l) times the direction is linear in v: its own gradient by v is what is wanted.
    """
    weights = torch.zeros_like(action_log_probs, requires_grad=True)
    gradients = torch.autograd.grad(
        (weights * action_log_probs).sum(), parameters, create_graph=True, materialize_grads=True
    )
    product = torch.stack([(one * other).sum() for one, other in zip(gradients, directions, strict=True)]).sum()
    (projection,) = torch.autograd.grad(product, weights)
    return projection

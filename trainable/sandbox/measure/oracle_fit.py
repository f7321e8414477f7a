"""Does a rule's weight of a sample say how far training on it would help? Influence of samples against the oracle."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.diagnostics import correlation
from trainable.sandbox.rules.rule import advantages, log_probs_of
from trainable.sandbox.tasks.task import Models, Task


class Samples(NamedTuple):
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
    kept: Tensor


def sample_influence(
    task: Task, models: Models, rollouts: Rollouts, oracle_gradients: Sequence[Tensor], config: UpdateRuleConfig
) -> Samples:
    """What every taken token of `rollouts` would do to the oracle's loss, beside what rules weight it with.

    oracle_gradients: of the oracle's loss, in the order of the models' parameters, [E, ...] each.
    """
    # Only the plain form of attention can be differentiated twice.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        log_probs = task.log_probs(models, rollouts)
        taken = log_probs_of(rollouts.actions, log_probs)
        projection = _projections(taken, list(models.parameters_by_name().values()), oracle_gradients)
    surprisal = -taken.detach()
    advantage = advantages(rollouts, log_probs, config)
    delight = advantage * surprisal
    gate = torch.sigmoid(delight / config.eta) if config.eta else (delight > 0).to(delight.dtype)
    kept = rollouts.keep.unsqueeze(-1).expand_as(taken)
    parts = (projection, advantage, surprisal, delight, gate, kept)
    return Samples(*(part.flatten(1) for part in parts))


def fit_statistics(samples: Samples) -> dict[str, Tensor]:
    """Pearson correlation, over a member's samples, of the projection with each quantity; [E] each.

    A quantity that picks what helps has a negative one. NaN where it is the same for all samples.
    """
    quantities = {name: getattr(samples, name) for name in ("delight", "advantage", "surprisal", "gate")}
    return {
        f"oracle_fit_{name}_correlation": correlation(samples.projection, values, samples.kept)
        for name, values in quantities.items()
    }


def _projections(taken: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """[E, B, T], the product of each taken token's gradient with `directions`, all tokens at once.

    The gradient of sum(v l) times the direction is linear in v: its own gradient by v is what is wanted.
    """
    weights = torch.zeros_like(taken, requires_grad=True)
    gradients = torch.autograd.grad((weights * taken).sum(), parameters, create_graph=True, materialize_grads=True)
    product = torch.stack([(one * other).sum() for one, other in zip(gradients, directions, strict=True)]).sum()
    (projection,) = torch.autograd.grad(product, weights)
    return projection

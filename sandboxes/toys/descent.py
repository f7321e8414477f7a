"""One optimizer step of an ensemble, and the names of what was not finite in it."""

from collections.abc import Sequence

from torch import Tensor

from sandboxes.toys.optimizer import MemberAdam, clip_gradient
from trainable.runs.nonfinite import find_nonfinite_gradients, find_nonfinite_losses

MAX_GRAD_NORM = 1.0
"""Each member's gradient is clipped to this norm."""


def descend(optimizer: MemberAdam, loss: Tensor) -> list[list[str]]:
    """Take one step against the gradient of each member's loss [E], clipped to `MAX_GRAD_NORM`.

    Returns for each member the names of what was not finite: its loss, gradients or weights. A member that is not
    finite is updated too. Members have separate rows of weights, so it cannot spoil the others.
    """
    gradient = optimizer.compute_gradient(loss)
    norm = gradient.norm(dim=1)
    optimizer.step(clip_gradient(gradient, norm, MAX_GRAD_NORM))
    is_finite = loss.detach().isfinite() & norm.isfinite() & optimizer.weights.isfinite().all(dim=1)
    return [
        [] if member_is_finite else _find_nonfinite(optimizer, member, loss, gradient, norm)
        for member, member_is_finite in enumerate(is_finite.tolist())
    ]


def merge_names(names: Sequence[list[str]], later_names: Sequence[list[str]]) -> list[list[str]]:
    """For each member what was not finite first: of `names` of earlier steps, or else of a later one."""
    return [first or later for first, later in zip(names, later_names, strict=True)]


def _find_nonfinite(optimizer: MemberAdam, member: int, loss: Tensor, gradient: Tensor, norm: Tensor) -> list[str]:
    """The names of what is not finite for a member. loss: [E]. gradient: [E, P]. norm: [E], norms of `gradient`."""
    gradients = [
        (name, chunk[member])
        for name, chunk in zip(optimizer.parameters, optimizer.split_by_parameter(gradient), strict=True)
    ]
    causes = [
        *find_nonfinite_losses([("loss", loss[member].detach())]),
        *find_nonfinite_gradients(gradients, norm[member]),
    ]
    # Weights are named only if the step itself broke them. Otherwise they follow from the loss or the gradient.
    return causes or [
        f"weight {name}" for name, weight in optimizer.parameters.items() if not bool(weight[member].isfinite().all())
    ]

"""Adam for an ensemble: each member is one row of weights, gradients and moments, with a separate norm and failures."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam

from trainable.backend.meter import find_nonfinite_gradients, find_nonfinite_losses

_adam = partial(adam, fused=True, amsgrad=False, maximize=False, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
MAX_GRAD_NORM = 1.0
"""Each member's gradient is clipped to this norm."""


class MemberAdam:
    """Adam, with torch's defaults, for E models whose weights are stacked along the first axis.

    parameters: by name, [E, ...] each. Their values are in one matrix [E, P] too, with a member's P weights in the
    order of `parameters`, so that a norm of gradients is one operation; a step copies the matrix into the parameters.

    Uses torch's functional Adam: the class first imports torch's compiler, which takes longer than some runs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: float) -> None:
        self.parameters = dict(parameters)
        self.weights = torch.cat([tensor.detach().flatten(1) for tensor in self.parameters.values()], dim=1)
        self.lr = lr
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps = torch.zeros(())

    def compute_gradient(self, loss: Tensor) -> Tensor:
        """Compute the gradient [E, P] of each member's loss [E]; 0 for weights on which the loss does not depend."""
        parameters = list(self.parameters.values())
        # A member's loss depends only on its weights, so one backward pass of the sum serves all members.
        gradients = torch.autograd.grad(loss.sum(), parameters, materialize_grads=True, allow_unused=True)
        return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Take one step of Adam, against `gradient` [E, P]."""
        # The empty list is for running maxima, which only amsgrad has.
        _adam([self.weights], [gradient], [self.exp_avg], [self.exp_avg_sq], [], [self.steps], lr=self.lr)
        self._copy_to_parameters()

    def _copy_to_parameters(self) -> None:
        for tensor, chunk in zip(self.parameters.values(), self.split_by_parameter(self.weights), strict=True):
            tensor.copy_(chunk)

    def split_by_parameter(self, matrix: Tensor) -> list[Tensor]:
        """Split the columns of `matrix` [E, P] by parameter, in the parameters' shapes."""
        tensors = list(self.parameters.values())
        chunks = matrix.split([tensor[0].numel() for tensor in tensors], dim=1)
        return [chunk.view_as(tensor) for tensor, chunk in zip(tensors, chunks, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, exp_avg, exp_avg_sq [E, P], and steps [E], one per member to make members separable."""
        moments = {"weights": self.weights, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {**moments, "steps": self.steps.expand(len(self.weights)).clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict` of as many members, after equal numbers of steps. Errors if shapes differ."""
        self.weights.copy_(state["weights"])
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.steps.copy_(state["steps"][0])
        self._copy_to_parameters()


def clip_gradient(gradient: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Scale each row of `gradient` [E, P], with its norm [E], down to `max_norm`, as torch.nn.utils.clip_grad_norm_."""
    return gradient * (max_norm / (norm + 1e-6)).clamp(max=1.0).unsqueeze(1)


def descend(optimizer: MemberAdam, loss: Tensor) -> list[list[str]]:
    """Take one step against the gradient of each member's loss [E], clipped to `MAX_GRAD_NORM`.

    Returns the names of what was not finite for each member, which is updated too but cannot spoil the others.
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
    """Keep, for each member, the first names of what was not finite: from earlier steps, or else from a later one."""
    return [first or later for first, later in zip(names, later_names, strict=True)]


def _find_nonfinite(optimizer: MemberAdam, member: int, loss: Tensor, gradient: Tensor, norm: Tensor) -> list[str]:
    """Name what is not finite for a member. loss: [E]. gradient: [E, P]. norm: [E] norms of `gradient`."""
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

"""Adam for several members side by side: one row of weights, gradients and moments each."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam


class MemberAdam:
    """Adam, with torch's defaults, on the weights of E models that are stacked along the first axis.

    parameters: by name, [E, ...] each. They are kept as one matrix [E, P], P weights a member in the order of
    `parameters`, so that a norm or a product of gradients is one operation; a step copies it into them. Adam works
    element by element, so members do not meet. torch's function, since its class imports its compiler first, which
    takes longer than some whole conditions of the sandbox.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: float) -> None:
        self.parameters = dict(parameters)
        self.weights = torch.cat([tensor.detach().flatten(1) for tensor in self.parameters.values()], dim=1)
        self.lr = lr
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps = torch.zeros(())

    def compute_gradient(self, loss: Tensor) -> Tensor:
        """[E, P], the gradient of each member's loss. loss: [E]; a weight that it does not depend on has 0."""
        parameters = list(self.parameters.values())
        gradients = torch.autograd.grad(loss.sum(), parameters, materialize_grads=True, allow_unused=True)
        return torch.cat([part.flatten(1) for part in gradients], dim=1)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step along `gradient` [E, P]."""
        adam(
            [self.weights], [gradient], [self.exp_avg], [self.exp_avg_sq], [], [self.steps], fused=True, amsgrad=False,
            beta1=0.9, beta2=0.999, lr=self.lr, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        self._copy_to_parameters()

    def _copy_to_parameters(self) -> None:
        for tensor, chunk in zip(self.parameters.values(), self.split_by_parameter(self.weights), strict=True):
            tensor.copy_(chunk)

    def split_by_parameter(self, matrix: Tensor) -> list[Tensor]:
        """The columns of `matrix` [E, P] that belong to each parameter, in its shape."""
        tensors = list(self.parameters.values())
        chunks = matrix.split([tensor[0].numel() for tensor in tensors], dim=1)
        return [part.view_as(tensor) for tensor, part in zip(tensors, chunks, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """weights, exp_avg, exp_avg_sq: [E, P]; steps: [E], a number each."""
        return {
            "weights": self.weights,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "steps": self.steps.expand(len(self.weights)).clone(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave. ValueError where the shapes or the members' numbers of steps do not fit."""
        if state["weights"].shape != self.weights.shape or len(state["steps"].unique()) > 1:
            shapes = [tuple(found["weights"].shape) for found in (state, {"weights": self.weights})]
            raise ValueError(f"weights of {shapes[0]} after {state['steps'].tolist()} steps do not fit {shapes[1]}.")
        self.weights.copy_(state["weights"])
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.steps.copy_(state["steps"][0])
        self._copy_to_parameters()


def clip_gradient(gradient: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """`gradient` [E, P] scaled down, member by member, to a norm of at most `most`; norm: [E], of `gradient`.

    As torch.nn.utils.clip_grad_norm_ does it, with its 1e-6 beside the norm.
    """
    return gradient * (max_norm / (norm + 1e-6)).clamp(max=1.0).unsqueeze(1)

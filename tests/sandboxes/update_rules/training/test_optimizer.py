"""Tests that Adam on stacked weights equals torch's Adam on the weights of each member."""

import torch
from torch import nn

from sandboxes.toys.optimizer import MemberAdam, clip_gradient


def make_stacked_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4, 2), "b": (3, 5), "unused": (3, 2)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def compute_loss(weights: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """Compute the losses [E], one per member, which change with the step."""
    return ((weights["a"] - step).square().sum((1, 2)) + weights["b"].exp().sum(1)) * torch.tensor([1.0, 10.0, 0.01])


def test_members_step_as_torchs_clip_and_adam_do_alone() -> None:
    weights = make_stacked_weights()
    single_parameters = [
        {name: nn.Parameter(value[member : member + 1].detach().clone()) for name, value in weights.items()}
        for member in range(3)
    ]
    optimizers = [torch.optim.Adam(parameters.values(), lr=0.1) for parameters in single_parameters]
    member_adam = MemberAdam(weights, 0.1)
    for step in range(4):
        gradient = member_adam.compute_gradient(compute_loss(weights, step))
        member_adam.step(clip_gradient(gradient, gradient.norm(dim=1), 1.0))
        for member, (parameters, optimizer) in enumerate(zip(single_parameters, optimizers, strict=True)):
            optimizer.zero_grad()
            expanded = {name: value.expand(3, *value.shape[1:]) for name, value in parameters.items()}
            compute_loss(expanded, step)[member].backward()
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            for name, value in parameters.items():
                torch.testing.assert_close(weights[name][member : member + 1], value, rtol=1e-5, atol=1e-6)

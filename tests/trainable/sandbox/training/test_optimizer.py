"""Adam on stacked weights: as torch's on each member's own."""

import pytest
import torch
from torch import nn

from trainable.sandbox.training.optimizer import MemberAdam, clip_gradient


def stacked() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4, 2), "b": (3, 5), "unused": (3, 2)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def loss_of(weights: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """[E], a loss a member that changes with the step."""
    return ((weights["a"] - step).square().sum((1, 2)) + weights["b"].exp().sum(1)) * torch.tensor([1.0, 10.0, 0.01])


def test_members_step_as_torchs_clip_and_adam_do_alone() -> None:
    weights = stacked()
    alone = [
        {name: nn.Parameter(value[member : member + 1].detach().clone()) for name, value in weights.items()}
        for member in range(3)
    ]
    optimizers = [torch.optim.Adam(mine.values(), lr=0.1) for mine in alone]
    together = MemberAdam(weights, 0.1)
    for step in range(4):
        gradient = together.compute_gradient(loss_of(weights, step))
        together.step(clip_gradient(gradient, gradient.norm(dim=1), 1.0))
        for member, (mine, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.zero_grad()
            expanded = {name: value.expand(3, *value.shape[1:]) for name, value in mine.items()}
            loss_of(expanded, step)[member].backward()
            nn.utils.clip_grad_norm_(mine.values(), 1.0)
            optimizer.step()
            for name, value in mine.items():
                torch.testing.assert_close(weights[name][member : member + 1], value, rtol=1e-5, atol=1e-6)


def test_a_gradient_is_the_members_own_and_zero_where_nothing_depends() -> None:
    weights = stacked()
    together = MemberAdam(weights, 0.1)
    gradient = together.compute_gradient(
        torch.stack([weights["b"][0].sum(), weights["b"][1].sum() * 2, weights["a"][2].sum()])
    )
    assert gradient.tolist() == [
        [0.0] * 8 + [1.0] * 5 + [0.0] * 2,
        [0.0] * 8 + [2.0] * 5 + [0.0] * 2,
        [1.0] * 8 + [0.0] * 7,
    ]
    parts = together.split_by_parameter(gradient)
    assert [part.shape for part in parts] == [value.shape for value in weights.values()]
    assert parts[1].tolist() == [[1.0] * 5, [2.0] * 5, [0.0] * 5]


def test_a_member_with_numbers_that_are_not_finite_does_not_reach_the_others() -> None:
    weights, beside = stacked(), stacked()
    broken, whole = MemberAdam(weights, 0.1), MemberAdam(beside, 0.1)
    for step in range(2):
        gradient = broken.compute_gradient(loss_of(weights, step) * torch.tensor([1.0, torch.nan, 1.0]))
        broken.step(clip_gradient(gradient, gradient.norm(dim=1), 1.0))
        gradient = whole.compute_gradient(loss_of(beside, step))
        whole.step(clip_gradient(gradient, gradient.norm(dim=1), 1.0))
    assert bool(weights["a"][1].isnan().all())
    for name, value in beside.items():
        assert torch.equal(weights[name][[0, 2]], value[[0, 2]])


def test_state_goes_on_where_it_was_taken_and_is_refused_where_it_does_not_fit() -> None:
    first, second = stacked(), stacked()
    one, other = MemberAdam(first, 0.1), MemberAdam(second, 0.1)
    for step in range(2):
        one.step(one.compute_gradient(loss_of(first, step)))
    other.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    for optimizer, weights in ((one, first), (other, second)):
        optimizer.step(optimizer.compute_gradient(loss_of(weights, 2)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="does not fit"):
        other.load_state_dict({**one.state_dict(), "weights": torch.zeros(2, 15)})
    with pytest.raises(ValueError, match="after"):
        other.load_state_dict({**one.state_dict(), "steps": torch.tensor([1.0, 2.0, 1.0])})

"""Tensors that are made when they are asked for, and what there is to say of them before."""

import pytest
import torch

from trainable.runs.flat_state import LazyTensors, check_shapes, compute_flat_shapes, get_shapes


def test_a_lazy_tensor_is_made_when_it_is_asked_for_and_not_before() -> None:
    asked: list[str] = []

    def make(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.ones(2, 3)

    found = LazyTensors({"a": torch.Size([2, 3]), "b": torch.Size([])}, make)
    assert list(found) == ["a", "b"]
    assert len(found) == 2
    assert "a" in found
    assert "c" not in found
    assert get_shapes(found) == {"a": (2, 3), "b": ()}
    assert asked == []
    assert found["a"].shape == (2, 3)
    assert asked == ["a"]
    with pytest.raises(KeyError):
        found["c"]


def test_shapes_of_a_module_and_of_what_its_optimizer_will_hold() -> None:
    layer = torch.nn.Linear(3, 2)
    assert compute_flat_shapes(layer) == {"weight": (2, 3), "bias": (2,)}
    optimizer = torch.optim.AdamW(layer.parameters())
    wanted = compute_flat_shapes(optimizer)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert wanted == {f"{key}/{name}": value.shape for key, part in state.items() for name, value in part.items()}


def test_the_first_tensor_that_does_not_fit_is_told() -> None:
    check_shapes("part", {"a": torch.Size([1])}, {"a": torch.Size([1])})
    with pytest.raises(ValueError, match=r"2 tensors do not match; the first is part/a: expected \(1,\), got nothing"):
        check_shapes("part", {"a": torch.Size([1])}, {"b": torch.Size([1])})

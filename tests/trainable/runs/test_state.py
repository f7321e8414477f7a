"""Tensors that are created on request, and their shapes before that."""

import pytest
import torch

from trainable.runs.flat_state import LazyTensors, check_shapes, compute_flat_shapes, get_shapes


def test_a_lazy_tensor_is_created_on_request_and_not_before() -> None:
    requested_names: list[str] = []

    def make_tensor(name: str) -> torch.Tensor:
        requested_names.append(name)
        return torch.ones(2, 3)

    lazy_tensors = LazyTensors({"a": torch.Size([2, 3]), "b": torch.Size([])}, make_tensor)
    assert list(lazy_tensors) == ["a", "b"]
    assert len(lazy_tensors) == 2
    assert "a" in lazy_tensors
    assert "c" not in lazy_tensors
    assert get_shapes(lazy_tensors) == {"a": (2, 3), "b": ()}
    assert requested_names == []
    assert lazy_tensors["a"].shape == (2, 3)
    assert requested_names == ["a"]
    with pytest.raises(KeyError):
        lazy_tensors["c"]


def test_shapes_of_a_module_and_of_what_its_optimizer_will_hold() -> None:
    layer = torch.nn.Linear(3, 2)
    assert compute_flat_shapes(layer) == {"weight": (2, 3), "bias": (2,)}
    optimizer = torch.optim.AdamW(layer.parameters())
    expected_shapes = compute_flat_shapes(optimizer)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert expected_shapes == {
        f"{key}/{name}": value.shape for key, tensors in state.items() for name, value in tensors.items()
    }


def test_the_first_tensor_that_does_not_fit_is_named() -> None:
    check_shapes("part", {"a": torch.Size([1])}, {"a": torch.Size([1])})
    with pytest.raises(ValueError, match=r"2 tensors do not match; the first is part/a: expected \(1,\), got nothing"):
        check_shapes("part", {"a": torch.Size([1])}, {"b": torch.Size([1])})

"""Convert modules and optimizers to flat dictionaries of named tensors, as a checkpoint stores them, and back."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made on access, so that a loop over them needs memory for only one at a time.

    shapes: the shape of every tensor. make_tensor: makes the tensor with the given name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], make_tensor: Callable[[str], Tensor]) -> None:
        self.shapes, self.make_tensor = shapes, make_tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.make_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def get_shapes(tensors: Mapping[str, Tensor]) -> Mapping[str, torch.Size]:
    """Return the shape of each tensor, without making lazy tensors."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {name: value.shape for name, value in tensors.items()}


def get_trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List (name, parameter) of the trained parameters, without parameters that are frozen under an adapter."""
    return [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]


def flatten_state(stateful: nn.Module | torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flatten the state of a module to its trainable tensors, or of an optimizer to `<parameter index>/<moment>`."""
    if isinstance(stateful, nn.Module):
        # Only trained parameters, since the frozen base under an adapter is loaded from the model's files.
        # `named_parameters` lists a tied head only once, under its first name.
        return {name: weight.detach() for name, weight in get_trainable_parameters(stateful)}
    state = stateful.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def load_flat_state(stateful: nn.Module | torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the result of `flatten_state` for a module or optimizer of the same kind."""
    if isinstance(stateful, nn.Module):
        # `load_state_dict` requires every name. The flat state lacks frozen weights and buffers, which keep their
        # values, and has only the first name of a tied tensor.
        tensors, first_names = {**stateful.state_dict(), **tensors}, dict[int, str]()
        # `keep_vars` returns the parameters themselves. Otherwise, tied tensors would be different objects.
        for name, parameter in stateful.state_dict(keep_vars=True).items():
            tensors[name] = tensors[first_names.setdefault(id(parameter), name)]
        stateful.load_state_dict(tensors)
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter_index, name = key.split("/")
        # A loaded tensor is a view of the memory-mapped checkpoint. An optimizer would keep this view, and with it the
        # disk space of the file even after it is deleted. A module's `load_state_dict` copies by itself.
        state.setdefault(int(parameter_index), {})[name] = value.clone()
    # The flat state has no hyperparameters: they come from the settings with which the optimizer was made.
    stateful.load_state_dict({"state": state, "param_groups": stateful.state_dict()["param_groups"]})


def compute_flat_shapes(stateful: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Size]:
    """Compute the shapes of the tensors that `flatten_state` returns. AdamW has these only after its first step."""
    if isinstance(stateful, nn.Module):
        return {key: value.shape for key, value in flatten_state(stateful).items()}
    parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    return {
        f"{parameter_index}/{name}": shape
        for parameter_index, parameter in enumerate(parameters)
        for name, shape in (("exp_avg", parameter.shape), ("exp_avg_sq", parameter.shape), ("step", torch.Size([])))
    }


def check_shapes(name: str, expected: Mapping[str, torch.Size], actual: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless `actual` has the same tensors and shapes as `expected`. name: prefix in the message."""
    mismatched_keys = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
    if mismatched_keys:
        key = mismatched_keys[0]
        actual_shape, expected_shape = (
            str(tuple(shapes[key])) if key in shapes else "nothing" for shapes in (actual, expected)
        )
        raise ValueError(
            f"{len(mismatched_keys)} tensors do not match; the first is {name}/{key}: expected {expected_shape}, "
            f"got {actual_shape}"
        )

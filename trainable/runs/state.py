"""Modules and optimizers as flat tensors by name, and back: what a checkpoint holds."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for: who takes one after the other holds one at a time.

    shapes: of all of them. make: a name -> its tensor.
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
    """The shape of each tensor; none is made for it."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {name: value.shape for name, value in tensors.items()}


def get_trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a network learns, by name: all but those that were frozen for adapters to stand beside."""
    return [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]


def flatten_state(stateful: nn.Module | torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors that a module learns, or those of an optimizer by parameter number and moment."""
    if isinstance(stateful, nn.Module):
        return {
            name: weight.detach() for name, weight in get_trainable_parameters(stateful)
        }  # a tied head has one name there
    state = stateful.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def load_flat_state(stateful: nn.Module | torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `flat_state` gave of a part made in the same way."""
    if isinstance(stateful, nn.Module):
        tensors = {**stateful.state_dict(), **tensors}  # what is frozen stays, and so do buffers
        tied_tensors = {name: tensors[first] for name, first in _map_tied_names(stateful).items() if first != name}
        stateful.load_state_dict({**tensors, **tied_tensors})
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter_index, name = key.split("/")
        # A copy: the loaded one is a view of the file, which would live on, unseen, after it is deleted.
        state.setdefault(int(parameter_index), {})[name] = value.clone()
    stateful.load_state_dict({"state": state, "param_groups": stateful.state_dict()["param_groups"]})


def compute_flat_shapes(stateful: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Size]:
    """Shapes of what `flat_state` gives of a part; of an AdamW those after its first step."""
    if isinstance(stateful, nn.Module):
        return {key: value.shape for key, value in flatten_state(stateful).items()}
    parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    shapes: dict[str, torch.Size] = {}
    for parameter_index, parameter in enumerate(parameters):
        moments = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size([])}
        shapes |= {f"{parameter_index}/{name}": shape for name, shape in moments.items()}
    return shapes


def check_shapes(name: str, expected: Mapping[str, torch.Size], actual: Mapping[str, torch.Size]) -> None:
    """ValueError unless `given` has the tensors of the part `name`, `wanted`, and no other."""
    mismatched_keys = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
    if mismatched_keys:
        key = mismatched_keys[0]
        shapes = [str(tuple(found[key])) if key in found else "nothing" for found in (actual, expected)]
        raise ValueError(
            f"{len(mismatched_keys)} tensors do not fit; the first, {name}/{key}, is {shapes[0]} and should be {shapes[1]}"
        )


def _map_tied_names(module: nn.Module) -> dict[str, str]:
    """For each name in a module's state the first name that the same tensor has there."""
    first_name_by_id: dict[int, str] = {}
    return {
        name: first_name_by_id.setdefault(id(value), name) for name, value in module.state_dict(keep_vars=True).items()
    }

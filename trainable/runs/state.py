"""Modules and optimizers as flat tensors by name, and back: what a checkpoint holds."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for: who takes one after the other holds one at a time.

    shapes: of all of them. make: a name -> its tensor.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], make: Callable[[str], Tensor]) -> None:
        self.shapes, self.make = shapes, make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, Tensor]) -> Mapping[str, torch.Size]:
    """The shape of each tensor; none is made for it."""
    if isinstance(tensors, Lazy):
        return tensors.shapes
    return {name: value.shape for name, value in tensors.items()}


def trained(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a network learns, by name: all but those that were frozen for adapters to stand beside."""
    return [(name, weight) for name, weight in part.named_parameters() if weight.requires_grad]


def flat_state(part: nn.Module | torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors that a module learns, or those of an optimizer by parameter number and moment."""
    if isinstance(part, nn.Module):
        return {name: weight.detach() for name, weight in trained(part)}  # a tied head has one name there
    state = part.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def load_flat_state(part: nn.Module | torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `flat_state` gave of a part made in the same way."""
    if isinstance(part, nn.Module):
        tensors = {**part.state_dict(), **tensors}  # what is frozen stays, and so do buffers
        second = {name: tensors[first] for name, first in _first_names(part).items() if first != name}
        part.load_state_dict({**tensors, **second})
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split("/")
        # A copy: the loaded one is a view of the file, which would live on, unseen, after it is deleted.
        state.setdefault(int(number), {})[name] = value.clone()
    part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def tensor_shapes(part: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Size]:
    """Shapes of what `flat_state` gives of a part; of an AdamW those after its first step."""
    if isinstance(part, nn.Module):
        return {key: value.shape for key, value in flat_state(part).items()}
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    shapes: dict[str, torch.Size] = {}
    for number, parameter in enumerate(parameters):
        moments = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size([])}
        shapes |= {f"{number}/{name}": shape for name, shape in moments.items()}
    return shapes


def check_shapes(name: str, wanted: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> None:
    """ValueError unless `given` has the tensors of the part `name`, `wanted`, and no other."""
    differing = sorted(key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key))
    if differing:
        key = differing[0]
        shapes = [str(tuple(found[key])) if key in found else "nothing" for found in (given, wanted)]
        raise ValueError(
            f"{len(differing)} tensors do not fit; the first, {name}/{key}, is {shapes[0]} and should be {shapes[1]}"
        )


def _first_names(part: nn.Module) -> dict[str, str]:
    """For each name in a module's state the first name that the same tensor has there."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in part.state_dict(keep_vars=True).items()}

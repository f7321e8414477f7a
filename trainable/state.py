"""Modules and optimizers as flat tensors by name, and back: what a checkpoint holds."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def flat_state(part: nn.Module | torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors of a module, or of an optimizer by parameter number and moment."""
    if isinstance(part, nn.Module):
        # A tied head is the embedding under a second name: stored once.
        first = _first_names(part)
        return {name: value for name, value in part.state_dict().items() if first[name] == name}
    state = part.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def load_flat_state(part: nn.Module | torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `flat_state` gave of a part made in the same way."""
    if isinstance(part, nn.Module):
        second = {name: tensors[first] for name, first in _first_names(part).items() if first != name}
        part.load_state_dict({**tensors, **second})
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split("/")
        # A copy: the loaded one is a view of the file, which would live on, unseen, after it is deleted.
        state.setdefault(int(number), {})[name] = value.clone()
    part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def check_fits(name: str, part: nn.Module | torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless `tensors` are what `flat_state` gives of a part made in the same way; nothing is changed.

    An optimizer that has made no step has no moments: none, or two and a count of each parameter, both fit.
    """
    wanted = (
        {key: value.shape for key, value in flat_state(part).items()}
        if isinstance(part, nn.Module)
        else _moment_shapes(part, bool(tensors))
    )
    given = {key: value.shape for key, value in tensors.items()}
    differing = sorted(key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key))
    if differing:
        key = differing[0]
        shapes = [str(tuple(found[key])) if key in found else "nothing" for found in (given, wanted)]
        raise ValueError(
            f"{len(differing)} tensors do not fit; the first, {name}/{key}, is {shapes[0]} and should be {shapes[1]}"
        )


def _moment_shapes(part: torch.optim.Optimizer, has_stepped: bool) -> dict[str, torch.Size]:
    """Shapes of AdamW's state by `flat_state`'s names."""
    if not has_stepped:
        return {}
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    shapes: dict[str, torch.Size] = {}
    for number, parameter in enumerate(parameters):
        moments = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size([])}
        shapes |= {f"{number}/{name}": shape for name, shape in moments.items()}
    return shapes


def _first_names(part: nn.Module) -> dict[str, str]:
    """For each name in a module's state the first name that the same tensor has there."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in part.state_dict(keep_vars=True).items()}

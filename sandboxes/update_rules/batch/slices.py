"""Convert batches to flat dictionaries of tensors, and back."""

from collections.abc import Mapping
from dataclasses import fields

from torch import Tensor

from sandboxes.update_rules.batch.rollouts import Candidates, Rollouts

_NESTED_FIELDS = ("candidates", "scalars")
"""Fields of a batch that contain named tensors themselves."""


def flatten_rollouts(rollouts: Rollouts) -> dict[str, Tensor]:
    """Every tensor of `rollouts` by name, such as `actions` or `candidates/actions`; [E, ...] each."""
    tensors: dict[str, Tensor] = {}
    for field in fields(rollouts):
        value = getattr(rollouts, field.name)
        # group_size is a number, and an optional field may be None: `unflatten_rollouts` gets these in other ways.
        if isinstance(value, Tensor):
            tensors[field.name] = value
    if rollouts.candidates is not None:
        tensors |= {
            f"candidates/{field.name}": getattr(rollouts.candidates, field.name) for field in fields(Candidates)
        }
    return tensors | {f"scalars/{name}": value for name, value in rollouts.scalars.items()}


def unflatten_rollouts(tensors: Mapping[str, Tensor], group_size: int | None) -> Rollouts:
    """The inverse of `flatten_rollouts`."""
    nested_fields: dict[str, dict[str, Tensor]] = {field: {} for field in _NESTED_FIELDS}
    plain_fields: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, key = name.rpartition("/")
        (nested_fields[prefix] if prefix else plain_fields)[key] = tensor
    candidates = Candidates(**nested_fields["candidates"]) if nested_fields["candidates"] else None
    return Rollouts(**plain_fields, group_size=group_size, candidates=candidates, scalars=nested_fields["scalars"])

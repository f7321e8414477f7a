"""The whole state of one member: what it takes to go on with it, alone or beside others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MemberState:
    """tensors: weights and moments of Adam [P], stored batches, sums of ages, by name. values: what JSON can hold.

    Values: seed, step (batches trained on), uniform_batches (in a row), batches (stored ones), group_size, seconds.
    Random numbers need no state: they are functions of seed, purpose and step.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`/, by the rest of their names."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in tensors.items() if name.startswith(f"{prefix}/")}


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same tensors with `prefix`/ before their names."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}

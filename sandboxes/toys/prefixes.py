"""Store several dictionaries of tensors in one, each under its own prefix."""

from collections.abc import Mapping

from torch import Tensor


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`/, without that prefix."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in tensors.items() if name.startswith(f"{prefix}/")}


def add_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same tensors, with `prefix`/ in front of their names."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}

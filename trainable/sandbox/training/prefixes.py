"""Tensors of several parts of a state under one prefix each."""

from collections.abc import Mapping

from torch import Tensor


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`/, by the rest of their names."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in tensors.items() if name.startswith(f"{prefix}/")}


def add_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same tensors with `prefix`/ before their names."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}

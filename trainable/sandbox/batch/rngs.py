"""The seeds of a condition, trained side by side: their random streams, and the ends of what they share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainable.config.seeds import make_rng


class MemberRngs:
    """Random numbers of each member from (its seed, purpose, indices): no state to save, and none is shared.

    A member draws the same numbers whoever is beside it, whatever the update rule does, and however often it is
    evaluated.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = tuple(seeds)

    def uniform(self, purpose: str, *indices: int, shape: tuple[int, ...]) -> Tensor:
        """[E, *shape] float64 numbers in [0, 1)."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).random(shape))

    def integers(self, purpose: str, *indices: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """[E, *shape] whole numbers in 0 ... below - 1."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).integers(high, size=shape))

    def normal(self, purpose: str, *indices: int, shape: tuple[int, ...]) -> Tensor:
        """[E, *shape] float64 standard normal numbers."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).standard_normal(shape))

    def _stack_draws(self, draw: Callable[[int], object]) -> Tensor:
        return torch.stack([torch.as_tensor(draw(seed)) for seed in self.seeds])

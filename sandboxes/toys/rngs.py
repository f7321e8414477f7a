"""Random numbers for the members of an ensemble: the seeds of one condition, trained together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainable.config.seeds import make_rng


class MemberRngs:
    """Random numbers of each member as a function of (seed, purpose, indices), without any state to save or share.

    A member draws the same numbers whatever the other members, the update rule, and the number of evaluations.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = tuple(seeds)

    def uniform(self, purpose: str, *indices: int, shape: tuple[int, ...]) -> Tensor:
        """Draw float64 numbers [E, *shape] in [0, 1)."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).random(shape))

    def integers(self, purpose: str, *indices: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Draw integers [E, *shape] in 0 ... high - 1."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).integers(high, size=shape))

    def normal(self, purpose: str, *indices: int, shape: tuple[int, ...]) -> Tensor:
        """Draw float64 standard normal numbers [E, *shape]."""
        return self._stack_draws(lambda seed: make_rng(seed, purpose, *indices).standard_normal(shape))

    def bounded_weights(self, index: int, shape: tuple[int, ...], bound: float) -> Tensor:
        """Draw initial weights [E, *shape], float64, uniform within `bound`. index: of the stream."""
        return (2 * self.uniform("sandbox_weights", index, shape=shape) - 1) * bound

    def _stack_draws(self, draw: Callable[[int], object]) -> Tensor:
        return torch.stack([torch.as_tensor(draw(seed)) for seed in self.seeds])

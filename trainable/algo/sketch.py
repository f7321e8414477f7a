"""A vector of billions of entries as one of thousands whose inner products are the same but for a small error."""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 2**24
"""Entries worked on at once: some hundred megabytes."""


def count_sketch(parts: Iterable[Tensor], size: int, seed: int) -> Tensor:
    """The CountSketch S x, (size,) in float64, of the vector x that `parts` make together: each entry of x is added to
    one random entry of the sketch, with a random sign.

        E <S x, S y> = <x, y>
        Var <S x, S y> = (|x|² |y|² + <x, y>² − 2 Σ x_i² y_i²) / size  <=  2 |x|² |y|² / size

    S is linear and depends on `seed`, `size` and the parts' shapes only, so that the sketch of a sum is the sum of the
    sketches, and vectors that are to be compared need the same three and the same device.

    Args:
        parts: at least one tensor of any shape and float type, all on one device.
        size: entries of the sketch, at least 1.
        seed: of the draws, made anew in each call; none of them is kept.

    Source: Charikar, Chen and Farach-Colton 2002; the variance: Weinberger et al. 2009, arXiv:0902.2206, lemma 2.
    Degenerate: entries that are not finite give sketches that are not.
    """
    found: Tensor | None = None
    draws = torch.Generator()
    for part in parts:
        if found is None:
            found = torch.zeros(size, dtype=torch.float64, device=part.device)
            draws = torch.Generator(part.device).manual_seed(seed)
        for chunk in part.detach().flatten().split(CHUNK):
            # One draw has both: the place, and in its last bit the sign.
            drawn = torch.randint(2 * size, chunk.shape, generator=draws, device=chunk.device)
            found.index_add_(0, drawn >> 1, torch.where(drawn & 1 == 1, chunk, -chunk).double())
    if found is None:
        raise ValueError("There is nothing to sketch.")
    return found

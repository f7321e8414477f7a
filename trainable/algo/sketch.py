"""A vector of billions of entries as one of thousands whose inner products are the same but for a small error."""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ENTRIES = 2**24
"""Entries worked on at once: some hundred megabytes."""


def count_sketch(tensors: Iterable[Tensor], size: int, seed: int) -> Tensor:
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
    sketch: Tensor | None = None
    generator = torch.Generator()
    for tensor in tensors:
        if sketch is None:
            sketch = torch.zeros(size, dtype=torch.float64, device=tensor.device)
            generator = torch.Generator(tensor.device).manual_seed(seed)
        for chunk in tensor.detach().flatten().split(CHUNK_ENTRIES):
            # One draw has both: the place, and in its last bit the sign.
            slots_and_signs = torch.randint(2 * size, chunk.shape, generator=generator, device=chunk.device)
            sketch.index_add_(0, slots_and_signs >> 1, torch.where(slots_and_signs & 1 == 1, chunk, -chunk).double())
    if sketch is None:
        raise ValueError("There is nothing to sketch.")
    return sketch

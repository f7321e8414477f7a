"""A random projection of vectors with billions of entries to thousands of entries. It nearly keeps inner products."""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ENTRIES = 2**24
"""Entries processed at once; their random numbers and float64 copies take a few hundred megabytes."""


def count_sketch(tensors: Iterable[Tensor], size: int, seed: int) -> Tensor:
    """The CountSketch S x, (size,) in float64, of the vector x that `tensors` form together.

    Each entry of x is added to one random entry of the sketch, with a random sign.

        E <S x, S y> = <x, y>
        Var <S x, S y> = (|x|² |y|² + <x, y>² − 2 Σ x_i² y_i²) / size  <=  2 |x|² |y|² / size

    S is linear and depends only on `seed`, `size` and the shapes of the tensors, so the sketch of a sum is the sum of
    the sketches. Vectors that are to be compared need the same three and the same device.

    Args:
        tensors: at least one tensor of any shape and float type, all on one device.
        size: entries of the sketch, at least 1.
        seed: of the draws, which are repeated in each call instead of being stored.

    Example:
        For a single entry the inner product is exact.

        >>> x, y = [torch.tensor([3.0])], [torch.tensor([2.0])]
        >>> (count_sketch(x, size=8, seed=0) @ count_sketch(y, size=8, seed=0)).item()
        6.0

    Source: Charikar, Chen and Farach-Colton 2002; the variance: Weinberger et al. 2009, arXiv:0902.2206, lemma 2.
    Degenerate: entries that are not finite give sketches that are not finite.
    """
    sketch: Tensor | None = None
    generator = torch.Generator()
    for tensor in tensors:
        if sketch is None:
            sketch = torch.zeros(size, dtype=torch.float64, device=tensor.device)
            generator = torch.Generator(tensor.device).manual_seed(seed)
        for chunk in tensor.detach().flatten().split(CHUNK_ENTRIES):
            # One draw gives both: the last bit is the sign, the others are the slot.
            slots_and_signs = torch.randint(2 * size, chunk.shape, generator=generator, device=chunk.device)
            sketch.index_add_(0, slots_and_signs >> 1, torch.where(slots_and_signs & 1 == 1, chunk, -chunk).double())
    if sketch is None:
        raise ValueError("There is nothing to sketch: `tensors` is empty.")
    return sketch

"""Rows of unequal length as one stream of tokens, so that no padding is computed: layout, and attention over it."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Packed(NamedTuple):
    """Rows of tokens laid end to end, short rows first, each up to its last position that is asked for.

    source: (N,) flat index into the padded rows, (B, T), of each token of the stream. positions: (N,) of each in its
    own row. asked: (n,) places in the stream of what is asked for. bounds: (R + 1,) int32, where each of R rows begins,
    and N. groups: (rows, length) of consecutive rows that are equally long.
    """

    source: Tensor
    positions: Tensor
    asked: Tensor
    bounds: Tensor
    groups: tuple[tuple[int, int], ...]


def pack(shape: tuple[int, int], where: Tensor) -> Packed:
    """Lay rows of tokens end to end, which are padded on the right to `shape` (B, T).

    where: (n,) flat indices into B * T of the positions that are asked for. Attention is causal, so a row is cut
    after the last of them, and left out where there is none. The stream has one token at least: the ranks of a run
    must all make a gradient of every weight, also in a pass that asks for nothing.
    """
    (rows, width), device = shape, where.device
    of, position = where // width, where % width
    needed = torch.zeros(rows, dtype=torch.long, device=device).scatter_reduce(0, of, position + 1, "amax")
    if not len(where):
        needed[0] = 1
    lengths, order = needed.sort(stable=True)
    begins = lengths.cumsum(0) - lengths
    row, positions = (torch.arange(width, device=device) < lengths[:, None]).nonzero().unbind(1)
    begin_of = torch.zeros_like(begins).scatter(0, order, begins)
    sizes = [length for length in lengths.tolist() if length]
    return Packed(
        source=order[row] * width + positions,
        positions=positions,
        asked=begin_of[of] + position,
        bounds=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device),
        groups=tuple((len(list(group)), length) for length, group in groupby(sizes)),
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention of every row of the stream over itself, (N, heads * D).

    q: (N, heads, D). k, v: (N, kv_heads, D), kv_heads dividing heads.
    """
    return (_at_once if _runs_at_once(q) else by_length)(q, k, v, packed)


def _runs_at_once(q: Tensor) -> bool:
    """Whether torch has a kernel for rows of unequal length: in half precision, on GPUs from Ampere on."""
    is_half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return is_half and torch.cuda.get_device_capability(q.device) >= (8, 0) and _varlen_attn() is not None


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """torch's kernel, where this torch has one. Its module takes longer to import than the model: only where used."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn if "enable_gqa" in signature(varlen_attn).parameters else None  # torch 2.12 on


def _at_once(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """`causal_attention` in one call."""
    bounds, longest, varlen_attn = packed.bounds, packed.groups[-1][1], _varlen_attn()
    assert varlen_attn is not None
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(mixed, Tensor)
    return mixed.flatten(1)


def by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """`causal_attention` in a call for each group of equally long rows: views of the stream, nothing is padded."""
    sizes = [rows * length for rows, length in packed.groups]
    mixed = []
    for group, *parts in zip(packed.groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        heads = [part.view(*group, *part.shape[1:]).transpose(1, 2) for part in parts]
        found = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        mixed.append(found.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[2]))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

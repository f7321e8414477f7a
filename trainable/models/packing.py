"""Pack rows of unequal length into one stream of tokens, to compute no padding, and attend over it."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class PackedRows(NamedTuple):
    """Rows of tokens laid end to end, short rows first. Each row is cut after its last requested position.

    source_indices: (N,) flat index into the padded rows (B, T) of each token of the stream. positions: (N,) position of
    each token in its row. output_indices: (n,) indices into the stream of the requested positions. cu_seqlens: (R + 1,)
    int32, the start of each of R rows, and N. length_groups: (number of rows, length) of each group of equally long
    rows.
    """

    source_indices: Tensor
    positions: Tensor
    output_indices: Tensor
    cu_seqlens: Tensor
    length_groups: tuple[tuple[int, int], ...]


def pack_rows(shape: tuple[int, int], flat_positions: Tensor) -> PackedRows:
    """Pack rows of tokens, padded on the right to `shape` (B, T), into one stream.

    flat_positions: (n,) flat indices into B * T of the requested positions. Attention is causal, so a row is cut after
    its last requested position, and left out if it has none. The stream has at least one token, because every rank of a
    run needs a gradient for every weight, even in a pass without requested positions.
    """
    (rows, width), device = shape, flat_positions.device
    row_of_position, column_of_position = flat_positions // width, flat_positions % width
    row_lengths = torch.zeros(rows, dtype=torch.long, device=device).scatter_reduce(
        0, row_of_position, column_of_position + 1, "amax"
    )
    if not len(flat_positions):
        row_lengths[0] = 1
    # Make rows of equal length neighbors, as `attend_by_length` requires.
    sorted_lengths, order = row_lengths.sort(stable=True)
    sorted_starts = sorted_lengths.cumsum(0) - sorted_lengths
    sorted_row, positions = (torch.arange(width, device=device) < sorted_lengths[:, None]).nonzero().unbind(1)
    row_starts = torch.zeros_like(sorted_starts).scatter(0, order, sorted_starts)
    nonempty_lengths = [length for length in sorted_lengths.tolist() if length]
    return PackedRows(
        source_indices=order[sorted_row] * width + positions,
        positions=positions,
        output_indices=row_starts[row_of_position] + column_of_position,
        cu_seqlens=torch.tensor([0, *accumulate(nonempty_lengths)], dtype=torch.int32, device=device),
        length_groups=tuple((len(list(group)), length) for length, group in groupby(nonempty_lengths)),
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedRows) -> Tensor:
    """Compute causal attention within every row of the stream, (N, heads * D).

    q: (N, heads, D). k, v: (N, kv_heads, D), where kv_heads divides heads.
    """
    if not _can_use_varlen(q):
        return attend_by_length(q, k, v, packed)
    varlen_attn: Any = _import_varlen_attn()
    starts, max_length = packed.cu_seqlens, packed.length_groups[-1][1]
    attention_output: Tensor = varlen_attn(
        q, k, v, starts, starts, max_length, max_length, window_size=(-1, 0), enable_gqa=True
    )
    return attention_output.flatten(1)


def _can_use_varlen(q: Tensor) -> bool:
    """Check whether torch has a kernel for rows of unequal length: in half precision, on GPUs from Ampere on."""
    is_half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return is_half and torch.cuda.get_device_capability(q.device) >= (8, 0) and _import_varlen_attn() is not None


@cache
def _import_varlen_attn() -> Callable[..., Any] | None:
    """Import torch's kernel for rows of unequal length; return None if this version has none.

    It is imported on first use, because importing its module takes longer than importing the model.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn if "enable_gqa" in signature(varlen_attn).parameters else None  # from torch 2.12 on


def attend_by_length(q: Tensor, k: Tensor, v: Tensor, packed: PackedRows) -> Tensor:
    """Compute `causal_attention` with one call per group of equally long rows, which are views of the stream."""
    sizes = [rows * length for rows, length in packed.length_groups]
    outputs = []
    for group, *qkv in zip(packed.length_groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        heads = [tensor.view(*group, *tensor.shape[1:]).transpose(1, 2) for tensor in qkv]
        output = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

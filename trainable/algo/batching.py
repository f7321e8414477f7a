"""Order and number of the sequences of an update, as index tensors. Shape: B sequences."""

import torch
from torch import Tensor


def order_length_stratified(lengths: Tensor) -> Tensor:
    """Order (B,) of the sequences, short to long and back to short, so that a mini-batch holds similar lengths.

        sort by (length, index); then ranks 0, 2, 4, … upwards followed by ranks …, 5, 3, 1 downwards

    Args:
        lengths: (B,) tokens of each sequence of one device.

    Returns:
        (B,) int64, a permutation.

    Source: published code (verl 0.6.1 `balance_batch`).  Degenerate: equal lengths give 0, 2, 4, …, 5, 3, 1.
    """
    indices = torch.sort(lengths, stable=True).indices
    return torch.cat([indices[::2], indices[1::2].flip(0)])


def order_by_group(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Order (B,) of the sequences in which each group stands together, groups of similar length side by side.

        the groups in `length_stratified_order` of their tokens; a group's sequences in order of their index

    Args:
        lengths: (B,) tokens of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt.

    Returns:
        (B,) int64, a permutation. Where groups have G sequences each, pieces of k G of them hold k whole groups.

    Source: definition.  Degenerate: groups of one give `length_stratified_order`, if their ids ascend.
    """
    _, group_index = torch.unique(group_ids, return_inverse=True)
    group_tokens = lengths.new_zeros(int(group_index.max()) + 1).index_add(0, group_index, lengths)
    rank = torch.argsort(order_length_stratified(group_tokens))
    return torch.argsort(rank[group_index], stable=True)


def split_by_tokens(lengths: Tensor, max_tokens: int, needs_padding: bool = False) -> list[Tensor]:
    """Indices of the sequences of each pass: neighbours in length, of at most `most` tokens together.

        sort by (length, index); a pass takes sequences until the next one would not fit

    Args:
        lengths: (B,) tokens of each sequence, on the processor.
        most: tokens of a pass; a sequence that is longer makes a pass of its own.
        pads: every sequence of a pass counts as its longest one, which whoever pads them reads.

    Returns:
        int64 indices of each pass, short sequences first; every sequence is in one pass.

    Source: definition.  Degenerate: no sequences make no pass.
    """
    if max_tokens < 1:
        raise ValueError(f"a pass of at most {max_tokens} tokens; it must be at least 1.")
    sorted_lengths = torch.sort(lengths, stable=True)
    sizes: list[int] = []
    pass_tokens = 0  # by the pass under way, with the sequence at hand
    for length in sorted_lengths.values.tolist():
        if sizes:
            pass_tokens = (sizes[-1] + 1) * length if needs_padding else pass_tokens + length
        if not sizes or pass_tokens > max_tokens:
            sizes.append(0)
            pass_tokens = length
        sizes[-1] += 1
    return list(sorted_lengths.indices.split(sizes)) if sizes else []


def adjust_copy(n: int, multiple: int, generator: torch.Generator) -> Tensor:
    """Indices (n',) of n sequences followed by random duplicates, n' the next multiple of `multiple`.

    Args:
        n: sequences.
        multiple: what the number must be divisible by.
        generator: CPU generator that draws the duplicates.

    Returns:
        int64: 0 … n − 1 in order, then the duplicates, distinct among themselves while fewer than n are needed; beyond
        that each sequence is repeated as evenly as possible.

    Source: published code (RAGEN `adjust_batch`, mode copy, which cannot draw more than n).
    Degenerate: n = 0, or n divisible already, adds nothing.
    """
    _check_multiple(n, multiple)
    target_count = -(-n // multiple) * multiple
    indices = torch.arange(n)
    while len(indices) < target_count:
        duplicates = torch.randperm(n, generator=generator)
        indices = torch.cat([indices, duplicates[: target_count - len(indices)]])
    return indices


def adjust_delete(n: int, multiple: int, generator: torch.Generator) -> Tensor:
    """Indices (n',) of n sequences less random ones, n' the last multiple of `multiple`, in order.

    Args:
        n: sequences.
        multiple: what the number must be divisible by.
        generator: CPU generator that draws the dropped ones.

    Source: published code (RAGEN `adjust_batch`, mode delete).
    Degenerate: fewer than `multiple` sequences leave none.
    """
    _check_multiple(n, multiple)
    kept_indices = torch.randperm(n, generator=generator)[: n - n % multiple]
    return kept_indices.sort().values


def _check_multiple(n: int, multiple: int) -> None:
    if n < 0 or multiple < 1:
        raise ValueError(
            f"{n} sequences to a multiple of {multiple}; the first must be at least 0, the second at least 1."
        )

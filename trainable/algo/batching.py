"""Order and number of the sequences of an update, as index tensors. Shape: B sequences."""

import torch
from torch import Tensor


def length_stratified_order(lengths: Tensor) -> Tensor:
    """Order (B,) of the sequences, short to long and back to short, so that a mini-batch holds similar lengths.

        sort by (length, index); then ranks 0, 2, 4, … upwards followed by ranks …, 5, 3, 1 downwards

    Args:
        lengths: (B,) tokens of each sequence of one device.

    Returns:
        (B,) int64, a permutation.

    Source: published code (verl 0.6.1 `balance_batch`).  Degenerate: equal lengths give 0, 2, 4, …, 5, 3, 1.
    """
    ranked = torch.sort(lengths, stable=True).indices
    return torch.cat([ranked[::2], ranked[1::2].flip(0)])


def whole_group_order(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Order (B,) of the sequences in which each group stands together, groups of similar length side by side.

        the groups in `length_stratified_order` of their tokens; a group's sequences in order of their index

    Args:
        lengths: (B,) tokens of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt.

    Returns:
        (B,) int64, a permutation. Where groups have G sequences each, pieces of k G of them hold k whole groups.

    Source: definition.  Degenerate: groups of one give `length_stratified_order`, if their ids ascend.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    tokens = lengths.new_zeros(int(group.max()) + 1).index_add(0, group, lengths)
    rank = torch.argsort(length_stratified_order(tokens))
    return torch.argsort(rank[group], stable=True)


def cut_by_tokens(lengths: Tensor, most: int, pads: bool = False) -> list[Tensor]:
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
    if most < 1:
        raise ValueError(f"a pass of at most {most} tokens; it must be at least 1.")
    ranked = torch.sort(lengths, stable=True)
    sizes: list[int] = []
    read = 0  # by the pass under way, with the sequence at hand
    for length in ranked.values.tolist():
        if sizes:
            read = (sizes[-1] + 1) * length if pads else read + length
        if not sizes or read > most:
            sizes.append(0)
            read = length
        sizes[-1] += 1
    return list(ranked.indices.split(sizes)) if sizes else []


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
    _check(n, multiple)
    wanted = -(-n // multiple) * multiple
    indices = torch.arange(n)
    while len(indices) < wanted:
        duplicates = torch.randperm(n, generator=generator)
        indices = torch.cat([indices, duplicates[: wanted - len(indices)]])
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
    _check(n, multiple)
    kept = torch.randperm(n, generator=generator)[: n - n % multiple]
    return kept.sort().values


def _check(n: int, multiple: int) -> None:
    if n < 0 or multiple < 1:
        raise ValueError(
            f"{n} sequences to a multiple of {multiple}; the first must be at least 0, the second at least 1."
        )

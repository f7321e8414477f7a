"""Order, split and duplicate the sequences of an update, as index tensors. Shape: B sequences."""

import torch
from torch import Tensor


def order_length_stratified(lengths: Tensor) -> Tensor:
    """Order the sequences from short to long and back to short, so that neighbors have similar lengths.

        sort by (length, index); then ranks 0, 2, 4, … upwards followed by ranks …, 5, 3, 1 downwards

    lengths: (B,) tokens of each sequence on one device.

    Returns (B,) int64, a permutation.

    Example:
        >>> order = order_length_stratified(torch.tensor([30, 10, 20, 40]))
        >>> order.tolist()  # lengths 10, 30, 40, 20
        [1, 0, 3, 2]

    Source: published code (verl 0.6.1 `balance_batch`).  Degenerate: equal lengths give 0, 2, 4, …, 5, 3, 1.
    """
    indices = torch.sort(lengths, stable=True).indices
    return torch.cat([indices[::2], indices[1::2].flip(0)])


def order_by_group(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Order the sequences so that each group is contiguous and groups of similar length are neighbors.

        groups ordered by `order_length_stratified` of their tokens; the sequences of a group by index

    lengths: (B,) tokens of each sequence. group_ids: (B,) int, equal for the rollouts of one prompt.

    Returns (B,) int64, a permutation. If every group has G sequences, slices of k G sequences are k complete groups.

    Example:
        >>> order_by_group(torch.tensor([4, 1, 4, 1]), group_ids=torch.tensor([7, 3, 7, 3])).tolist()
        [1, 3, 0, 2]

    Source: definition.  Degenerate: for groups of one with ascending ids, equal to `order_length_stratified`.
    """
    # Groups may have been filtered out, so ids have gaps: number the groups that are left.
    _, group_index = torch.unique(group_ids, return_inverse=True)
    group_tokens = lengths.new_zeros(int(group_index.max()) + 1).index_add(0, group_index, lengths)
    rank = torch.argsort(order_length_stratified(group_tokens))
    return torch.argsort(rank[group_index], stable=True)  # stable: keeps the order of the indices within a group


def split_by_tokens(lengths: Tensor, max_tokens: int, needs_padding: bool = False) -> list[Tensor]:
    """Split the sequences into passes: neighbors in length, with at most `max_tokens` tokens in total.

        sort by (length, index); a pass takes sequences until the next one would not fit

    lengths: (B,) tokens of each sequence, on the CPU. max_tokens: maximum tokens of a pass. A longer sequence is a pass
    by itself. needs_padding: whether the model pads, so that each sequence counts as much as the longest in its pass.

    Returns int64 indices of each pass, short sequences first; every sequence is in exactly one pass.

    Example:
        >>> passes = split_by_tokens(torch.tensor([5, 2, 3, 9]), max_tokens=6)
        >>> [indices.tolist() for indices in passes]  # 2 + 3 tokens, 5 tokens, 9 tokens
        [[1, 2], [0], [3]]

    Source: definition.  Degenerate: no sequences give no passes.
    """
    sorted_lengths = torch.sort(lengths, stable=True)
    sizes: list[int] = []
    pass_tokens = 0  # of the current pass, with the sequence under consideration
    for length in sorted_lengths.values.tolist():
        if sizes:
            # Lengths ascend, so all others are padded to the newest sequence.
            pass_tokens = (sizes[-1] + 1) * length if needs_padding else pass_tokens + length
        if not sizes or pass_tokens > max_tokens:
            sizes.append(0)
            pass_tokens = length
        sizes[-1] += 1
    return list(sorted_lengths.indices.split(sizes)) if sizes else []


def adjust_copy(n: int, multiple: int, generator: torch.Generator) -> Tensor:
    """Pad the indices of n sequences with random duplicates up to a multiple of `multiple`.

    n: number of sequences. multiple: the number of indices becomes divisible by this. generator: CPU generator that
    draws the duplicates.

    Returns int64: 0 … n − 1 in order, then the duplicates. Up to n duplicates are distinct, and more repeat sequences
    as evenly as possible.

    Example:
        >>> indices = adjust_copy(3, 4, torch.Generator().manual_seed(0))
        >>> indices[:3].tolist(), len(indices)
        ([0, 1, 2], 4)

    Source: published code (RAGEN `adjust_batch`, mode copy, which cannot draw more than n).
    Degenerate: nothing is added if n is 0 or already divisible.
    """
    target_count = -(-n // multiple) * multiple  # rounded up
    indices = torch.arange(n)
    while len(indices) < target_count:
        # With a permutation, no sequence is repeated before all others have been drawn.
        duplicates = torch.randperm(n, generator=generator)
        indices = torch.cat([indices, duplicates[: target_count - len(indices)]])
    return indices

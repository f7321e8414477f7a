"""Assign groups to buckets by their reward spread, for the gradient analysis of each bucket. Shape: P groups."""

import torch
from torch import Tensor

FIXED_EDGES = (1.0, 2.0, 3.0, 4.0, 5.0)  # published (RAGEN), in units of the reward


def assign_quantile_buckets(scores: Tensor, max_buckets: int = 6) -> Tensor:
    """Bucket (P,) of each group, equally many groups per bucket from the smallest score up; the last takes the rest.

        n = min(max_buckets, P),  size = floor(P / n),  bucket of rank r = min(floor(r / size), n − 1)

    Args:
        scores: (P,) score of each group, such as its reward std; equal scores rank by index.
        max_buckets: number of buckets at most.

    Returns:
        (P,) int64 from 0.

    Example:
        >>> assign_quantile_buckets(torch.tensor([0.3, 0.1, 0.2, 0.4]), max_buckets=2).tolist()
        [1, 0, 0, 1]

    Source: published code (RAGEN `split_into_buckets`, mode quantile).  Degenerate: no group gives an empty result.
    """
    if max_buckets < 1:
        raise ValueError(f"max_buckets is {max_buckets}; it must be at least 1, such as 6.")
    num_groups = len(scores)
    num_buckets = min(max_buckets, num_groups)
    # The inverse of the sorting permutation.
    ranks = torch.empty(num_groups, dtype=torch.long)
    ranks[torch.sort(scores, stable=True).indices] = torch.arange(num_groups)
    # Each max() is for a batch without groups, where a division or a clamp would fail.
    return (ranks // max(1, num_groups // max(1, num_buckets))).clamp(max=max(0, num_buckets - 1))


def assign_fixed_buckets(scores: Tensor, edges: tuple[float, ...] = FIXED_EDGES) -> Tensor:
    """Bucket (P,) of each group between fixed edges: [−∞, e_1), [e_1, e_2), …, [e_n, ∞).

    Args:
        scores: (P,) score of each group.
        edges: ascending.

    Returns:
        (P,) int64 from 0; a bucket may be empty.

    Example:
        >>> assign_fixed_buckets(torch.tensor([0.5, 1.0, 7.0])).tolist()
        [0, 1, 5]

    Source: published code (RAGEN `split_into_buckets`, mode fixed_rv).  Degenerate: no group gives an empty result.
    """
    return torch.bucketize(scores, torch.tensor(edges, dtype=scores.dtype), right=True)

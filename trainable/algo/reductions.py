"""Reductions of per-token numbers: masked mean, whitening, and loss aggregation as weights.

Loss aggregations are linear in the loss, so each is a weight per token, and the loss to minimize is
`(weights * loss).sum()`. Shapes: B sequences, T tokens. `mask` is True at trained tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from trainable.algo.names import TOKEN_MEANS

VARIANCE_FLOOR = 1e-8  # verl 0.6.1 adds this to the variance, so that equal values are not divided by 0


def masked_mean(x: Tensor, mask: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Average `x` over the positions where `mask` is True: over all of them, or over the dimensions `dim`.

        mean = Σ m x / Σ m

    x: any shape. mask: bool, shape of `x`.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])).item()
        2.0

    Degenerate: an empty mask gives 0 with zero gradient. Values of `x` outside the mask are ignored, even NaN.
    """
    return torch.where(mask, x, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Center and scale `x` over all positions where `mask` is True. The result is 0 elsewhere.

        y = (x − mean) / sqrt(var + 1e-8),   var = Σ m (x − mean)² / (Σ m − 1)

    x: any shape. mask: bool, shape of `x`.

    Example:
        >>> x, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
        >>> masked_whiten(x, mask).double().round(decimals=4).tolist()  # mean 2, var 2
        [-0.7071, 0.7071, 0.0]

    Source: published code (verl 0.6.1 `masked_whiten`).
    Degenerate: zeros with one trained token or none, where the published code raises.
    """
    # In float32, the mean of many similar numbers has a rounding error, which dividing by a small std would magnify.
    x64 = x.double()
    centered = torch.where(mask, x64 - masked_mean(x64, mask), 0)
    variance = centered.square().sum() / (mask.sum() - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + VARIANCE_FLOOR)).to(x.dtype)


def compute_loss_weights(
    mask: Tensor, mode: str, micro_batch_size: int | None = None, padded_length: int | None = None
) -> Tensor:
    """Compute weights (B, T) such that `(weights * loss).sum()` is the aggregation `mode` of the loss.

        token-mean               Σ m L / Σ m of each micro-batch, averaged    PPO (verl 0.6.1), TRL's bnpo
        token-mean-global        Σ m L / Σ m                                  DAPO (newer verl's token-mean, TRL's dapo)
        seq-mean-token-sum       mean over sequences of Σ_t m L               Dr. GRPO
        seq-mean-token-mean      mean over sequences of Σ_t m L / Σ_t m       GRPO
        seq-mean-token-sum-norm  Σ m L / padded_length                        a sum over sequences, not a mean

    With `micro_batch_size`, each micro-batch of that many consecutive sequences is aggregated separately, and the
    results are averaged: token-mean is then a mean of micro-batch means, and depends on the micro-batch size.
    token-mean-global always aggregates all tokens together.

    mask: (B, T) bool, the trained tokens. mode: one of `LOSS_AGG_MODES`. micro_batch_size: sequences in a micro-batch;
    None aggregates all B at once. padded_length: divisor of seq-mean-token-sum-norm, in tokens; None means T.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> compute_loss_weights(mask, "seq-mean-token-mean").tolist()
        [[0.25, 0.25], [0.5, 0.0]]
        >>> compute_loss_weights(mask, "token-mean").double().round(decimals=4).tolist()
        [[0.3333, 0.3333], [0.3333, 0.0]]
        >>> compute_loss_weights(mask, "token-mean", micro_batch_size=1).tolist()
        [[0.25, 0.25], [0.5, 0.0]]
        >>> compute_loss_weights(mask, "token-mean-global", micro_batch_size=1).double().round(decimals=4).tolist()
        [[0.3333, 0.3333], [0.3333, 0.0]]

    Source: published code (verl 0.6.1 `agg_loss`, and its division by the number of accumulation steps);
    token-mean-global is `agg_loss` of later versions with `batch_num_tokens`.
    A short last micro-batch counts as much as a full one: the divisor is ceil(B / micro_batch_size). The published
    divisor is the configured mini-batch size over the micro-batch size, which is the same for a full mini-batch.
    Degenerate: the two sequence means exclude sequences without trained tokens, but a micro-batch without trained
    tokens counts in the divisor. An empty mask gives zero weights.
    """
    whole = max(len(mask), 1)
    micro_batches = torch.split(mask.float(), whole if mode == "token-mean-global" else micro_batch_size or whole)
    weights = [_compute_micro_batch_weights(trained, mode, padded_length) for trained in micro_batches]
    return torch.cat(weights) / len(weights)


def _compute_micro_batch_weights(float_mask: Tensor, mode: str, padded_length: int | None) -> Tensor:
    """Compute the weights (B, T) of one micro-batch from its mask as floats. Clamps avoid divisions by 0."""
    if mode in TOKEN_MEANS:
        return float_mask / float_mask.sum().clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        return float_mask / (padded_length or float_mask.shape[1])
    sequence_lengths = float_mask.sum(dim=1, keepdim=True)  # (B, 1)
    sequence_weights = float_mask / sequence_lengths.clamp(min=1) if mode == "seq-mean-token-mean" else float_mask
    return sequence_weights / (sequence_lengths > 0).sum().clamp(min=1)


TreeWeighting = Literal["root-and-children", "one-per-tree"]
"""root-and-children: the root has weight 1, and its children 1 together, as published, so that trees with children have
twice the weight of trees without. one-per-tree: the root has weight 1/2 and its children 1/2 together, or a root
without children 1, so that the weight of a tree does not depend on its shape."""


@torch.no_grad()
def compute_tree_weights(
    mask: Tensor,
    turns: Tensor,
    tree_ids: Tensor,
    is_root: Tensor,
    weighting: TreeWeighting = "root-and-children",
    train_children: bool = True,
) -> Tensor:
    """Compute weights (B, T) such that `(weights * loss).sum()` is the loss, a mean over trees.

    A segment is one turn of one rollout. The children of a tree have equal weights, a rollout splits its weight equally
    among its segments, and a segment splits its weight equally among its trained tokens.

        root segment: w_root / turns of the root         child segment: w_children / (children · turns of the child)
        root-and-children: w_root = w_children = 1       one-per-tree: w_root = w_children = 1/2, or w_root = 1 alone

    Args:
        mask: (B, T) bool, the trained tokens of each rollout.
        turns: (B, T) int, the turn of each token, from 0.
        tree_ids: (B,) int, equal for the rollouts of one tree.
        is_root: (B,) bool, whether the rollout is the root of its tree.
        weighting: how root and children split the weight.
        train_children: whether children are trained. If not, they have no weight, and w_root = 1.

    Example:
        >>> mask = torch.ones(3, 2, dtype=torch.bool)  # a root of two turns, its child of one turn, a root of one turn
        >>> turns = torch.tensor([[0, 1], [0, 0], [0, 0]])
        >>> ids, is_root = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
        >>> compute_tree_weights(mask, turns, ids, is_root).tolist()
        [[0.25, 0.25], [0.25, 0.25], [0.25, 0.25]]
        >>> compute_tree_weights(mask, turns, ids, is_root, "one-per-tree").tolist()
        [[0.125, 0.125], [0.125, 0.125], [0.25, 0.25]]

    Source: rlm_grpo of deepakvijaykee/rl-experiments for root-and-children; one-per-tree is ours.
    Degenerate: a rollout without trained tokens has no loss, and its weight is not given to others.
    """
    trees, tree_index = tree_ids.unique(return_inverse=True)
    num_turns = torch.where(mask, turns + 1, 0).amax(1).clamp_min(1)
    children = torch.bincount(tree_index[~is_root], minlength=len(trees))[tree_index].double()
    share = 0.5 if weighting == "one-per-tree" and train_children else 1.0
    root_weights = torch.where(children > 0, share, 1.0)
    child_weights = share * float(train_children) / children.clamp_min(1)
    segment_weights = torch.where(is_root, root_weights, child_weights) / (num_turns * max(len(trees), 1))
    # Number of trained tokens in each turn, (B, turns), and in the turn of each token, (B, T).
    turn_tokens = torch.zeros(
        len(mask), int(num_turns.max()) if len(mask) else 1, dtype=torch.double, device=mask.device
    )
    turn_tokens = turn_tokens.scatter_add(1, torch.where(mask, turns, 0), mask.double())
    tokens = turn_tokens.gather(1, torch.where(mask, turns, 0)).clamp_min(1)
    return torch.where(mask, segment_weights[:, None] / tokens, 0.0)

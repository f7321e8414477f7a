"""Credit over trees of rollouts: how much of the loss each turn of a root and of its children has."""

from typing import Literal

import torch
from torch import Tensor

TreeWeighting = Literal["root-and-children", "one-per-tree"]
"""root-and-children: the root has weight 1, and all children of a tree together have 1, as published: a tree that asked
children has twice the weight of one that did not. one-per-tree: root and children have 1/2 each, and a root without
children has 1, so that the weight of a tree does not depend on its shape."""


@torch.no_grad()
def compute_tree_weights(
    mask: Tensor,
    tree_ids: Tensor,
    rollout_ids: Tensor,
    is_root: Tensor,
    weighting: TreeWeighting = "root-and-children",
    train_children: bool = True,
) -> Tensor:
    """The weight of each token in the loss, (B, T): the loss is the sum of weight times loss of a token.

    A segment is one turn of one rollout. A rollout shares its weight equally among its segments, the children of a tree
    share theirs equally among themselves, and a segment shares its own equally among its trained tokens. The loss is
    the mean over trees.

        root segment: w_root / turns of the root         child segment: w_children / (children · turns of the child)
        root-and-children: w_root = w_children = 1       one-per-tree: w_root = w_children = 1/2, or w_root = 1 alone

    Args:
        mask: (B, T) bool, the trained tokens of each segment.
        tree_ids: (B,) int, equal for the segments of one tree.
        rollout_ids: (B,) int, equal for the segments of one rollout, and different for all rollouts of the batch.
        is_root: (B,) bool, whether the segment belongs to the root of its tree.
        weighting: how root and children share.
        train_children: whether children are trained. If not, they have no weight, and roots have w_root = 1.

    Example:
        >>> mask = torch.ones(3, 2, dtype=torch.bool)  # a root of one turn, its child of one turn, a root alone
        >>> ids, is_root = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
        >>> compute_tree_weights(mask, ids, torch.tensor([0, 1, 2]), is_root).sum(1).tolist()
        [0.5, 0.5, 0.5]
        >>> compute_tree_weights(mask, ids, torch.tensor([0, 1, 2]), is_root, "one-per-tree").sum(1).tolist()
        [0.25, 0.25, 0.5]

    Source: rlm_grpo of deepakvijaykee/rl-experiments for root-and-children; one-per-tree is ours.
    Degenerate: a segment without a trained token has no loss; its share is not given to others.
    """
    trees, tree_index = tree_ids.unique(return_inverse=True)
    rollouts, rollout_index = rollout_ids.unique(return_inverse=True)
    turns = torch.bincount(rollout_index, minlength=len(rollouts))[rollout_index].double()
    # Of each rollout its tree, and whether it is a child.
    rollout_tree = torch.zeros(len(rollouts), dtype=torch.long, device=mask.device).scatter(
        0, rollout_index, tree_index
    )
    is_child = torch.zeros(len(rollouts), dtype=torch.bool, device=mask.device).scatter(0, rollout_index, ~is_root)
    children = torch.bincount(rollout_tree[is_child], minlength=len(trees))[tree_index].double()
    has_children = children > 0
    share = 0.5 if weighting == "one-per-tree" and train_children else 1.0
    root_weights = torch.where(has_children, share, 1.0) / turns
    child_weights = share * float(train_children) / (children.clamp_min(1) * turns)
    segment_weights = torch.where(is_root, root_weights, child_weights) / max(len(trees), 1)
    tokens = mask.sum(1).clamp_min(1)
    return torch.where(mask, (segment_weights / tokens)[:, None], 0.0)

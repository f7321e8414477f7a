"""Credit assignment in trees of rollouts: the weight in the loss of each turn of a root and its children."""

from typing import Literal

import torch
from torch import Tensor

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

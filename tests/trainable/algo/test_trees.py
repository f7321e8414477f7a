"""Tests of the weights over trees of rollouts: hand-worked trees, sums, a literal oracle, and gradients."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.algo import examples
from trainable.algo.reductions import TreeWeighting, compute_tree_weights

WEIGHTINGS = get_args(TreeWeighting)
Shape = list[list[int]]
"""Of each tree the turns of its rollouts: first the root, then its children."""


def list_segments(shape: Shape) -> list[tuple[int, int, bool, int]]:
    """Of each segment its tree, its rollout, whether that is a root, and its turn."""
    rollouts = [(tree, place == 0, turns) for tree, trees in enumerate(shape) for place, turns in enumerate(trees)]
    return [
        (tree, number, is_root, turn) for number, (tree, is_root, turns) in enumerate(rollouts) for turn in range(turns)
    ]


def make_batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of `compute_tree_weights` for trees of this shape.

    Segment i has a token that is not trained and then 1 + i % 3 that are.
    """
    segments = list_segments(shape)
    num_rollouts = segments[-1][1] + 1
    masks: list[list[bool]] = [[] for _ in range(num_rollouts)]
    turns: list[list[int]] = [[] for _ in range(num_rollouts)]
    for number, (_, rollout, _, turn) in enumerate(segments):
        tokens = [False, *[True] * (1 + number % 3)]
        masks[rollout] += tokens
        turns[rollout] += [turn] * len(tokens)
    longest = max(map(len, masks))
    mask, turn_ids = (torch.tensor([row + [0] * (longest - len(row)) for row in rows]) for rows in (masks, turns))
    firsts = {rollout: (tree, is_root) for tree, rollout, is_root, _ in segments}
    tree_ids, is_root = (torch.tensor(column) for column in zip(*firsts.values(), strict=True))
    return mask.bool(), turn_ids, tree_ids, is_root


def compute_segment_weights(shape: Shape, weighting: TreeWeighting, train_children: bool = True) -> list[float]:
    """The weight of each segment, without the mean over trees."""
    mask, turns, *ids = make_batch(shape)
    weights = compute_tree_weights(mask, turns, *ids, weighting, train_children) * len(shape)
    return [float(weights[rollout][turns[rollout] == turn].sum()) for _, rollout, _, turn in list_segments(shape)]


@pytest.mark.parametrize(
    ("shape", "published", "invariant"),
    [
        # No child: a root of two turns.
        ([[2]], [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
        # One child of two turns.
        ([[1, 2]], [1, 1 / 2, 1 / 2], [1 / 2, 1 / 4, 1 / 4]),
        # Two children, of one turn and of three.
        ([[2, 1, 3]], [1 / 2, 1 / 2, 1 / 2, 1 / 6, 1 / 6, 1 / 6], [1 / 4, 1 / 4, 1 / 4, 1 / 12, 1 / 12, 1 / 12]),
    ],
)
def test_hand_worked_trees(shape: Shape, published: list[float], invariant: list[float]) -> None:
    assert compute_segment_weights(shape, "root-and-children") == pytest.approx(published, rel=1e-12)
    assert compute_segment_weights(shape, "one-per-tree") == pytest.approx(invariant, rel=1e-12)


shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4)


@examples
@given(shapes, st.sampled_from(WEIGHTINGS), st.booleans(), st.randoms(use_true_random=False))
def test_weights_equal_the_loop_in_any_order(shape: Shape, weighting: TreeWeighting, train: bool, rng: object) -> None:
    batch = make_batch(shape)
    order = list(range(len(batch[0])))
    rng.shuffle(order)  # type: ignore[attr-defined]
    mask, turn_ids, tree_ids, is_root = (tensor[order] for tensor in batch)
    weights = compute_tree_weights(mask, turn_ids, tree_ids, is_root, weighting, train)
    for row in range(len(order)):
        rollouts = shape[int(tree_ids[row])]
        shares = weighting == "one-per-tree" and len(rollouts) > 1 and train
        weight = (0.5 if shares else 1.0) / (int(turn_ids[row].max()) + 1)
        if not is_root[row]:
            weight = weight / (len(rollouts) - 1) if train else 0.0
        for trained, turn, token_weight in zip(mask[row], turn_ids[row], weights[row], strict=True):
            tokens = int((mask[row] & (turn_ids[row] == turn)).sum())
            expected = weight / (len(shape) * tokens) if trained else 0.0
            assert token_weight.item() == pytest.approx(expected, rel=1e-12)


def test_a_rollout_without_a_trained_token_has_no_weight() -> None:
    mask, *others = make_batch([[2, 1]])
    weights = compute_tree_weights(mask & torch.tensor([[False], [True]]), *others)
    assert weights.sum(1).tolist() == [0.0, 1.0]

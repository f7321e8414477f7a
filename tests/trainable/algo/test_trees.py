"""Tests of the weights over trees of rollouts: hand-worked trees, sums, a literal oracle, and gradients."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.algo import examples
from trainable.algo.trees import TreeWeighting, compute_tree_weights

WEIGHTINGS = get_args(TreeWeighting)
Shape = list[list[int]]
"""Of each tree the turns of its rollouts: first the root, then its children."""


def make_batch(shape: Shape, tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of `compute_tree_weights` for trees of this shape; segment i has 1 + i % tokens trained tokens."""
    rows, rollout = [], 0
    for tree, rollouts in enumerate(shape):
        for place, turns in enumerate(rollouts):
            rows += [(tree, rollout, place == 0)] * turns
            rollout += 1
    mask = torch.arange(tokens) <= torch.arange(len(rows))[:, None] % tokens
    tree_ids, rollout_ids, is_root = (torch.tensor(column) for column in zip(*rows, strict=True))
    return mask, tree_ids, rollout_ids, is_root


def compute_segment_weights(shape: Shape, weighting: TreeWeighting, train_children: bool = True) -> list[float]:
    weights = compute_tree_weights(*make_batch(shape), weighting, train_children)
    return (weights.sum(1) * len(shape)).tolist()  # without the mean over trees


@pytest.mark.parametrize(
    ("shape", "published", "invariant"),
    [
        # No child: a root of two turns.
        ([[2]], [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
        # One child of two turns.
        ([[1, 2]], [1, 1 / 2, 1 / 2], [1 / 2, 1 / 4, 1 / 4]),
        # Two children, of one turn and of three.
        (
            [[2, 1, 3]],
            [1 / 2, 1 / 2, 1 / 2, 1 / 6, 1 / 6, 1 / 6],
            [1 / 4, 1 / 4, 1 / 4, 1 / 12, 1 / 12, 1 / 12],
        ),
    ],
)
def test_hand_worked_trees(shape: Shape, published: list[float], invariant: list[float]) -> None:
    assert compute_segment_weights(shape, "root-and-children") == pytest.approx(published, rel=1e-12)
    assert compute_segment_weights(shape, "one-per-tree") == pytest.approx(invariant, rel=1e-12)


shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4)


@examples
@given(shapes, st.booleans())
def test_the_weight_of_a_tree_depends_on_its_shape_only_where_published(shape: Shape, train_children: bool) -> None:
    batch = make_batch(shape)
    for weighting in WEIGHTINGS:
        weights = compute_tree_weights(*batch, weighting, train_children).sum(1) * len(shape)
        for tree, rollouts in enumerate(shape):
            has_trained_children = len(rollouts) > 1 and train_children
            expected = 2 if weighting == "root-and-children" and has_trained_children else 1
            assert weights[batch[1] == tree].sum().item() == pytest.approx(expected, rel=1e-12)


@examples
@given(shapes, st.sampled_from(WEIGHTINGS), st.booleans(), st.randoms(use_true_random=False))
def test_weights_equal_the_loop_in_any_order(shape: Shape, weighting: TreeWeighting, train: bool, rng: object) -> None:
    mask, tree_ids, rollout_ids, is_root = make_batch(shape)
    order = list(range(len(mask)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    weights = compute_tree_weights(mask[order], tree_ids[order], rollout_ids[order], is_root[order], weighting, train)
    for row, segment in enumerate(order):
        rollouts = shape[int(tree_ids[segment])]
        turns = int((rollout_ids == rollout_ids[segment]).sum())
        shares = weighting == "one-per-tree" and len(rollouts) > 1 and train
        weight = (0.5 if shares else 1.0) / turns
        if not is_root[segment]:
            weight = weight / (len(rollouts) - 1) if train else 0.0
        weight /= len(shape) * int(mask[segment].sum())
        assert weights[row].tolist() == pytest.approx([weight * bool(trained) for trained in mask[segment]], rel=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_gradient_of_a_tree_is_the_weighted_sum_of_those_of_its_segments(weighting: TreeWeighting) -> None:
    shape = [[2, 1, 3], [1]]
    batch = make_batch(shape)
    mask = batch[0]
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(*mask.shape, 5, dtype=torch.float64, generator=generator)
    advantages = torch.where(batch[1] == 0, 1.5, -0.5)  # of its tree, for every segment
    parameter = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)

    def compute_losses() -> torch.Tensor:
        return -advantages[:, None] * torch.tanh(features @ parameter)

    (compute_tree_weights(*batch, weighting) * compute_losses()).sum().backward()
    assert parameter.grad is not None
    gradient = parameter.grad.clone()
    expected = torch.zeros_like(gradient)
    for segment, weight in enumerate(compute_segment_weights(shape, weighting)):
        loss = compute_losses()[segment][mask[segment]].mean() / len(shape)
        expected += weight * torch.autograd.grad(loss, parameter)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_a_segment_without_a_trained_token_has_no_weight() -> None:
    mask, *ids = make_batch([[2]])
    weights = compute_tree_weights(mask & torch.tensor([[False], [True]]), *ids)
    assert weights.sum(1).tolist() == [0.0, 0.5]

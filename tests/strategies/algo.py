"""Hypothesis strategies for trainable/algo: masks with few trained tokens, scores with ties and zeros, and groups."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.examples import draw_examples

# The first call into torch is slow enough to fail hypothesis' own time limit.
examples = draw_examples(60)

numbers = st.one_of(st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5]), st.floats(-10, 10, width=32, allow_subnormal=False))
discounts = st.sampled_from([0.0, 0.3, 0.95, 1.0])


class Sequences(NamedTuple):
    """A batch (B, T), float64, with a mask and turn ids."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    turn_ids: Tensor


def matrix(elements: st.SearchStrategy, rows: int, columns: int) -> st.SearchStrategy:
    row = st.lists(elements, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


@st.composite
def masks(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """Draw a (B, T) bool mask. All False and a single True are frequent."""
    mask_kind = draw(st.sampled_from(["any", "any", "any", "none", "one"]))
    if mask_kind == "any":
        return torch.tensor(draw(matrix(st.booleans(), rows, columns)))
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    if mask_kind == "one":
        mask[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = True
    return mask


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    draw_matrix = lambda elements: torch.tensor(draw(matrix(elements, rows, columns)))  # noqa: E731
    return Sequences(
        rewards=draw_matrix(numbers).double(),
        values=draw_matrix(numbers).double(),
        mask=draw(masks(rows, columns)),
        turn_ids=draw_matrix(st.integers(0, 1)).cumsum(dim=1),
    )


def score_vectors(signed: bool = False) -> st.SearchStrategy:
    """Draw 1 to 10 group scores as float32 numbers, with ties and zeros, or all zero."""
    tied_scores = st.sampled_from([0.0, 0.0, 0.125, 0.25, 1.0, 2.0, 2.0, 6.0])
    positive_scores = st.floats(0, 6.25, width=32, allow_subnormal=False)
    negative_scores = st.floats(-6.25, 0, width=32, allow_subnormal=False)
    element = (
        st.one_of(tied_scores, positive_scores, negative_scores) if signed else st.one_of(tied_scores, positive_scores)
    )
    vectors = st.lists(element, min_size=1, max_size=10)
    zeros = st.integers(1, 10).map(lambda n: [0.0] * n)
    return st.one_of(vectors, vectors, vectors, zeros)


@st.composite
def grouped_scores(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Draw scores (B,) and group ids (B,). Groups may have one member or equal scores, and are interleaved."""
    size = draw(st.integers(1, 10))
    scores = draw(st.lists(numbers, min_size=size, max_size=size))
    return scores, draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size))

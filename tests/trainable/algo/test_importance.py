"""Importance weights against formulas written as loops, and the published corrections by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainable.algo.losses import compute_importance_weights

LOGPROBS = st.floats(-20, 0)
ROWS = st.lists(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=4)
CORRECTIONS = st.tuples(st.floats(1, 8), st.none() | st.floats(0, 1), st.booleans(), st.booleans())


def compute_weight(ratio: float, cap: float, floor: float | None, is_mask: bool) -> float:
    if is_mask:
        return ratio if (floor or 0) <= ratio <= cap else 0.0
    return min(ratio, cap)


@given(ROWS, CORRECTIONS)
def test_weights_are_their_formulas(
    rows: list[list[tuple[float, float, bool]]], correction: tuple[float, float | None, bool, bool]
) -> None:
    trainer, engine, mask = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    weights, is_clipped = compute_importance_weights(trainer, engine, mask.bool(), *correction)
    cap, floor, is_sequence, is_mask = correction
    for number, row in enumerate(rows):
        differences = [one - other if sampled else 0.0 for one, other, sampled in row]
        if is_sequence:
            differences = [math.fsum(differences)] * len(row)
        for position, difference in enumerate(differences):
            expected = compute_weight(math.exp(difference), cap, floor, is_mask)
            boundaries = [math.log(bound) for bound in (cap, floor) if bound]
            if min(abs(difference - boundary) for boundary in boundaries) > 1e-9:  # rounding decides at a boundary
                assert float(weights[number, position]) == pytest.approx(expected, rel=1e-6)
                is_ratio = math.isclose(expected, math.exp(difference))
                assert bool(is_clipped[number, position]) == (not is_ratio)


def test_weights_carry_no_gradient_and_never_overflow() -> None:
    trainer = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]], requires_grad=True)
    engine = torch.tensor([[-1.0, -300.0], [-1.0, -1.0]])
    for is_sequence in (False, True):
        mask = torch.ones(2, 2, dtype=torch.bool)
        weights, _ = compute_importance_weights(trainer, engine, mask, 2.0, is_sequence=is_sequence)
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()
        assert weights.dtype == trainer.dtype

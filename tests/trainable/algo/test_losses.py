import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import algo as oracle
from tests.strategies.algo import examples
from trainable.algo.losses import (
    compute_log_ratio,
    entropy_from_logits,
    full_kl,
    logprobs_from_logits,
    ppo_clip_loss,
    value_clip_loss,
)


def compute_gradient(total: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(total, x)
    return gradient


def compute_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return ppo_clip_loss(logprobs, old_logprobs, advantages, 0.2, 0.28, 3.0).loss


@examples
@given(st.lists(st.tuples(*[st.floats(-30, 0)] * 2, st.floats(-5, 5)), min_size=1, max_size=8))
def test_policy_loss_equals_the_formula(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, old_logprobs, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    expected = torch.tensor([oracle.ppo_clip(*token, 0.2, 0.28, 3.0) for token in tokens], dtype=torch.float64)
    torch.testing.assert_close(compute_policy_loss(logprobs, old_logprobs, advantages), expected)


# ratio, advantage, loss, clipped, clipped_lower, gradient
BY_HAND = [
    (1.0, 2.0, -2.0, False, False, -2.0),
    (1.1, 2.0, -2.2, False, False, -2.2),
    (1.5, 2.0, -2.56, True, False, 0.0),  # stops at 1.28
    (0.5, 2.0, -1.0, False, False, -1.0),  # a good token that became rare keeps its full gradient
    (0.5, -2.0, 1.6, True, False, 0.0),  # stops at 0.8
    (1.5, -2.0, 3.0, False, False, 3.0),
    (4.0, -2.0, 6.0, False, True, 0.0),  # dual clip at 3 |A|
    (4.0, 0.0, 0.0, False, False, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "clipped_lower", "slope"), BY_HAND)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: bool, clipped_lower: bool, slope: float
) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = ppo_clip_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28, 3.0)
    assert result.loss.item() == pytest.approx(loss, rel=1e-6)
    assert result.ratio.item() == pytest.approx(ratio, rel=1e-6)
    assert result.clipped.tolist() == [clipped]
    assert result.clipped_lower.tolist() == [clipped_lower]
    assert not result.ratio.requires_grad
    assert compute_gradient(result.loss.sum(), logprobs).item() == pytest.approx(slope)


def test_a_log_ratio_is_clamped_at_20_nats_with_its_sign() -> None:
    old_logprobs = torch.tensor([-51.0, -1.0, -1.5, -2.0, -21.0])
    log_ratios = compute_log_ratio(torch.tensor([-1.0, -51.0, -1.0, -2.0, -1.0]), old_logprobs)
    assert log_ratios.tolist() == [20.0, -20.0, 0.5, 0.0, 20.0]
    assert compute_log_ratio(torch.tensor([math.nan]), torch.zeros(1)).isnan().all()
    logprobs = torch.tensor([-1.0, -51.0, -1.0, -2.0], requires_grad=True)
    log_ratios = compute_log_ratio(logprobs, torch.tensor([-51.0, -1.0, -1.5, -2.0]))
    assert compute_gradient(log_ratios.sum(), logprobs).tolist() == [0.0, 0.0, 1.0, 1.0]


# value, old value, return, loss, clipped, gradient
VALUES = [
    (1.0, 1.0, 3.0, 2.0, False, -2.0),
    (2.0, 1.0, 3.0, 0.5 * 1.5**2, True, 0.0),  # moved towards the return by more than 0.5
    (0.0, 1.0, 3.0, 4.5, False, -3.0),  # moved away
    (9.0, 1.0, 3.0, 18.0, False, 6.0),  # overshot
    (3.0, 4.0, 3.0, 0.125, True, 0.0),
]


@pytest.mark.parametrize(("value", "old_value", "target", "loss", "clipped", "slope"), VALUES)
def test_value_loss_by_hand(
    value: float, old_value: float, target: float, loss: float, clipped: bool, slope: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = value_clip_loss(values, torch.tensor([old_value]), torch.tensor([target]), 0.5)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.tolist() == [clipped]
    assert compute_gradient(result.loss.sum(), values).item() == pytest.approx(slope)


def make_logits(rows: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_entropy_is_the_sum_over_the_vocabulary() -> None:
    logits = make_logits(5, seed=0)
    p = logits.softmax(dim=-1)
    expected = [-sum(x * math.log(x) for x in row) for row in p.tolist()]
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor(expected, dtype=torch.float64))
    by_logsumexp = logits.logsumexp(dim=-1) - (p * logits).sum(dim=-1)
    torch.testing.assert_close(entropy_from_logits(logits), by_logsumexp)
    logits = torch.full((2, 7), 3.0, requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(7)))
    torch.testing.assert_close(compute_gradient(entropy.sum(), logits), torch.zeros(2, 7))


def test_logprobs_are_the_log_softmax_of_the_token() -> None:
    logits, tokens = make_logits(5, seed=1), torch.tensor([0, 6, 3, 3, 1])
    expected = [math.log(row[a]) for row, a in zip(logits.softmax(dim=-1).tolist(), tokens.tolist(), strict=True)]
    torch.testing.assert_close(logprobs_from_logits(logits, tokens), torch.tensor(expected, dtype=torch.float64))
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert entropy_from_logits(logits).item() == 0
    assert logprobs_from_logits(logits, torch.tensor([1])).item() == -1e4


def test_full_kl_is_the_sum_over_the_vocabulary_with_the_policy_first() -> None:
    logits, ref = make_logits(5, seed=2).requires_grad_(), make_logits(5, seed=3)
    pairs = list(zip(logits.softmax(dim=-1).tolist(), ref.softmax(dim=-1).tolist(), strict=True))
    divergence = full_kl(logits, ref)
    torch.testing.assert_close(divergence, torch.tensor([oracle.kl(p, q) for p, q in pairs], dtype=torch.float64))
    expected = torch.tensor([oracle.kl_gradient(p, q) for p, q in pairs], dtype=torch.float64)
    torch.testing.assert_close(compute_gradient(divergence.sum(), logits), expected)
    logits = make_logits(3, seed=4).requires_grad_()
    divergence = full_kl(logits, logits.detach())
    assert divergence.tolist() == [0, 0, 0]
    torch.testing.assert_close(compute_gradient(divergence.sum(), logits), torch.zeros_like(logits))


ROW_FUNCTIONS = {
    "entropy": entropy_from_logits,
    "logprobs": lambda logits: logprobs_from_logits(logits, torch.arange(len(logits)) % 7),
    "full_kl": lambda logits: full_kl(logits, make_logits(len(logits), seed=9).to(logits.dtype)),
}


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_numbers_from_logits_gradcheck(name: str) -> None:
    logits = make_logits(4, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(ROW_FUNCTIONS[name], (logits,))


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_half_precision_logits_are_reduced_in_float32_and_no_rows_are_an_empty_result(name: str) -> None:
    logits = make_logits(4, seed=7).bfloat16()
    assert ROW_FUNCTIONS[name](logits).dtype == torch.float32
    torch.testing.assert_close(ROW_FUNCTIONS[name](logits), ROW_FUNCTIONS[name](logits.float()), rtol=0, atol=2e-2)
    assert ROW_FUNCTIONS[name](torch.zeros(0, 7)).shape == (0,)

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import algo as oracle
from tests.strategies.algo import Sequences, discounts, examples, sequences
from trainable.algo.advantages import bi_level_gae, compute_overlong_penalty, gae
from trainable.algo.reductions import masked_whiten


def list_rows(batch: Sequences) -> list[tuple[list[float], list[float], list[bool]]]:
    return list(zip(batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist(), strict=True))


def make_double(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@examples
@given(sequences(), discounts, discounts)
def test_gae_equals_the_literal_double_sum(batch: Sequences, gamma: float, lam: float) -> None:
    expected = [oracle.gae(*row, gamma, lam) for row in list_rows(batch)]
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    torch.testing.assert_close(advantages, make_double([row_advantages for row_advantages, _ in expected]))
    torch.testing.assert_close(returns, make_double([row_returns for _, row_returns in expected]))
    # Where trained, it is also the published recursion.
    published = make_double([oracle.published_gae(*row, gamma, lam) for row in list_rows(batch)])
    torch.testing.assert_close(advantages[batch.mask], published[batch.mask])


def test_published_vector() -> None:
    nan = float("nan")
    values = torch.tensor([[0.1, 0.2, nan, 0.3, 0.4], [0.0, 0.5, nan, 0.5, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 10.0], [0.0, 0.0, 0.0, 0.0, -1.0]])
    mask = torch.tensor([[True, True, False, True, True]]).expand(2, 5)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[9.9, 9.8, 0, 9.7, 9.6], [-1.0, -1.5, 0, -1.5, -1.0]]))
    torch.testing.assert_close(returns, torch.tensor([[10.0, 10, 0, 10, 10], [-1.0, -1, 0, -1, -1]]))
    whitened = [[0.9603, 0.9433, 0, 0.9263, 0.9093], [-0.8923, -0.9773, 0, -0.9773, -0.8923]]
    torch.testing.assert_close(masked_whiten(advantages, mask), torch.tensor(whitened), rtol=0, atol=1e-4)
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_long_sequences_equal_the_double_sum_and_keep_float32_accuracy() -> None:
    """Compaction keeps the order of time; the order of an unstable sort differs only beyond sixteen positions."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 100, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 100, generator=generator) < 0.6
    advantages = gae(rewards, values, mask, gamma=0.9, lam=0.8).advantages
    rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    torch.testing.assert_close(advantages, make_double([oracle.gae(*row, 0.9, 0.8)[0] for row in rows]))
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 1000, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 1000, generator=generator) < 0.7
    double_advantages = gae(rewards, values, mask, gamma=1.0, lam=0.97).advantages
    float_advantages = gae(rewards.float(), values.float(), mask, gamma=1.0, lam=0.97).advantages
    torch.testing.assert_close(float_advantages.double(), double_advantages, rtol=1e-4, atol=1e-4)


@examples
@given(sequences(), discounts, discounts, discounts)
def test_bi_level_gae_equals_the_loop(batch: Sequences, gamma: float, lam: float, high: float) -> None:
    expected = [
        oracle.bi_level_gae(*row, turns, gamma, lam, high)
        for row, turns in zip(list_rows(batch), batch.turn_ids.tolist(), strict=True)
    ]
    advantages, returns = bi_level_gae(batch.rewards, batch.values, batch.mask, batch.turn_ids, gamma, lam, high)
    torch.testing.assert_close(advantages, make_double([row_advantages for row_advantages, _ in expected]))
    torch.testing.assert_close(returns, make_double([row_returns for _, row_returns in expected]))


def test_a_turn_without_a_reward_is_a_turn_of_its_own() -> None:
    # The published rule finds turn ends by non-zero reward and would join this turn to the next one.
    rewards, values = torch.tensor([[0.0, 0.0, 0.0, 4.0]]), torch.zeros(1, 4)
    mask, turn_ids = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]])
    returns = bi_level_gae(rewards, values, mask, turn_ids, gamma=1.0, lam=1.0, high_level_gamma=0.5).returns
    assert returns.tolist() == [[2, 2, 4, 4]]


@given(st.integers(1, 50), st.data())
def test_the_overlong_penalty_is_that_of_dapo(max_tokens: int, data: st.DataObject) -> None:
    buffer, length = data.draw(st.integers(1, max_tokens)), data.draw(st.integers(1, max_tokens))
    # Eq. 13 of arXiv:2503.14476; a reply of more than L_max tokens cannot be sampled.
    expected = 0.0 if length <= max_tokens - buffer else ((max_tokens - buffer) - length) / buffer
    assert compute_overlong_penalty(length, max_tokens, buffer, 1.0) == pytest.approx(expected)
    assert compute_overlong_penalty(length, max_tokens, buffer, 0.3) == pytest.approx(0.3 * expected)
    assert compute_overlong_penalty(max_tokens, max_tokens, buffer, 2.0) == -2.0

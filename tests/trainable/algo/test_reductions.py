import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import algo as oracle
from tests.strategies.algo import Sequences, examples, sequences
from trainable.algo.names import LOSS_AGG_MODES
from trainable.algo.reductions import compute_loss_weights, masked_mean, masked_whiten


@examples
@given(sequences())
def test_masked_mean_is_the_mean_of_the_subset(batch: Sequences) -> None:
    x, mask = batch.values, batch.mask
    expected = x[mask].mean() if mask.any() else torch.tensor(0.0, dtype=x.dtype)
    torch.testing.assert_close(masked_mean(x, mask), expected)


def test_masked_mean_of_an_empty_mask_is_zero_and_untrained_positions_are_not_read() -> None:
    x = torch.tensor([3.0, float("inf")], requires_grad=True)
    mean = masked_mean(x, torch.zeros(2, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]
    x = torch.tensor([1.0, float("nan"), 4.0], requires_grad=True)
    masked_mean(x, torch.tensor([True, False, True])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0, 0.5]


@examples
@given(sequences())
def test_whitening_equals_the_literal_formula(batch: Sequences) -> None:
    whitened = masked_whiten(batch.values, batch.mask)
    expected = oracle.whiten(batch.values.flatten().tolist(), batch.mask.flatten().tolist())
    torch.testing.assert_close(whitened.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_whitening_of_few_and_of_equal_tokens() -> None:
    whitened = masked_whiten(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]))
    torch.testing.assert_close(whitened, torch.tensor([-(2**-0.5), 0.0, 2**-0.5]))
    for trained in (False, True):  # no token, and one
        mask = torch.tensor([[False, trained, False]])
        assert masked_whiten(torch.tensor([[5.0, 7.0, float("nan")]]), mask).tolist() == [[0, 0, 0]]
    assert masked_whiten(torch.full((1, 7), 0.1), torch.ones(1, 7, dtype=torch.bool)).abs().max() < 1e-6


@examples
@given(sequences(), st.sampled_from(LOSS_AGG_MODES), st.integers(1, 4), st.sampled_from([None, 20]))
def test_weights_equal_the_literal_aggregation(
    batch: Sequences, mode: str, micro_batch_size: int, padded_length: int | None
) -> None:
    loss, mask = batch.values, batch.mask
    weights = compute_loss_weights(mask, mode)
    assert torch.equal(weights > 0, mask)
    assert weights.dtype == torch.float32
    length = padded_length or mask.shape[1]
    micro_batch_loss = (compute_loss_weights(mask, mode, micro_batch_size, padded_length) * loss).sum()
    expected = oracle.aggregate_micro(loss.tolist(), mask.tolist(), mode, length, micro_batch_size)
    assert micro_batch_loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    mini_batch_loss = (compute_loss_weights(mask, mode, None, padded_length) * loss).sum()
    assert mini_batch_loss.item() == pytest.approx(
        oracle.aggregate(loss.tolist(), mask.tolist(), mode, length), rel=1e-5, abs=1e-5
    )


MASK = torch.tensor([[True, True, True, True], [True, False, False, False], [False, False, False, False]])


def test_weights_of_micro_batches_by_hand() -> None:
    weights = compute_loss_weights(MASK[:2], "token-mean", micro_batch_size=1)
    torch.testing.assert_close(weights, torch.tensor([[0.125, 0.125, 0.125, 0.125], [0.5, 0.0, 0.0, 0.0]]))
    # Short and empty micro-batches count in the divisor, and not in that of the global mean.
    assert compute_loss_weights(MASK, "token-mean", micro_batch_size=2).sum().item() == pytest.approx(0.5)
    for size in (1, 2, None):
        assert torch.equal(compute_loss_weights(MASK, "token-mean-global", size), MASK / 5)
    assert torch.equal(compute_loss_weights(MASK, "seq-mean-token-sum-norm", padded_length=1), MASK.float())
    assert compute_loss_weights(torch.zeros(0, 3, dtype=torch.bool), "token-mean").shape == (0, 3)

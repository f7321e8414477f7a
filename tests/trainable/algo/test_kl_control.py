import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.algo import Sequences, examples, sequences
from trainable.algo.losses import adapt_entropy_coef, adapt_kl_coef, apply_kl_penalty


def test_the_penalty_is_subtracted_on_trained_tokens_only() -> None:
    rewards = torch.tensor([[0.0, 1.0, 5.0]])
    logprobs = torch.tensor([[-1.0, float("nan"), -0.5]], requires_grad=True)
    ref_logprobs = torch.tensor([[-3.0, -1.0, -0.25]])
    mask = torch.tensor([[True, False, True]])
    penalised_rewards = apply_kl_penalty(rewards, logprobs, ref_logprobs, mask, "k1", kl_coef=0.1)
    torch.testing.assert_close(penalised_rewards, torch.tensor([[-0.2, 1.0, 5.025]]))
    assert not penalised_rewards.requires_grad


@examples
@given(sequences(), st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_the_sum_of_penalties_is_the_coefficient_times_the_summed_kl(batch: Sequences, estimator: str) -> None:
    logprobs, ref_logprobs = batch.values, batch.values.flip(1)
    unpenalised = apply_kl_penalty(batch.rewards, logprobs, ref_logprobs, batch.mask, estimator, kl_coef=0.0)
    single_penalty, double_penalty = (
        apply_kl_penalty(batch.rewards, logprobs, ref_logprobs, batch.mask, estimator, kl_coef=c) for c in (1.0, 2.0)
    )
    assert torch.equal(unpenalised, batch.rewards)
    torch.testing.assert_close(double_penalty - unpenalised, 2 * (single_penalty - unpenalised))
    assert torch.equal(single_penalty[~batch.mask], batch.rewards[~batch.mask])


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (0.1, 0.02),  # on target
        (0.11, 0.02 * (1 + 0.1 * 128 / 1000)),
        (0.095, 0.02 * (1 - 0.05 * 128 / 1000)),
        (9.0, 0.02 * (1 + 0.2 * 128 / 1000)),  # error clamped
        (-9.0, 0.02 * (1 - 0.2 * 128 / 1000)),
    ],
)
def test_the_coefficient_moves_towards_the_target(current_kl: float, expected: float) -> None:
    assert adapt_kl_coef(0.02, current_kl, 0.1, n_steps=128, horizon=1000) == pytest.approx(expected)
    assert adapt_kl_coef(0.0, current_kl, 0.1, n_steps=128, horizon=1000) == 0


def test_the_coefficient_of_the_entropy_rises_at_and_below_the_target_and_falls_above() -> None:
    entropies, coef, coefs = [0.1, 0.2, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3, 0.2], 0.1, []
    for entropy in entropies:
        coef = adapt_entropy_coef(coef, entropy, target=0.2, delta=0.25, low=0.1, high=0.75)
        coefs.append(coef)
    assert coefs == pytest.approx([0.35, 0.6, 0.75, 0.75, 0.5, 0.25, 0.1, 0.1, 0.1, 0.35])
    assert adapt_entropy_coef(0.3, 0.1, 0.2, 0.25, 0.3, 0.3) == adapt_entropy_coef(0.3, 0.9, 0.2, 0.25, 0.3, 0.3) == 0.3

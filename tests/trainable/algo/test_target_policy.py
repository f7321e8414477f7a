from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import algo as oracle
from tests.strategies.algo import examples
from trainable.algo.target_policy import compute_group_distributions, target_policy_loss

ETAS = st.sampled_from([0.1, 1.0, 7.0])


class Rollouts(NamedTuple):
    """Summed log-probs, summed old log-probs, skills and group ids of rollouts."""

    logprobs: list[float]
    old_logprobs: list[float]
    skills: list[float]
    group_ids: list[int]

    def to_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = (torch.tensor(column, dtype=torch.float64) for column in self[:3])
        return (*columns, torch.tensor(self.group_ids))  # type: ignore[return-value]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    """Draw interleaved groups of one to ten rollouts whose sums are far apart or close together."""
    count = draw(st.integers(1, 10))
    lowest = draw(st.sampled_from([-3.0, -40.0]))

    def draw_floats(minimum: float, maximum: float) -> list[float]:
        return draw(st.lists(st.floats(minimum, maximum, width=32), min_size=count, max_size=count))

    group_ids = draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    return Rollouts(draw_floats(lowest, 0), draw_floats(lowest, 0), draw_floats(-3, 3), group_ids)


@examples
@given(rollouts(), ETAS)
def test_the_loss_and_its_pull_equal_the_loops(batch: Rollouts, eta: float) -> None:
    result = target_policy_loss(*batch.to_tensors(), eta)
    loss, sequence_weights, entropy, top_prob = oracle.target_policy(*batch, eta)
    assert float(result.loss) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert result.sequence_weights.tolist() == pytest.approx(sequence_weights, rel=1e-9, abs=1e-12)
    assert float(result.entropy) == pytest.approx(entropy, rel=1e-9, abs=1e-12)
    assert float(result.top_prob) == pytest.approx(top_prob, rel=1e-9)


@examples
@given(rollouts(), ETAS)
def test_shares_are_those_of_the_loops(batch: Rollouts, eta: float) -> None:
    """Probabilities equal those of a loop over the groups, and sum to one in each group."""
    shares, group_ids = compute_group_distributions(*batch.to_tensors(), eta), torch.tensor(batch.group_ids)
    assert shares.n_groups == len(set(batch.group_ids))
    for group in set(batch.group_ids):
        rows = group_ids == group
        probabilities = oracle.softmax(
            [logprob for logprob, owner in zip(batch.logprobs, batch.group_ids, strict=True) if owner == group]
        )
        assert shares.log_p[rows].exp().tolist() == pytest.approx(probabilities, rel=1e-9, abs=1e-12)
        assert float(shares.log_q[rows].exp().sum()) == pytest.approx(1)
        assert shares.group_index[rows].unique().numel() == 1
    entropy = -(shares.log_q.exp() * shares.log_q).sum() / shares.n_groups
    assert float(entropy) == pytest.approx(oracle.target_policy(*batch, eta)[2], rel=1e-9, abs=1e-12)


@examples
@given(rollouts(), ETAS)
def test_the_pull_is_minus_the_gradient_and_moves_mass_within_a_group(batch: Rollouts, eta: float) -> None:
    logprobs, *other_inputs = batch.to_tensors()
    logprobs.requires_grad_()
    result = target_policy_loss(logprobs, *other_inputs, eta)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    torch.testing.assert_close(gradient, -result.sequence_weights, rtol=1e-9, atol=1e-12)
    assert not any(tensor.requires_grad for tensor in result[1:])
    old_logprobs, skills, group_ids = other_inputs
    assert float(result.sequence_weights.abs().max()) <= 1 / len(set(batch.group_ids)) + 1e-12
    for group in set(batch.group_ids):
        assert abs(float(result.sequence_weights[group_ids == group].sum())) < 1e-12
    # At the target, nothing is left to pull.
    result = target_policy_loss(old_logprobs + skills / eta, old_logprobs, skills, group_ids, eta)
    assert float(result.sequence_weights.abs().max()) < 1e-9

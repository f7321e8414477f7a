import math
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
    """Summed log-probs, old ones, skills, group ids."""

    now: list[float]
    old: list[float]
    skills: list[float]
    groups: list[int]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        numbers = (torch.tensor(part, dtype=torch.float64) for part in self[:3])
        return (*numbers, torch.tensor(self.groups))  # type: ignore[return-value]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    """Groups of one to ten rollouts, interleaved; sums far apart and close together."""
    size = draw(st.integers(1, 10))
    low = draw(st.sampled_from([-3.0, -40.0]))

    def column(least: float, most: float) -> list[float]:
        return draw(st.lists(st.floats(least, most, width=32), min_size=size, max_size=size))

    groups = draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size))
    return Rollouts(column(low, 0), column(low, 0), column(-3, 3), groups)


@examples
@given(rollouts(), ETAS)
def test_the_loss_and_its_pull_equal_the_loops(drawn: Rollouts, eta: float) -> None:
    found = target_policy_loss(*drawn.tensors(), eta)
    loss, pull, entropy, top = oracle.target_policy(*drawn, eta)
    assert float(found.loss) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert found.sequence_weights.tolist() == pytest.approx(pull, rel=1e-9, abs=1e-12)
    assert float(found.entropy) == pytest.approx(entropy, rel=1e-9, abs=1e-12)
    assert float(found.top_prob) == pytest.approx(top, rel=1e-9)


@examples
@given(rollouts(), ETAS)
def test_shares_are_those_of_the_loops(drawn: Rollouts, eta: float) -> None:
    """One loop per group, and sums of one in each."""
    shares, groups = compute_group_distributions(*drawn.tensors(), eta), torch.tensor(drawn.groups)
    assert shares.n_groups == len(set(drawn.groups))
    for number in set(drawn.groups):
        rows = groups == number
        p = oracle.softmax([now for now, group in zip(drawn.now, drawn.groups, strict=True) if group == number])
        assert shares.log_p[rows].exp().tolist() == pytest.approx(p, rel=1e-9, abs=1e-12)
        assert float(shares.log_q[rows].exp().sum()) == pytest.approx(1)
        assert shares.group_index[rows].unique().numel() == 1
    entropy = -(shares.log_q.exp() * shares.log_q).sum() / shares.n_groups
    assert float(entropy) == pytest.approx(oracle.target_policy(*drawn, eta)[2], rel=1e-9, abs=1e-12)


@examples
@given(rollouts(), ETAS)
def test_the_pull_is_minus_the_gradient(drawn: Rollouts, eta: float) -> None:
    now, *rest = drawn.tensors()
    now.requires_grad_()
    found = target_policy_loss(now, *rest, eta)
    (gradient,) = torch.autograd.grad(found.loss, now)
    torch.testing.assert_close(gradient, -found.sequence_weights, rtol=1e-9, atol=1e-12)
    assert not any(part.requires_grad for part in found[1:])


@examples
@given(rollouts(), ETAS)
def test_the_pull_moves_mass_within_a_group_and_is_bounded(drawn: Rollouts, eta: float) -> None:
    pull, groups = target_policy_loss(*drawn.tensors(), eta).sequence_weights, torch.tensor(drawn.groups)
    count = len(set(drawn.groups))
    assert float(pull.abs().max()) <= 1 / count + 1e-12
    for group in set(drawn.groups):
        assert abs(float(pull[groups == group].sum())) < 1e-12


@examples
@given(rollouts(), ETAS, st.floats(-50, 50))
def test_only_differences_within_a_group_count(drawn: Rollouts, eta: float, shift: float) -> None:
    now, old, skills, groups = drawn.tensors()
    first = groups == groups[0]
    moved = target_policy_loss(now + shift * first, old - shift * first, skills, groups, eta)
    torch.testing.assert_close(
        moved.sequence_weights, target_policy_loss(now, old, skills, groups, eta).sequence_weights, rtol=1e-6, atol=1e-9
    )


@examples
@given(rollouts(), ETAS)
def test_at_the_target_nothing_is_left_to_pull(drawn: Rollouts, eta: float) -> None:
    _, old, skills, groups = drawn.tensors()
    assert float(target_policy_loss(old + skills / eta, old, skills, groups, eta).sequence_weights.abs().max()) < 1e-9


def test_gradcheck() -> None:
    rest = (torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5]).double(), torch.tensor([1.0, -1.0, 0.5, -1.5, 1.0]).double())
    groups = torch.tensor([0, 0, 4, 4, 4])
    now = torch.tensor([-1.2, -1.9, -0.4, -2.0, -2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: target_policy_loss(c, *rest, groups, 0.7).loss, now)


def test_two_equally_likely_rollouts_by_hand() -> None:
    level, skills = torch.full((2,), -5.0), torch.tensor([1.0, -1.0])
    found = target_policy_loss(level, level, skills, torch.zeros(2, dtype=torch.long), eta=1.0)
    share = 1 / (1 + math.exp(-2))
    assert found.sequence_weights.tolist() == pytest.approx([share - 0.5, 0.5 - share])
    assert float(found.loss) == pytest.approx(math.log(2))
    assert float(found.top_prob) == pytest.approx(share)


def test_without_a_difference_in_skill_the_target_is_the_old_policy() -> None:
    old, now = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    nothing, groups = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    assert not target_policy_loss(old, old, nothing, groups, 1.0).sequence_weights.any()
    assert target_policy_loss(now, old, nothing, groups, 1.0).sequence_weights.tolist() == pytest.approx(
        [0.46212, -0.46212], abs=1e-4
    )


def test_the_target_of_sums_far_apart_is_on_one_rollout_whatever_the_skills() -> None:
    """300 tokens at slightly different log-probs: the rule has no length normalization."""
    level = torch.tensor([-300.0, -360.0])
    found = target_policy_loss(level, level, torch.tensor([-1.0, 1.0]), torch.zeros(2, dtype=torch.long), 1.0)
    assert float(found.top_prob) == pytest.approx(1)
    assert float(found.sequence_weights.abs().max()) < 1e-20
    fits = target_policy_loss(level, level, torch.tensor([-1.0, 1.0]), torch.zeros(2, dtype=torch.long), 0.03)
    assert fits.sequence_weights[1] > 0.99


@pytest.mark.parametrize("eta", [0.0, -1.0, math.nan])
def test_an_eta_that_is_not_above_zero_is_refused(eta: float) -> None:
    level = torch.zeros(2)
    with pytest.raises(ValueError, match="tpo_eta"):
        target_policy_loss(level, level, level, torch.zeros(2, dtype=torch.long), eta)
    with pytest.raises(ValueError, match="tpo_eta"):
        compute_group_distributions(level, level, level, torch.zeros(2, dtype=torch.long), eta)

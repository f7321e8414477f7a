"""Losses whose ratio, weight or trust region is not that of PPO: GSPO, CISPO, CPPO, and the tokens that STAPO drops."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import algo as oracle
from tests.strategies.algo import examples
from trainable.algo.losses import (
    PolicyLoss,
    cispo_loss,
    cppo_loss,
    find_spurious_tokens,
    gspo_loss,
)
from trainable.algo.reductions import compute_loss_weights


class Tokens(NamedTuple):
    """Log-probs, old log-probs, advantages and episodes of some tokens."""

    logprobs: list[float]
    old_logprobs: list[float]
    advantages: list[float]
    episode_index: list[int]

    def to_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = (torch.tensor(column, dtype=torch.float64) for column in self[:3])
        return (*columns, torch.tensor(self.episode_index, dtype=torch.long))  # type: ignore[return-value]


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Draw up to twelve tokens of up to four episodes, of which some are not trained at all."""
    episode_index = sorted(draw(st.lists(st.integers(0, 3), max_size=12)))
    lowest = draw(st.sampled_from([-0.5, -4.0, -40.0]))

    def draw_floats(minimum: float, maximum: float) -> list[float]:
        size = len(episode_index)
        return draw(st.lists(st.floats(minimum, maximum, width=32), min_size=size, max_size=size))

    return Tokens(draw_floats(lowest, 0), draw_floats(lowest, 0), draw_floats(-3, 3), episode_index)


def draw_tensors(count: int = 9, spread: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of three episodes, the old log-probs around the others."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(count, generator=generator, dtype=torch.float64)
    old_logprobs = logprobs - spread * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    return logprobs, old_logprobs, advantages, torch.arange(count) // 4


def compute_gradient(loss: Callable[[Tensor], Tensor], logprobs: Tensor) -> Tensor:
    x = logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x).sum(), x)
    return gradient


def assert_values(result: PolicyLoss, expected: list[float]) -> None:
    torch.testing.assert_close(result.loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------- gspo


@examples
@given(tokens(), st.sampled_from([(0.2, 0.28), (3e-4, 4e-4), (1.0, 0.0)]))
def test_gspo_equals_the_loop_over_episodes(batch: Tokens, clip: tuple[float, float]) -> None:
    result = gspo_loss(*batch.to_tensors(), *clip)
    assert_values(result, oracle.gspo(*batch, *clip))
    assert not result.ratio.requires_grad
    assert result.clipped_lower is None


@pytest.mark.parametrize("clip", [(0.2, 0.28), (0.02, 0.03)])
def test_gspo_has_the_value_and_the_gradient_of_its_sequence_form(clip: tuple[float, float]) -> None:
    """Equal advantages in an episode: autograd through the geometric mean gives what the tokens give one by one."""
    logprobs, old_logprobs, _, episode_index = draw_tensors(12, spread=0.1)
    mask, episode_advantages = torch.ones(3, 4, dtype=torch.bool), torch.tensor([1.5, -0.5, 0.7], dtype=torch.float64)
    weights = compute_loss_weights(mask, "seq-mean-token-mean").double().flatten()

    def compute_token_form(x: Tensor) -> Tensor:
        return weights * gspo_loss(x, old_logprobs, episode_advantages[episode_index], episode_index, *clip).loss

    def compute_sequence_form(x: Tensor) -> Tensor:
        ratios = (x - old_logprobs).view(3, 4).mean(1).exp()
        clipped_ratios = ratios.clamp(1 - clip[0], 1 + clip[1])
        return torch.maximum(-episode_advantages * ratios, -episode_advantages * clipped_ratios) / 3

    torch.testing.assert_close(compute_token_form(logprobs).sum(), compute_sequence_form(logprobs).sum())
    gradient = compute_gradient(compute_token_form, logprobs)
    torch.testing.assert_close(gradient, compute_gradient(compute_sequence_form, logprobs))
    assert gradient.any()


def test_gspo_clips_at_the_papers_ranges_in_float32() -> None:
    """Log-ratios of 3.5e-4, as rounded as float32 log-probs of a long episode are."""
    old_logprobs = -5 * torch.rand(3000, generator=torch.Generator().manual_seed(0))
    for shift, is_clipped in ((3.5e-4, False), (4.5e-4, True), (-2.5e-4, False)):
        episode_index = torch.zeros(3000, dtype=torch.long)
        result = gspo_loss(old_logprobs + shift, old_logprobs, torch.ones(3000), episode_index, 3e-4, 4e-4)
        assert result.clipped.unique().tolist() == [is_clipped]


# ---------------------------------------------------------------------------- cispo


@examples
@given(tokens(), st.sampled_from([(0.2, 0.28), (1.0, 4.0), (1.0, 0.0)]))
def test_cispo_equals_the_formula(batch: Tokens, clip: tuple[float, float]) -> None:
    result = cispo_loss(*batch.to_tensors()[:3], *clip)
    expected = [oracle.cispo(*token, *clip) for token in zip(*batch[:3], strict=True)]
    assert_values(result, expected)
    assert result.clipped_lower is None


def test_a_clipped_token_of_cispo_keeps_the_gradient_of_its_log_prob() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old_logprobs = logprobs - torch.tensor([9.0, 0.1, 9.0, 0.1], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    gradient = compute_gradient(lambda x: cispo_loss(x, old_logprobs, advantages, 0.5, 4.0).loss, logprobs)
    assert gradient.tolist() == pytest.approx([-10.0, -1.0, 10.0, 1.0])
    one_sided = compute_gradient(lambda x: cispo_loss(x, old_logprobs, advantages, 1.0, 4.0).loss, logprobs)
    assert one_sided.tolist() == pytest.approx([-10.0, -0.2, 10.0, 0.2])
    assert cispo_loss(logprobs, old_logprobs, advantages, 1.0, 4.0).clipped.tolist() == [True, False, True, False]


# ---------------------------------------------------------------------------- cppo


@examples
@given(tokens(), st.sampled_from([(0.15, 0.015, 0.8), (0.05, 0.0, 1.0), (0.3, 0.1, 0.1)]))
def test_cppo_equals_algorithm_1_token_by_token(batch: Tokens, settings: tuple[float, float, float]) -> None:
    result = cppo_loss(*batch.to_tensors(), *settings)
    assert_values(result, oracle.cppo(*batch, *settings))
    assert result.clipped_lower is None


def test_a_token_of_cppo_has_the_gradient_of_the_ratio_or_none() -> None:
    logprobs, old_logprobs, advantages, episode_index = draw_tensors(spread=0.5)
    columns = (old_logprobs, advantages, episode_index, 0.1, 0.02, 0.8)
    is_masked = cppo_loss(logprobs, *columns).clipped
    gradient = compute_gradient(lambda x: cppo_loss(x, *columns).loss, logprobs)
    torch.testing.assert_close(gradient, -advantages * (logprobs - old_logprobs).exp() * ~is_masked)
    assert is_masked.any()


# ---------------------------------------------------------------------------- all of them

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "gspo": lambda *columns: gspo_loss(*columns, 0.2, 0.28),
    "cispo": lambda *columns: cispo_loss(*columns[:3], 0.2, 0.28),
    "cppo": lambda *columns: cppo_loss(*columns, 0.15, 0.015, 0.8),
}


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    """This also fails if a loss has the opposite sign."""
    logprobs, _, advantages, episode_index = draw_tensors()
    gradient = compute_gradient(lambda x: LOSSES[name](x, logprobs, advantages, episode_index).loss, logprobs)
    torch.testing.assert_close(gradient, -advantages)
    assert not LOSSES[name](logprobs, logprobs, advantages, episode_index).clipped.any()


# ---------------------------------------------------------------------------- tokens that STAPO silences


@examples
@given(st.integers(0, 2**32), st.sampled_from([0.002, 0.3, 1.0]), st.sampled_from([0.0, 0.25, 0.75, 1.0]))
def test_silenced_tokens_are_those_of_the_loop(seed: int, tau_p: float, quantile: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropies, advantages, draws = (torch.rand(4, 3, 5, generator=generator, dtype=torch.float64)).unbind()
    logprobs, advantages, mask = (logprobs * tau_p * 2).clamp(max=1).log(), advantages - 0.3, draws > 0.2
    result = find_spurious_tokens(logprobs, entropies, advantages, mask, tau_p, quantile)
    columns = (x.tolist() for x in (logprobs, entropies, advantages, mask))
    assert {tuple(place) for place in result.nonzero().tolist()} == oracle.spurious_tokens(*columns, tau_p, quantile)


def test_only_unlikely_rewarded_tokens_of_low_entropy_are_silenced() -> None:
    probs = torch.tensor([[0.001, 0.001, 0.001, 0.5, 0.001, 0.001]])
    entropies, advantages = (
        torch.tensor([[0.1, 0.2, 3.0, 0.1, 0.1, 0.1]]),
        torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, 1.0]]),
    )
    mask = torch.tensor([[True, True, True, True, True, False]])
    # Of the first three, the lower three quarters are below 1.6.
    is_silenced = find_spurious_tokens(probs.log(), entropies, advantages, mask, 0.002, 0.75)
    assert is_silenced.tolist() == [[True, True, False, False, False, False]]
    assert not find_spurious_tokens(probs.log(), entropies, -advantages, mask, 0.002, 0.75)[:, :4].any()
    assert not find_spurious_tokens(probs.log(), entropies, advantages, mask, 1e-4, 0.75).any()
    assert not find_spurious_tokens(probs.log(), entropies, advantages, torch.zeros_like(mask), 0.002, 0.75).any()

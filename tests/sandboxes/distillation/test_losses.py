"""Tests of the losses of distillation: sums over all sequences, gradients, and what a truncated sum is minimized by."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandboxes.distillation import algorithm as losses

ACTIONS, LENGTH = 3, 2
SEQUENCES = torch.tensor(list(itertools.product(range(ACTIONS), repeat=LENGTH)))
# A policy over sequences of two tokens: one row of logits for the first token, and one for each first token.
PREFIXES = 1 + ACTIONS


def make_logits(seed: int) -> Tensor:
    return torch.randn(PREFIXES, ACTIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def get_rows(logits: Tensor, sequences: Tensor) -> Tensor:
    """Log-probabilities [B, T, A] at the prefixes of sequences [B, T]."""
    prefixes = torch.stack((torch.zeros_like(sequences[:, 0]), 1 + sequences[:, 0]), dim=1)
    return logits.log_softmax(-1)[prefixes]


def select(log_probs: Tensor) -> Tensor:
    return log_probs.gather(-1, SEQUENCES[..., None]).squeeze(-1)


def compute_expected_gradient(student_logits: Tensor, teacher_logits: Tensor, loss: str) -> Tensor:
    """The expectation of a sampled loss's gradient: the sum over all sequences of probability times gradient."""
    total = torch.zeros_like(student_logits)
    for index in range(len(SEQUENCES)):
        logits = student_logits.clone().requires_grad_()
        sampled = select(get_rows(logits, SEQUENCES))[index][None, None]
        teacher = select(get_rows(teacher_logits, SEQUENCES))[index][None, None]
        arguments = (sampled, sampled.detach(), teacher)
        value = (
            losses.policy_gradient_loss(*arguments, clip=0.2)
            if loss == "token"
            else losses.sequence_policy_gradient_loss(*arguments, is_mean=loss == "sequence_mean")
        )
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        total += sampled.detach().sum().exp() * gradient
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_loss_is_the_sum_of_its_definition(seed: int) -> None:
    student, teacher = get_rows(make_logits(seed), SEQUENCES), get_rows(make_logits(seed + 10), SEQUENCES)
    pairs = zip(student.exp().flatten().tolist(), teacher.exp().flatten().tolist(), strict=True)
    expected = sum(p * (math.log(p) - math.log(q)) for p, q in pairs) / (len(SEQUENCES) * LENGTH)
    assert float(losses.reverse_kl_loss(student[None], teacher[None])) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_and_returns_give_the_gradients_of_their_divergences(seed: int) -> None:
    student_logits, teacher_logits = make_logits(seed), make_logits(seed + 10)
    logits = student_logits.clone().requires_grad_()
    probabilities = select(get_rows(student_logits, SEQUENCES)).sum(-1).exp()
    # The prefixes are sampled, so their probabilities have no gradient.
    kl = losses.full_kl(get_rows(logits, SEQUENCES), get_rows(teacher_logits, SEQUENCES)).mean(-1)
    (expected,) = torch.autograd.grad((probabilities * kl).sum(), logits)
    torch.testing.assert_close(compute_expected_gradient(student_logits, teacher_logits, "token"), expected)
    log_p = select(get_rows(logits, SEQUENCES)).sum(-1)
    log_q = select(get_rows(teacher_logits, SEQUENCES)).sum(-1)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    torch.testing.assert_close(compute_expected_gradient(student_logits, teacher_logits, "sequence"), expected)
    torch.testing.assert_close(
        compute_expected_gradient(student_logits, teacher_logits, "sequence_mean"), expected / LENGTH
    )
    # The losses differ: the tokens' ignores that a token changes the prefixes of later ones.
    assert not torch.allclose(compute_expected_gradient(student_logits, teacher_logits, "token"), expected / LENGTH)


def make_policies(seed: int, actions: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 1, 4, 3, actions, dtype=torch.float64, generator=generator).log_softmax(-1)
    return student, teacher


@given(st.integers(0, 50), st.integers(1, 5))
def test_supports_have_the_most_likely_tokens(seed: int, k: int) -> None:
    student, teacher = make_policies(seed)
    supports = {
        name: losses.select_support(student, teacher, k, name) for name in ("student", "teacher", "intersection")
    }
    for name, log_probs in (("student", student), ("teacher", teacher)):
        mask = supports[name].mask
        assert (mask.sum(-1) == k).all()
        inside, outside = log_probs.masked_fill(~mask, torch.inf), log_probs.masked_fill(mask, -torch.inf)
        assert (inside.amin(-1) >= outside.amax(-1)).all()
    assert torch.equal(supports["intersection"].mask, supports["student"].mask & supports["teacher"].mask)
    torch.testing.assert_close(supports["student"].student_mass, student.exp().topk(k).values.sum(-1))
    torch.testing.assert_close(supports["teacher"].teacher_mass, teacher.exp().topk(k).values.sum(-1))


def test_the_published_sum_is_lowest_where_mass_has_left_the_support() -> None:
    """Its minimum is at p = q / e inside, and so is negative; the divergence of the normalized policies is not."""
    teacher = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[None, None, None]
    mask = torch.tensor([True, True, False, False])[None, None, None]
    inside = teacher.exp()[..., :2] / math.e
    rest = (1 - inside.sum()) / 2
    lowest = torch.cat((inside, rest.expand(1, 1, 1, 2)), dim=-1).log().requires_grad_()
    loss = losses.truncated_reverse_kl_loss(lowest, teacher, mask, normalize=False)
    assert float(loss.detach()) == pytest.approx(-0.8 / math.e)
    (gradient,) = torch.autograd.grad(loss.sum(), lowest)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    assert float(losses.truncated_reverse_kl_loss(teacher, teacher, mask, normalize=False)) == pytest.approx(0)
    assert float(losses.truncated_reverse_kl_loss(lowest.detach(), teacher, mask, normalize=True)) == pytest.approx(0)


@given(st.integers(0, 50), st.integers(1, 4))
def test_a_normalized_sum_is_a_divergence_given_the_support(seed: int, k: int) -> None:
    student, teacher = make_policies(seed)
    mask = losses.select_support(student, teacher, k, "student").mask
    terms = []
    for p, q, row in zip(student.flatten(0, 2), teacher.flatten(0, 2), mask.flatten(0, 2), strict=True):
        p_given, q_given = p[row].log_softmax(-1), q[row].log_softmax(-1)
        terms.append(float((p_given.exp() * (p_given - q_given)).sum()))
    loss = float(losses.truncated_reverse_kl_loss(student, teacher, mask, normalize=True))
    assert loss == pytest.approx(sum(terms) / len(terms), abs=1e-12)
    assert loss >= -1e-12


@pytest.mark.parametrize("normalize", [False, True])
def test_an_empty_intersection_adds_nothing(normalize: bool) -> None:
    student = torch.tensor([0.9, 0.05, 0.05]).log()[None, None, None].requires_grad_()
    teacher = torch.tensor([0.05, 0.05, 0.9]).log()[None, None, None]
    mask = losses.select_support(student, teacher, 1, "intersection").mask
    assert not mask.any()
    loss = losses.truncated_reverse_kl_loss(student, teacher, mask, normalize)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert float(loss.detach()) == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))

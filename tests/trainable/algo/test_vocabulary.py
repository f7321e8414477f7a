"""Token statistics computed in chunks equal those of the full logits and those in double precision."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.algo import examples
from trainable.algo.losses import entropy_from_logits, full_kl, logprobs_from_logits
from trainable.algo.vocabulary import TokenStatistics, compute_logits, compute_token_statistics, logprobs_from_hidden

ROWS, HIDDEN, VOCABULARY, TEMPERATURE = 10, 5, 7, 0.8


class Case:
    """Random hidden states, heads, tokens and weights of the outputs."""

    def __init__(
        self, seed: int = 0, rows: int = ROWS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw_normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.hidden = draw_normal(rows, HIDDEN).to(dtype).requires_grad_()
        self.weight = draw_normal(vocabulary, HIDDEN).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        self.reference = (
            draw_normal(rows, HIDDEN + 1).to(dtype),
            draw_normal(vocabulary, HIDDEN + 1).to(self.weight.dtype),
        )
        self.tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
        self.slopes = draw_normal(3, rows).to(self.weight.dtype)

    def compute_statistics(self, elements: int | None, entropy_gradient: bool = True) -> TokenStatistics:
        return compute_token_statistics(
            self.hidden, self.weight, self.tokens, TEMPERATURE, entropy_gradient, self.reference, elements
        )

    def compute_expected_statistics(self) -> TokenStatistics:
        """Compute the statistics by their definitions, from the full logits in double precision."""
        hidden, weight, (ref_hidden, ref_weight) = self.hidden.double(), self.weight.double(), self.reference
        logprobs = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
        ref_logprobs = (ref_hidden.double() @ ref_weight.double().T / TEMPERATURE).log_softmax(-1)
        return TokenStatistics(
            logprobs.gather(-1, self.tokens[:, None])[:, 0],
            -(logprobs.exp() * logprobs).sum(-1),
            (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1),
        )

    def compute_gradients(self, statistics: TokenStatistics) -> list[Tensor]:
        """Gradients of a random weighted sum of all statistics with respect to hidden states and head."""
        weighted_sum = sum((slopes * tensor).sum() for slopes, tensor in zip(self.slopes, statistics, strict=True))
        return list(torch.autograd.grad(weighted_sum, [self.hidden, self.weight]))


def assert_close(actual_tensors: Any, expected_tensors: Any, limit: float = 1e-12) -> None:
    for actual, expected in zip(actual_tensors, expected_tensors, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=limit, atol=limit)


@examples
@given(st.integers(0, 2**31), st.integers(0, 12), st.integers(1, 9), st.integers(1, 200))
def test_chunks_give_the_definitions_and_their_gradients(seed: int, rows: int, vocabulary: int, elements: int) -> None:
    case = Case(seed, rows, vocabulary)
    statistics, expected = case.compute_statistics(elements), case.compute_expected_statistics()
    assert_close(statistics, expected)
    assert_close(case.compute_gradients(statistics), case.compute_gradients(expected), 1e-10)
    logprobs = logprobs_from_hidden(case.hidden, case.weight, case.tokens, TEMPERATURE, elements)
    assert_close([logprobs], [expected.logprobs])


@pytest.mark.parametrize("elements", [None, ROWS * VOCABULARY, 10**9])
def test_where_all_rows_fit_the_numbers_are_bit_for_bit_those_of_whole_logits(elements: int | None) -> None:
    case = Case(dtype=torch.float32)
    logits = torch.nn.functional.linear(case.hidden, case.weight) / TEMPERATURE
    ref_logits = torch.nn.functional.linear(*case.reference) / TEMPERATURE
    expected = TokenStatistics(
        logprobs_from_logits(logits, case.tokens), entropy_from_logits(logits), full_kl(logits, ref_logits)
    )
    statistics = case.compute_statistics(elements)
    assert all(map(torch.equal, statistics, expected))
    assert all(map(torch.equal, case.compute_gradients(statistics), case.compute_gradients(expected)))


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_one_graph_gives_the_gradient_of_each_term_and_the_entropy_may_have_none(elements: int | None) -> None:
    """The gradient probe differentiates term by term and keeps the graph."""
    case = Case(3)
    statistics, expected = case.compute_statistics(elements), case.compute_expected_statistics()
    for term, expected_term in zip(statistics, expected, strict=True):
        gradients, expected_gradients = (
            torch.autograd.grad(each.sum(), [case.hidden, case.weight], retain_graph=True)
            for each in (term, expected_term)
        )
        assert_close(gradients, expected_gradients, 1e-10)
    case = Case(4)
    statistics = case.compute_statistics(elements, entropy_gradient=False)
    assert not statistics.entropies.requires_grad
    assert_close([statistics.entropies], [case.compute_expected_statistics().entropies])
    (gradient,) = torch.autograd.grad(statistics.logprobs.sum(), case.hidden)
    (expected_gradient,) = torch.autograd.grad(case.compute_expected_statistics().logprobs.sum(), case.hidden)
    assert_close([gradient], [expected_gradient], 1e-10)


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_a_frozen_head_gets_no_gradient_and_at_the_reference_the_kl_is_zero(elements: int | None) -> None:
    case = Case(5)
    case.weight.requires_grad_(False)
    for tensor in case.reference:
        tensor.requires_grad_()
    statistics = case.compute_statistics(elements)
    assert statistics.full_kl is not None
    statistics.full_kl.sum().backward()
    assert case.hidden.grad is not None
    assert all(tensor.grad is None for tensor in (case.weight, *case.reference))
    case = Case(6)
    case.reference = (case.hidden.detach(), case.weight.detach())
    statistics = case.compute_statistics(elements)
    assert statistics.full_kl is not None
    assert_close([statistics.full_kl], [torch.zeros(ROWS)])
    assert_close(torch.autograd.grad(statistics.full_kl.sum(), [case.hidden]), [torch.zeros(ROWS, HIDDEN)])


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_half_precision_states_are_multiplied_so_and_reduced_in_float32(elements: int | None) -> None:
    case = Case(7, dtype=torch.bfloat16)
    statistics = case.compute_statistics(elements)
    assert {tensor.dtype for tensor in statistics} == {torch.float32}
    logits = (case.hidden @ case.weight.bfloat16().T).float() / TEMPERATURE
    assert_close([statistics.logprobs], [logprobs_from_logits(logits, case.tokens)], 1e-6)
    hidden, weight = case.compute_gradients(statistics)
    assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_are_exact_products_of_the_rounded_numbers(dtype: torch.dtype, elements: int | None) -> None:
    case = Case(7, dtype=dtype)
    exact_case = Case(7, dtype=dtype)
    exact_case.weight = case.weight.detach().to(dtype).double().requires_grad_()
    exact_case.hidden = case.hidden.detach().double().requires_grad_()
    reference_hidden, reference_weight = case.reference
    case.reference = exact_case.reference = (reference_hidden, reference_weight.to(dtype))
    expected = exact_case.compute_expected_statistics()
    statistics = compute_token_statistics(
        case.hidden, case.weight, case.tokens, TEMPERATURE, True, case.reference, elements, float32_logits=True
    )
    assert_close(statistics, expected, 3e-6)
    rounded_logprobs = case.compute_statistics(elements).logprobs.double()
    assert (rounded_logprobs - expected.logprobs).abs().max() > 1e-4
    # The head's gradient is float32, while that of the states has their type.
    hidden_gradient, weight_gradient = case.compute_gradients(statistics)
    exact_hidden_gradient, exact_weight_gradient = exact_case.compute_gradients(expected)
    assert_close([weight_gradient], [exact_weight_gradient], 0.03)
    assert_close([hidden_gradient], [exact_hidden_gradient], 0.03)
    arguments = (case.hidden, case.weight, case.tokens, TEMPERATURE, elements)
    assert_close([logprobs_from_hidden(*arguments, float32_logits=True)], [expected.logprobs], 3e-6)


def test_float32_logits_of_whole_tensors() -> None:
    hidden, weight = torch.randn(2, 3, HIDDEN).bfloat16(), torch.randn(VOCABULARY, HIDDEN)
    logits = compute_logits(hidden, weight, float32_logits=True)
    assert (logits.shape, logits.dtype) == ((2, 3, VOCABULARY), torch.float32)
    assert_close([logits], [hidden.double() @ weight.bfloat16().double().T], 1e-5)
    assert compute_logits(hidden, weight).dtype == torch.bfloat16
    assert torch.equal(compute_logits(hidden.float(), weight, float32_logits=True), hidden.float() @ weight.T)


@pytest.mark.long
def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """2,048 equal rows each add a term that a sum in bfloat16 would round away."""
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, requires_grad=True)
    logprobs_from_hidden(hidden, weight, torch.zeros(2048, dtype=torch.long), 1.0, 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [1024.0, -1024.0]

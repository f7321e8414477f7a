"""Numbers from hidden states in chunks, against logits made whole and against double precision."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies.algo import examples
from trainable.algo.losses import entropy_from_logits, full_kl, logprobs_from_logits
from trainable.algo.vocabulary import TokenStatistics, compute_token_statistics, logprobs_from_hidden

ROWS, HIDDEN, VOCABULARY, TEMPERATURE = 10, 5, 7, 0.8


class Case:
    """Hidden states, heads, tokens and slopes drawn at random."""

    def __init__(
        self, seed: int = 0, rows: int = ROWS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.hidden = drawn(rows, HIDDEN).to(dtype).requires_grad_()
        self.weight = drawn(vocabulary, HIDDEN).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        self.reference = (drawn(rows, HIDDEN + 1).to(dtype), drawn(vocabulary, HIDDEN + 1).to(self.weight.dtype))
        self.tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
        self.slopes = drawn(3, rows).to(self.weight.dtype)

    def numbers(self, elements: int | None, entropy_gradient: bool = True) -> TokenStatistics:
        return compute_token_statistics(
            self.hidden, self.weight, self.tokens, TEMPERATURE, entropy_gradient, self.reference, elements
        )

    def whole(self) -> TokenStatistics:
        """The definitions, from whole logits in double precision."""
        hidden, weight, (ref_hidden, ref_weight) = self.hidden.double(), self.weight.double(), self.reference
        logs = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
        others = (ref_hidden.double() @ ref_weight.double().T / TEMPERATURE).log_softmax(-1)
        return TokenStatistics(
            logs.gather(-1, self.tokens[:, None])[:, 0],
            -(logs.exp() * logs).sum(-1),
            (logs.exp() * (logs - others)).sum(-1),
        )

    def gradients(self, numbers: TokenStatistics) -> list[Tensor]:
        """Of a random weighting of all numbers, by hidden states and head."""
        total = sum((slope * part).sum() for slope, part in zip(self.slopes, numbers, strict=True))
        return list(torch.autograd.grad(total, [self.hidden, self.weight]))


def close(found: Any, wanted: Any, limit: float = 1e-12) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit)


@examples
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 9), st.integers(1, 200))
def test_chunks_give_the_definitions_and_their_gradients(seed: int, rows: int, vocabulary: int, elements: int) -> None:
    case = Case(seed, rows, vocabulary)
    found, wanted = case.numbers(elements), case.whole()
    close(found, wanted)
    close(case.gradients(found), case.gradients(wanted), 1e-10)
    again = logprobs_from_hidden(case.hidden, case.weight, case.tokens, TEMPERATURE, elements)
    close([again], [wanted.logprobs])


@pytest.mark.parametrize("elements", [None, ROWS * VOCABULARY, 10**9])
def test_where_all_rows_fit_the_numbers_are_bit_for_bit_those_of_whole_logits(elements: int | None) -> None:
    case = Case(dtype=torch.float32)
    logits = torch.nn.functional.linear(case.hidden, case.weight) / TEMPERATURE
    ref_logits = torch.nn.functional.linear(*case.reference) / TEMPERATURE
    wanted = TokenStatistics(
        logprobs_from_logits(logits, case.tokens), entropy_from_logits(logits), full_kl(logits, ref_logits)
    )
    found = case.numbers(elements)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    pairs = zip(case.gradients(found), case.gradients(wanted), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("elements", [1, 3 * VOCABULARY, 4 * VOCABULARY + 6, (ROWS - 1) * VOCABULARY])
def test_chunks_that_do_not_divide_the_rows_change_nothing(elements: int) -> None:
    case = Case(1, dtype=torch.float32)
    found, wanted = case.numbers(elements), case.numbers(None)
    close(found, wanted, 1e-6)
    close(case.gradients(found), case.gradients(wanted), 1e-5)


@pytest.mark.parametrize("elements", [3 * VOCABULARY, None])
def test_gradcheck_of_every_number(elements: int | None) -> None:
    case = Case(2, rows=5)

    def of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = compute_token_statistics(hidden, weight, case.tokens, TEMPERATURE, True, case.reference, elements)
        assert found.full_kl is not None
        return found.logprobs, found.entropies, found.full_kl

    assert torch.autograd.gradcheck(of, (case.hidden, case.weight))


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_one_graph_gives_each_terms_gradient_apart(elements: int | None) -> None:
    """As the gradient probe asks: term by term, keeping the graph."""
    case = Case(3)
    found, wanted = case.numbers(elements), case.whole()
    for one, other in zip(found, wanted, strict=True):
        apart = torch.autograd.grad(one.sum(), [case.hidden, case.weight], retain_graph=True)
        close(apart, torch.autograd.grad(other.sum(), [case.hidden, case.weight], retain_graph=True), 1e-10)


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_an_entropy_without_gradient_has_its_value_and_none(elements: int | None) -> None:
    case = Case(4)
    found = case.numbers(elements, entropy_gradient=False)
    assert not found.entropies.requires_grad
    close([found.entropies], [case.whole().entropies])
    (slope,) = torch.autograd.grad(found.logprobs.sum(), case.hidden)
    (wanted,) = torch.autograd.grad(case.whole().logprobs.sum(), case.hidden)
    close([slope], [wanted], 1e-10)


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_a_frozen_head_and_a_frozen_reference_get_no_gradient(elements: int | None) -> None:
    case = Case(5)
    case.weight.requires_grad_(False)
    for part in case.reference:
        part.requires_grad_()
    numbers = case.numbers(elements)
    assert numbers.full_kl is not None
    numbers.full_kl.sum().backward()
    assert case.hidden.grad is not None
    assert all(part.grad is None for part in (case.weight, *case.reference))


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_at_the_reference_the_kl_and_its_gradient_are_zero(elements: int | None) -> None:
    case = Case(6)
    case.reference = (case.hidden.detach(), case.weight.detach())
    numbers = case.numbers(elements)
    assert numbers.full_kl is not None
    close([numbers.full_kl], [torch.zeros(ROWS)])
    close(torch.autograd.grad(numbers.full_kl.sum(), [case.hidden]), [torch.zeros(ROWS, HIDDEN)])


@pytest.mark.parametrize("elements", [2 * VOCABULARY, None])
def test_half_precision_states_are_multiplied_so_and_reduced_in_float32(elements: int | None) -> None:
    case = Case(7, dtype=torch.bfloat16)
    numbers = case.numbers(elements)
    assert {part.dtype for part in numbers} == {torch.float32}
    logits = (case.hidden @ case.weight.bfloat16().T).float() / TEMPERATURE
    close([numbers.logprobs], [logprobs_from_logits(logits, case.tokens)], 1e-6)
    hidden, weight = case.gradients(numbers)
    assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.float32)


def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """Of 2,048 equal rows each adds what a sum in bfloat16 would soon be too coarse for."""
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, requires_grad=True)
    logprobs_from_hidden(hidden, weight, torch.zeros(2048, dtype=torch.long), 1.0, 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [1024.0, -1024.0]


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_and_one_row(rows: int, with_gradient: bool) -> None:
    case = Case(8, rows)
    with torch.set_grad_enabled(with_gradient):
        found = case.numbers(1)
    assert [part.shape for part in found] == [(rows,)] * 3
    close(found, case.whole())


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(part.numel() for part in tensors(out))])
        return out


def tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for part in out:
            yield from tensors(part)


@pytest.mark.parametrize("elements", [200, 701, 5000])
def test_nothing_larger_than_the_bound_is_made(elements: int) -> None:
    case = Case(9, rows=60, vocabulary=100)  # 6,000 logits; the heads have 500 and 600 entries
    with Largest() as largest:
        case.gradients(case.numbers(elements))
    assert largest.elements <= max(elements, 600)
    with Largest() as largest:
        case.gradients(case.numbers(None))
    assert largest.elements == 6000


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_elements is 0; it must be at least 1 logit"):
        Case().numbers(0)

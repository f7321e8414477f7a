"""Compute token statistics over the full vocabulary from hidden states, with a bound on the logits in memory.

Shapes: N tokens, h hidden channels, V vocabulary entries. If the logits of all N rows are within the bound, they are
computed at once, and autograd saves what it needs. Otherwise rows are processed in chunks, and the logits of each chunk
are recomputed in the backward pass. Products are computed in the type of the hidden states, and all statistics of the
logits in float32 or better.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.losses import entropy_from_logits, full_kl, logprobs_from_logits

LogitsFunction = Callable[[Tensor, slice], Tensor]
"""Maps logits (n, V) to one number per row (n,); the slice says which of the N rows these are."""


class TokenStatistics(NamedTuple):
    """The statistics of each token (N,) that the policy's loss needs, in nats; full_kl is None without a reference."""

    logprobs: Tensor
    entropies: Tensor
    full_kl: Tensor | None


def logprobs_from_hidden(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, chunk_elements: int | None = None
) -> Tensor:
    """Log-probability of one token in each row (N,), in nats.

        z = W x / τ,   log π(a) = z_a − logsumexp(z)

    Args:
        hidden: (N, h), x of each row.
        weight: (V, h), W of the language-model head.
        tokens: (N,) int64, the token a of each row.
        temperature: τ > 0 of the sampling distribution.
        chunk_elements: logits in memory at once, at least one row; None for all of them. Changes memory, not values.

    Example:
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log()  # probabilities 3/4 and 1/4
        >>> logprobs = logprobs_from_hidden(hidden, weight, tokens=torch.tensor([0]), temperature=1.0)
        >>> logprobs.exp().double().round(decimals=4).tolist()
        [0.75]

    Source: definition.  Degenerate: no row gives an empty result.
    """
    (logprobs,) = _apply_to_logits([_make_logprobs_function(tokens)], hidden, weight, temperature, chunk_elements)
    return logprobs


def compute_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy_gradient: bool = True,
    reference: tuple[Tensor, Tensor] | None = None,
    chunk_elements: int | None = None,
) -> TokenStatistics:
    """Log-probability, entropy and exact KL of each row (N,) from one product with the head.

        z = W x / τ,   log π(a) = z_a − logsumexp(z),   H = −Σ_v π_v logπ_v,   KL = Σ_v π_v (logπ_v − logπ_ref,v)

    Args:
        hidden, weight, tokens, temperature, chunk_elements: as for `logprobs_from_hidden`.
        entropy_gradient: whether gradients flow through H.
        reference: hidden states (N, h') and head (V, h') of the reference, which receive no gradient; None: no KL.

    Example:
        >>> hidden, weight = torch.ones(1, 1), torch.zeros(4, 1)  # four equally likely tokens
        >>> result = compute_token_statistics(hidden, weight, tokens=torch.tensor([0]), temperature=1.0)
        >>> result.entropies.double().round(decimals=4).tolist(), result.full_kl  # log 4
        ([1.3863], None)

    Source: definitions.  Degenerate: equal logits give H = log V with zero gradient; π = π_ref gives KL = 0 with zero
    gradient. Logits must be finite.
    """
    functions = [_make_logprobs_function(tokens), _make_entropies_function(entropy_gradient)]
    if reference is not None:
        functions.append(_make_full_kl_function(*reference, temperature))
    logprobs, entropies, *kl = _apply_to_logits(functions, hidden, weight, temperature, chunk_elements)
    # Detached here, too: outputs of an autograd function require gradients, whichever of them have any.
    return TokenStatistics(logprobs, entropies if entropy_gradient else entropies.detach(), kl[0] if kl else None)


def _make_logprobs_function(tokens: Tensor) -> LogitsFunction:
    return lambda logits, rows: logprobs_from_logits(logits, tokens[rows])


def _make_entropies_function(has_gradient: bool) -> LogitsFunction:
    def compute_entropies(logits: Tensor, rows: slice) -> Tensor:
        return entropy_from_logits(logits if has_gradient else logits.detach())

    return compute_entropies


def _make_full_kl_function(hidden: Tensor, weight: Tensor, temperature: float) -> LogitsFunction:
    hidden, head = hidden.detach(), weight.detach().to(hidden.dtype)
    return lambda logits, rows: full_kl(logits, _compute_logits(hidden[rows], head, temperature))


def _compute_logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Tempered logits (n, V), in float32 or better; `head` is in the type of `hidden`."""
    logits = F.linear(hidden, head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _apply_to_logits(
    functions: Sequence[LogitsFunction], hidden: Tensor, weight: Tensor, temperature: float, chunk_elements: int | None
) -> tuple[Tensor, ...]:
    """Apply each function to the tempered logits, in chunks of rows if these have too many; each result is (N,)."""
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements is {chunk_elements}; it must be at least 1 logit, such as {2**27}.")
    chunk_rows = len(hidden) if chunk_elements is None else max(1, chunk_elements // len(weight))
    if len(hidden) > chunk_rows:
        return _ChunkedLogits.apply(functions, chunk_rows, temperature, hidden, weight)
    logits = _compute_logits(hidden, weight.to(hidden.dtype), temperature)
    return tuple(function(logits, slice(None)) for function in functions)


def _make_slices(count: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(start, start + chunk_rows) for start in range(0, count, chunk_rows))


class _ChunkedLogits(torch.autograd.Function):
    """`_apply_to_logits` over chunks of rows, which recomputes the logits of a chunk in the backward pass.

    The head's gradient is accumulated over chunks in the head's own type, float32. Autograd would accumulate it in the
    type of the product, and in bfloat16 a sum over dozens of chunks loses the digits that each one adds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: Sequence[LogitsFunction],
        chunk_rows: int,
        temperature: float,
        hidden: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.functions, ctx.rows, ctx.temperature = functions, chunk_rows, temperature
        ctx.save_for_backward(hidden, weight)
        # An output that no loss uses has the gradient None in `backward`, and costs nothing there.
        ctx.set_materialize_grads(False)
        head = weight.to(hidden.dtype)
        outputs: list[list[Tensor]] = [[] for _ in functions]
        for chunk in _make_slices(len(hidden), chunk_rows):
            logits = _compute_logits(hidden[chunk], head, temperature)
            for chunk_outputs, function in zip(outputs, functions, strict=True):
                chunk_outputs.append(function(logits, chunk))
        return tuple(torch.cat(parts) for parts in outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        active_functions = [
            (function, slope) for function, slope in zip(ctx.functions, output_grads, strict=True) if slope is not None
        ]
        head = weight.to(hidden.dtype)
        # A frozen head, as under LoRA, gets no gradient.
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[4] else None
        for chunk in _make_slices(len(hidden), ctx.rows) if active_functions else ():
            # Autograd differentiates the functions of the logits. The product with the head is differentiated by hand
            # below, so that its gradient can be added up in float32.
            logits = _compute_logits(hidden[chunk], head, ctx.temperature).requires_grad_()
            with torch.enable_grad():
                outputs = [function(logits, chunk) for function, _ in active_functions]
            (logits_grad,) = torch.autograd.grad(outputs, logits, [slope[chunk] for _, slope in active_functions])
            product_grad = logits_grad.div_(ctx.temperature).to(head.dtype)
            hidden_grad[chunk] = product_grad @ head
            if weight_grad is not None:
                weight_grad += product_grad.T @ hidden[chunk]
        return None, None, None, hidden_grad, weight_grad

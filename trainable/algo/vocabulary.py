"""Numbers of a token that need the whole vocabulary, from hidden states, with a bound on the logits held at once.

Shapes: N tokens, h hidden channels, V vocabulary entries. Where all N rows fit the bound, logits are made whole and
autograd keeps what it likes. Else rows are worked on in chunks, and each chunk is made again in the backward pass.
Products are in the type of the hidden states, everything after them in float32 or better.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.losses import entropy_from_logits, full_kl, logprobs_from_logits

OfLogits = Callable[[Tensor, slice], Tensor]
"""A number of each row (n,) from its logits (n, V); the slice says which of the N rows these are."""


class TokenNumbers(NamedTuple):
    """What the policy's loss needs of each token (N,), in nats; full_kl is None where no reference was given."""

    logprobs: Tensor
    entropies: Tensor
    full_kl: Tensor | None


def logprobs_from_hidden(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, elements: int | None = None
) -> Tensor:
    """Log-probability of one token in each row (N,), in nats.

        z = W x / τ,   log π(a) = z_a − logsumexp(z)

    Args:
        hidden: (N, h), x of each row.
        weight: (V, h), W of the language-model head.
        tokens: (N,) int64, the token a of each row.
        temperature: τ > 0 of the sampling distribution.
        elements: logits held at once, one row at least; None for all of them. Changes memory, not values.

    Source: definition.  Degenerate: no row gives an empty result.
    """
    (found,) = _of_logits([_logprobs_of(tokens)], hidden, weight, temperature, elements)
    return found


def token_numbers(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, entropy_gradient: bool = True,
    reference: tuple[Tensor, Tensor] | None = None, elements: int | None = None,
) -> TokenNumbers:  # fmt: skip
    """Log-probability, entropy and exact KL of each row (N,) from one product with the head.

        z = W x / τ,   log π(a) = z_a − logsumexp(z),   H = −Σ_v π_v logπ_v,   KL = Σ_v π_v (logπ_v − logπ_ref,v)

    Args:
        hidden, weight, tokens, temperature, elements: as for `logprobs_from_hidden`.
        entropy_gradient: whether gradients flow through H.
        reference: hidden states (N, h') and head (V, h') of the reference, which no gradient reaches; None: no KL.

    Source: definitions.  Degenerate: equal logits give H = log V with zero gradient; π = π_ref gives KL = 0 with zero
    gradient. Logits must be finite.
    """
    functions = [_logprobs_of(tokens), _entropies(entropy_gradient)]
    if reference is not None:
        functions.append(_full_kl_to(*reference, temperature))
    logprobs, entropies, *kl = _of_logits(functions, hidden, weight, temperature, elements)
    return TokenNumbers(logprobs, entropies if entropy_gradient else entropies.detach(), kl[0] if kl else None)


def _logprobs_of(tokens: Tensor) -> OfLogits:
    return lambda logits, rows: logprobs_from_logits(logits, tokens[rows])


def _entropies(has_gradient: bool) -> OfLogits:
    def of(logits: Tensor, rows: slice) -> Tensor:
        return entropy_from_logits(logits if has_gradient else logits.detach())

    return of


def _full_kl_to(hidden: Tensor, weight: Tensor, temperature: float) -> OfLogits:
    hidden, head = hidden.detach(), weight.detach().to(hidden.dtype)
    return lambda logits, rows: full_kl(logits, _logits(hidden[rows], head, temperature))


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Tempered logits (n, V), in float32 or better; `head` is in the type of `hidden`."""
    logits = F.linear(hidden, head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _of_logits(
    functions: Sequence[OfLogits], hidden: Tensor, weight: Tensor, temperature: float, elements: int | None
) -> tuple[Tensor, ...]:
    """Each function (N,) of the tempered logits."""
    if elements is not None and elements < 1:
        raise ValueError(f"elements is {elements}; at least 1 logit is held at once. Give {2**27}, say.")
    rows = len(hidden) if elements is None else max(1, elements // len(weight))
    if len(hidden) > rows:
        return _Chunked.apply(functions, rows, temperature, hidden, weight)
    logits = _logits(hidden, weight.to(hidden.dtype), temperature)
    return tuple(function(logits, slice(None)) for function in functions)


def _slices(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, count, rows))


class _Chunked(torch.autograd.Function):
    """`_of_logits` over chunks of rows.

    The head's gradient is summed over chunks in its own type, float32: autograd would sum what chunks give in the type
    of their product, and in bfloat16 a sum of dozens loses what each of them adds.
    """

    @staticmethod
    def forward(
        ctx: Any, functions: Sequence[OfLogits], rows: int, temperature: float, hidden: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.functions, ctx.rows, ctx.temperature = functions, rows, temperature
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        head = weight.to(hidden.dtype)
        found: list[list[Tensor]] = [[] for _ in functions]
        for chunk in _slices(len(hidden), rows):
            logits = _logits(hidden[chunk], head, temperature)
            for parts, function in zip(found, functions, strict=True):
                parts.append(function(logits, chunk))
        return tuple(torch.cat(parts) for parts in found)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        used = [(function, slope) for function, slope in zip(ctx.functions, slopes, strict=True) if slope is not None]
        head = weight.to(hidden.dtype)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[4] else None
        for chunk in _slices(len(hidden), ctx.rows) if used else ():
            logits = _logits(hidden[chunk], head, ctx.temperature).requires_grad_()
            with torch.enable_grad():
                found = [function(logits, chunk) for function, _ in used]
            (of_logits,) = torch.autograd.grad(found, logits, [slope[chunk] for _, slope in used])
            of_product = of_logits.div_(ctx.temperature).to(head.dtype)
            of_hidden[chunk] = of_product @ head
            if of_weight is not None:
                of_weight += of_product.T @ hidden[chunk]
        return None, None, None, of_hidden, of_weight

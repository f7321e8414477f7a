"""Compute token statistics over the full vocabulary from hidden states, with a bound on the logits in memory.

Shapes: N tokens, h hidden channels, V vocabulary entries. If the logits of all N rows are within the bound, they are
computed at once, and autograd saves what it needs. Otherwise, and for `float32_logits`, rows are processed in chunks,
and the logits of each chunk are recomputed in the backward pass. Products are computed in the dtype of the hidden
states, and all statistics of the logits in float32 or better. Logits in half precision are rounded, by up to 0.06 at a
logit of 16 in bfloat16. `float32_logits` keeps the products of half-precision numbers in float32 instead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.losses import entropy_from_logits, full_kl, logprobs_from_logits

LogitsFunction = Callable[[Tensor, slice], Tensor]
"""Maps logits (n, V) to one number per row (n,). The slice selects these n of the N rows."""


class TokenStatistics(NamedTuple):
    """The statistics of each token (N,) for the policy's loss, in nats. full_kl is None without a reference."""

    logprobs: Tensor
    entropies: Tensor
    full_kl: Tensor | None


def compute_logits(hidden: Tensor, weight: Tensor, float32_logits: bool = False) -> Tensor:
    """Compute the logits (..., V) of hidden states (..., h) with the head `weight` (V, h).

        z = W x

    Args:
        hidden: (..., h), x.
        weight: (V, h), W, first rounded to the dtype of `hidden`.
        float32_logits: whether to keep the sums of products in float32 if `hidden` is in half precision. On a GPU,
            autograd cannot differentiate such logits, so the functions below implement their own backward pass.

    Example:
        >>> hidden, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[16.0, 0.0625]])
        >>> compute_logits(hidden, weight).item(), compute_logits(hidden, weight, float32_logits=True).item()
        (16.0, 16.0625)

    Source: definition; an LM head in float32 is from MiniMax-M1 (arXiv 2506.13585).
    """
    head = weight.to(hidden.dtype)
    if not (float32_logits and _is_half(hidden)):
        return F.linear(hidden, head)
    if not hidden.is_cuda or not hidden.numel():
        return F.linear(hidden.float(), head.float())
    # No float32 copies of head and states: tensor cores multiply halves and accumulate in float32 in any case.
    logits = torch.mm(hidden.flatten(0, -2), head.T, out_dtype=torch.float32)
    return logits.unflatten(0, hidden.shape[:-1])


def _is_half(hidden: Tensor) -> bool:
    return hidden.dtype in (torch.float16, torch.bfloat16)


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    chunk_elements: int | None = None,
    float32_logits: bool = False,
) -> Tensor:
    """Compute the log-probability of one token in each row (N,), in nats.

        z = W x / τ,   log π(a) = z_a − logsumexp(z)

    Args:
        hidden: (N, h), x of each row.
        weight: (V, h), W of the language-model head.
        tokens: (N,) int64, the token a of each row.
        temperature: τ > 0 of the sampling distribution.
        chunk_elements: maximum logits in memory at once, but at least one row; None for all. Does not change values.
        float32_logits: as for `compute_logits`, with gradients.

    Example:
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log()  # probabilities 3/4 and 1/4
        >>> logprobs = logprobs_from_hidden(hidden, weight, tokens=torch.tensor([0]), temperature=1.0)
        >>> logprobs.exp().double().round(decimals=4).tolist()
        [0.75]

    Source: definition.  Degenerate: no rows give an empty result.
    """
    head = _Head(weight, temperature, float32_logits)
    (logprobs,) = _apply_to_logits([_make_logprobs_function(tokens)], hidden, head, chunk_elements)
    return logprobs


def compute_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy_gradient: bool = True,
    reference: tuple[Tensor, Tensor] | None = None,
    chunk_elements: int | None = None,
    float32_logits: bool = False,
) -> TokenStatistics:
    """Compute log-probability, entropy and exact KL of each row (N,) from one product with the head.

        z = W x / τ,   log π(a) = z_a − logsumexp(z),   H = −Σ_v π_v logπ_v,   KL = Σ_v π_v (logπ_v − logπ_ref,v)

    Args:
        hidden, weight, tokens, temperature, chunk_elements, float32_logits: as for `logprobs_from_hidden`.
        entropy_gradient: whether gradients flow through H.
        reference: hidden states (N, h') and head (V, h') of the reference, which receive no gradient; None: no KL.

    Example:
        >>> hidden, weight = torch.ones(1, 1), torch.zeros(4, 1)  # four equally likely tokens
        >>> result = compute_token_statistics(hidden, weight, tokens=torch.tensor([0]), temperature=1.0)
        >>> result.entropies.double().round(decimals=4).tolist(), result.full_kl  # log 4
        ([1.3863], None)

    Source: definitions.  Degenerate: equal logits give H = log V, and π = π_ref gives KL = 0, both with zero gradient.
    Logits must be finite.
    """
    functions: list[LogitsFunction] = [
        _make_logprobs_function(tokens),
        lambda logits, rows: entropy_from_logits(logits if entropy_gradient else logits.detach()),
    ]
    head = _Head(weight, temperature, float32_logits)
    if reference is not None:
        reference_hidden, reference_weight = (tensor.detach() for tensor in reference)
        frozen_head = head._replace(weight=reference_weight.to(reference_hidden.dtype))
        functions.append(
            lambda logits, rows: full_kl(logits, frozen_head.compute_tempered_logits(reference_hidden[rows]))
        )
    logprobs, entropies, *kl = _apply_to_logits(functions, hidden, head, chunk_elements)
    # Detached again, since all outputs of an autograd function require gradients if any of them does.
    return TokenStatistics(logprobs, entropies if entropy_gradient else entropies.detach(), kl[0] if kl else None)


def _make_logprobs_function(tokens: Tensor) -> LogitsFunction:
    return lambda logits, rows: logprobs_from_logits(logits, tokens[rows])


class _Head(NamedTuple):
    """A language-model head (V, h), the temperature of its logits, and whether they stay in float32."""

    weight: Tensor
    temperature: float
    float32_logits: bool

    def compute_tempered_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (n, V) divided by the temperature, in float32 or better."""
        logits = compute_logits(hidden, self.weight, self.float32_logits)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature


def _apply_to_logits(
    functions: Sequence[LogitsFunction], hidden: Tensor, head: _Head, chunk_elements: int | None
) -> tuple[Tensor, ...]:
    """Apply each function to the tempered logits, in chunks of rows if there are too many. Each result is (N,)."""
    chunk_rows = len(hidden) if chunk_elements is None else max(1, chunk_elements // len(head.weight))
    # Autograd cannot differentiate a product of halves in float32, but `_ChunkedLogits` does so itself.
    if len(hidden) > chunk_rows or (head.float32_logits and _is_half(hidden) and len(hidden)):
        return _ChunkedLogits.apply(functions, chunk_rows, head, hidden, head.weight)
    logits = head.compute_tempered_logits(hidden)
    return tuple(function(logits, slice(None)) for function in functions)


def _make_slices(count: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(start, start + chunk_rows) for start in range(0, count, chunk_rows))


class _ChunkedLogits(torch.autograd.Function):
    """Implements `_apply_to_logits` in chunks of rows, whose logits are recomputed in the backward pass.

    The head's gradient is accumulated over chunks in the head's dtype, float32. Autograd would accumulate it in the
    dtype of the product, and bfloat16 loses digits in a sum over dozens of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: Sequence[LogitsFunction],
        chunk_rows: int,
        head: _Head,
        hidden: Tensor,
        weight: Tensor,  # `head.weight`, passed separately so that it can have a gradient
    ) -> tuple[Tensor, ...]:
        ctx.functions, ctx.rows, ctx.head = functions, chunk_rows, head
        ctx.save_for_backward(hidden, weight)
        # The gradient of an output that no loss uses is None in `backward`, and costs nothing there.
        ctx.set_materialize_grads(False)
        cast_head = head._replace(weight=weight.to(hidden.dtype))
        outputs: list[list[Tensor]] = [[] for _ in functions]
        for chunk in _make_slices(len(hidden), chunk_rows):
            logits = cast_head.compute_tempered_logits(hidden[chunk])
            for chunk_outputs, function in zip(outputs, functions, strict=True):
                chunk_outputs.append(function(logits, chunk))
        return tuple(torch.cat(parts) for parts in outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        active_functions = [
            (function, slope) for function, slope in zip(ctx.functions, output_grads, strict=True) if slope is not None
        ]
        head = ctx.head._replace(weight=weight.to(hidden.dtype))
        # A frozen head, as under LoRA, gets no gradient.
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[4] else None
        for chunk in _make_slices(len(hidden), ctx.rows) if active_functions else ():
            # Autograd differentiates the functions of the logits. The product with the head is differentiated by hand
            # below, so that its gradient is accumulated in float32.
            logits = head.compute_tempered_logits(hidden[chunk]).requires_grad_()
            with torch.enable_grad():
                outputs = [function(logits, chunk) for function, _ in active_functions]
            (logits_grad,) = torch.autograd.grad(outputs, logits, [slope[chunk] for _, slope in active_functions])
            product_grad = logits_grad.div_(head.temperature).to(hidden.dtype)
            hidden_grad[chunk] = product_grad @ head.weight
            if weight_grad is not None:
                weight_grad += product_grad.T @ hidden[chunk]
        return None, None, None, hidden_grad, weight_grad

"""Sampled and greedy continuations of the stacked transformers, with a key-value cache and no loop over sequences."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainable.sandbox.models.transformer import (
    Folded,
    Transformers,
    after_attention,
    embedded,
    keys_and_values,
    linear,
    normalised,
)


class Continuations(NamedTuple):
    """tokens: [E, B, T]. log_probs: [E, B, T, A], of every token at each position, of the policy that went on."""

    tokens: Tensor
    log_probs: Tensor


class _Cache(NamedTuple):
    """Keys and values of one block, [E, B, heads, slots, d / heads] each."""

    keys: Tensor
    values: Tensor


@torch.no_grad()
def continuations(
    models: Transformers, prompts: Tensor, steps: int, uniforms: Tensor | None = None, each: int = 1
) -> Continuations:
    """Go on with prompts [E, P, L] for `steps` tokens, `each` times: rows i * each ... (i + 1) * each - 1 share one.

    uniforms: [E, P * each, steps] in [0, 1), which tokens are drawn by; None: the likeliest token. A prompt is read
    once, whatever `each` is, and the last token is never read.
    """
    folded, length = models.folded(), prompts.shape[-1]
    caches = _empty_caches(models, folded, prompts, each, length + steps - 1)
    last = _read_prompts(models, folded, embedded(folded, prompts, 0), caches, each)
    tokens = torch.empty(*last.shape[:2], steps, dtype=torch.int64)
    log_probs = last.new_empty(*last.shape[:2], steps, models.shape.vocab)
    for step in range(steps):
        if step > 0:
            last = _read_token(models, folded, tokens[:, :, step - 1 : step], caches, length + step - 1)
        ahead = linear(normalised(last), folded.head).log_softmax(-1)[:, :, 0]
        log_probs[:, :, step] = ahead
        tokens[:, :, step] = ahead.argmax(-1) if uniforms is None else drawn(ahead, uniforms[:, :, step])
    return Continuations(tokens, log_probs)


def drawn(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The action at which the cumulated probability first exceeds a uniform number: [...] of log_probs [..., A].

    An action of probability 0 is never drawn.
    """
    cumulated = log_probs.double().exp().cumsum(-1)
    return (cumulated[..., :-1] <= uniforms[..., None] * cumulated[..., -1:]).sum(-1)


def taken(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [...] of actions [...] among log_probs [..., A]."""
    return log_probs.gather(-1, actions[..., None]).squeeze(-1)


def _empty_caches(models: Transformers, folded: Folded, prompts: Tensor, each: int, slots: int) -> list[_Cache]:
    shape = models.shape
    size = (*prompts.shape[:1], prompts.shape[1] * each, shape.heads, slots, shape.d_model // shape.heads)
    return [_Cache(*(folded.tokens.new_empty(size) for _ in _Cache._fields)) for _ in folded.blocks]


def _read_prompts(models: Transformers, folded: Folded, hidden: Tensor, caches: list[_Cache], each: int) -> Tensor:
    """Fill the caches; hidden states [E, P * each, 1, d] of the prompts' last tokens after all blocks."""
    length = hidden.shape[2]
    for number, (block, cache) in enumerate(zip(folded.blocks, caches, strict=True)):
        normal = normalised(hidden)
        keys, values = keys_and_values(block, normal, models.shape.heads)
        cache.keys[..., :length, :] = keys.repeat_interleave(each, dim=1)
        cache.values[..., :length, :] = values.repeat_interleave(each, dim=1)
        read = 1 if number == len(caches) - 1 else length
        hidden = after_attention(block, hidden[:, :, -read:], normal[:, :, -read:], keys, values)
    return hidden.repeat_interleave(each, dim=1)


def _read_token(models: Transformers, folded: Folded, tokens: Tensor, caches: list[_Cache], place: int) -> Tensor:
    """Append tokens [E, B, 1] at position `place`; their hidden states [E, B, 1, d] after all blocks."""
    hidden = embedded(folded, tokens, place)
    for block, cache in zip(folded.blocks, caches, strict=True):
        normal = normalised(hidden)
        cache.keys[..., place : place + 1, :], cache.values[..., place : place + 1, :] = keys_and_values(
            block, normal, models.shape.heads
        )
        seen = (cache.keys[..., : place + 1, :], cache.values[..., : place + 1, :])
        hidden = after_attention(block, hidden, normal, *seen)
    return hidden

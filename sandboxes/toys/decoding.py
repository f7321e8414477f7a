"""Sampling and greedy decoding from a transformer ensemble, with a key-value cache and no loop over sequences."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sandboxes.toys.transformer import (
    FoldedWeights,
    TransformerEnsemble,
    apply_block,
    compute_keys_values,
    embed_tokens,
    layer_norm,
    linear,
)

GREEDY_CHUNK = 250  # prompts per member; few enough that the tensors of one token stay in the processor's cache


class Completions(NamedTuple):
    """tokens: [E, B, T]. log_probs: [E, B, T, A], of every token of the vocabulary at each position."""

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def generate_completions(
    models: TransformerEnsemble,
    prompts: Tensor,
    num_tokens: int,
    uniforms: Tensor | None = None,
    samples_per_prompt: int = 1,
) -> Completions:
    """Generate `num_tokens` (T) tokens after each of prompts [E, P, L], `samples_per_prompt` (S) times.

    uniforms: [E, P S, T] in [0, 1), from which tokens are sampled; None: greedy decoding. Rows i S ... (i + 1) S - 1 of
    the result belong to prompt i, which is processed only once.
    """
    folded_weights, length = models.fold_weights(), prompts.shape[-1]
    hidden, keys_values = models.read_tokens(folded_weights, prompts, num_last=1)
    last_hidden = hidden.repeat_interleave(samples_per_prompt, dim=1)
    # One slot fewer than tokens, because the last generated token is never fed back.
    padding = (0, 0, 0, num_tokens - 1)
    caches = [
        [F.pad(tensor.repeat_interleave(samples_per_prompt, dim=1), padding) for tensor in pair] for pair in keys_values
    ]
    tokens = torch.empty(*last_hidden.shape[:2], num_tokens, dtype=torch.int64)
    log_probs = last_hidden.new_empty(*last_hidden.shape[:2], num_tokens, models.shape.vocab_size)
    for step in range(num_tokens):
        if step > 0:
            last_hidden = _decode_step(models, folded_weights, tokens[:, :, step - 1 : step], caches, length + step - 1)
        next_log_probs = linear(layer_norm(last_hidden), folded_weights.head).log_softmax(-1)[:, :, 0]
        log_probs[:, :, step] = next_log_probs
        tokens[:, :, step] = (
            next_log_probs.argmax(-1) if uniforms is None else sample_actions(next_log_probs, uniforms[:, :, step])
        )
    return Completions(tokens, log_probs)


def decode_greedily(models: TransformerEnsemble, prompts: Tensor, num_tokens: int) -> Completions:
    """Decode the most likely tokens after prompts [E, B, L], in chunks of prompts to bound the memory."""
    chunks = [generate_completions(models, chunk, num_tokens) for chunk in prompts.split(GREEDY_CHUNK, dim=1)]
    return Completions(*(torch.cat(outputs, dim=1) for outputs in zip(*chunks, strict=True)))


def sample_actions(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample actions [...], never of probability 0, by inverse CDF: log_probs [..., A], uniforms [...] in [0, 1)."""
    # In float64, because sums of float32 probabilities lose rare actions. Multiplying by the last sum corrects for
    # rounding; the last action needs no bound.
    cumulative_probs = log_probs.double().exp().cumsum(-1)
    return (cumulative_probs[..., :-1] <= uniforms[..., None] * cumulative_probs[..., -1:]).sum(-1)


def select_log_probs(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Select the log-probabilities [...] of actions [...] from log_probs [..., A]."""
    return log_probs.gather(-1, actions[..., None]).squeeze(-1)


def _decode_step(
    models: TransformerEnsemble,
    folded_weights: FoldedWeights,
    tokens: Tensor,
    caches: list[list[Tensor]],
    position: int,
) -> Tensor:
    """Process tokens [E, B, 1] at `position`, filling the caches of all blocks; returns hidden states [E, B, 1, d]."""
    hidden = embed_tokens(folded_weights, tokens, position)
    for block, (keys, values) in zip(folded_weights.blocks, caches, strict=True):
        normed_hidden = layer_norm(hidden)
        keys[..., position : position + 1, :], values[..., position : position + 1, :] = compute_keys_values(
            block, normed_hidden, models.shape.num_heads
        )
        hidden = apply_block(block, hidden, normed_hidden, keys[..., : position + 1, :], values[..., : position + 1, :])
    return hidden

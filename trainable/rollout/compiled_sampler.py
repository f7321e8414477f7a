"""Sampling from the tiny Qwen2 policies in compiled code. Equals the torch sampler up to rounding."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainable.kernels import compiled
from trainable.models.interface import LanguageModel
from trainable.models.qwen2 import Qwen2, compute_rotary_halves
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams, check_entropies

FIRST_REPLIES = 8
"""Initial size of a cache, in replies of full length: enough for most conversations, since growing copies the cache."""


class CompiledSampler:
    """Samples from the trainer's own model. Raises ValueError if compiled code cannot run the model.

    Weights are read when a conversation starts and must not change before it ends.
    """

    def __init__(self, model: LanguageModel) -> None:
        obstacle = model.model.find_obstacle() if isinstance(model, Qwen2) else "it is not a plain Qwen2"
        if obstacle or not isinstance(model, Qwen2):
            raise ValueError(
                f"rollout.name=compiled cannot sample from this model: {obstacle}. Sample in torch with --set "
                f"rollout.name=torch."
            )
        for block in model.model.blocks:
            block.list_weights()  # raises ValueError if there are adapters
        self.model = model

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation (see `Sampler.start_conversation`)."""
        return CompiledConversation(self.model, prompts, params, rngs)


class CompiledConversation(Conversation):
    """Samples rows in lock-step, each with its own number of tokens in the cache.

    lengths: (R,) tokens of each row in the cache. pending_tokens: (R,) the last token of each row's reply, which no
    pass has read yet; -1 before the first reply.
    """

    def __init__(
        self,
        model: Qwen2,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        self.params, self.shape, self.weights = params, model.shape, pack_weights(model)
        self.row_rngs, group_size = rngs, len(rngs) // len(prompts)
        self.pending_tokens = np.full(len(rngs), -1)
        longest = max(map(len, prompts))
        slots = longest + FIRST_REPLIES * params.max_new_tokens
        # Each prompt is read once for its group.
        prompt_slots = slots if group_size == 1 else longest
        self.cache, self.scratch = self._make_cache(len(prompts), prompt_slots), make_scratch(self.shape, prompt_slots)
        self.lengths = np.zeros(len(prompts), dtype=np.int64)
        hidden = self._append_tokens(np.arange(len(prompts)), prompts)
        # So far, the cache has one row per prompt. Repeat each for its group.
        self.lengths, self.hidden = self.lengths.repeat(group_size), hidden.repeat(group_size, axis=0)
        if group_size > 1:
            self._grow_cache(slots, group_size)

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to `rows` and sample their replies (see `Conversation.sample_replies`)."""
        live_rows = np.asarray(rows, dtype=np.int64)
        pending_tokens = self.pending_tokens[live_rows].tolist()
        # In the first turn nothing has been sampled yet, and the cache already contains the prompts.
        if pending_tokens[0] >= 0:
            chunks = [[pending, *chunk] for pending, chunk in zip(pending_tokens, new_tokens, strict=True)]
            hidden = self._append_tokens(live_rows, chunks)
        else:
            hidden = self.hidden[live_rows]
        return self._sample_turn(live_rows, hidden)

    def _sample_turn(self, rows: compiled.Integers, hidden: compiled.Floats) -> list[SampledReply]:
        """Sample the reply of each row from the hidden state `hidden` (B, hidden) of its last token.

        Raises NonFiniteError if logits were not finite.
        """
        steps, temperature = self.params.max_new_tokens, self.params.temperature
        self._reserve_slots(int(self.lengths[rows].max()) + steps)
        uniforms = np.empty((len(rows), steps), dtype=np.float32)
        # Each row has its own generator, so that its tokens do not depend on which other rows are live.
        for row, row_uniforms in zip(rows.tolist(), uniforms, strict=True):
            self.row_rngs[row].random(dtype=np.float32, out=row_uniforms)
        token_ids = np.zeros(uniforms.shape, dtype=np.int64)
        logprobs, entropies = np.zeros((2, *uniforms.shape), dtype=np.float32)
        counts = np.zeros(len(rows), dtype=np.int64)
        stop_tokens = np.array([self.params.stop_token, *self.params.other_stop_tokens], dtype=np.int64)
        inputs = (*self._list_buffers(), hidden, rows, self.lengths, uniforms, np.float32(temperature), stop_tokens)
        compiled.sample_turn(*inputs, token_ids, logprobs, entropies, counts)
        check_entropies(entropies, temperature)
        last_tokens = token_ids[np.arange(len(rows)), counts - 1]
        self.pending_tokens[rows] = last_tokens
        return [
            SampledReply(token_ids[index, :count], logprobs[index, :count], entropies[index, :count], is_finished)
            for index, (count, is_finished) in enumerate(
                zip(counts.tolist(), (last_tokens == self.params.stop_token).tolist(), strict=True)
            )
        ]

    def _append_tokens(self, rows: compiled.Integers, chunks: Sequence[Sequence[int]]) -> compiled.Floats:
        """Append a chunk of tokens to each row; return the last tokens' hidden states (B, hidden)."""
        counts = np.array([len(chunk) for chunk in chunks])
        self._reserve_slots(int((self.lengths[rows] + counts).max()))
        token_ids = np.concatenate([np.asarray(chunk, dtype=np.int64) for chunk in chunks])
        if token_ids.min() < 0 or token_ids.max() >= self.shape.vocab_size:  # compiled code would read other memory
            raise IndexError(
                f"a prompt has the token {token_ids.max()}, and the model has {self.shape.vocab_size} embeddings: use "
                "a tokenizer of this model"
            )
        ends = counts.cumsum()
        is_last = np.zeros(len(token_ids), dtype=bool)
        is_last[ends - 1] = True
        # A chunk starts after the existing tokens of its row.
        positions = np.arange(len(token_ids)) + np.repeat(self.lengths[rows] - (ends - counts), counts)
        hidden = np.empty((len(rows), self.shape.hidden_size), dtype=np.float32)
        compiled.extend(*self._list_buffers(), token_ids, np.repeat(rows, counts), positions, is_last, hidden)
        self.lengths[rows] += counts
        return hidden

    def _list_buffers(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """List weights, cache and scratch memory as plain tuples, the first arguments of compiled functions."""
        return tuple(self.weights), tuple(self.cache), tuple(self.scratch)

    def _make_cache(self, rows: int, slots: int) -> compiled.DecoderCache:
        """Make a cache with at least `slots` slots per row."""
        shape, slots = self.shape, compiled.round_up(slots, compiled.VECTOR)
        size = (shape.num_hidden_layers, rows, shape.num_key_value_heads)
        cosines, sines = compute_rotary_halves(slots, shape)
        return compiled.DecoderCache(
            keys=np.zeros((*size, shape.head_dim, slots), dtype=np.float32),
            values=np.zeros((*size, slots, shape.head_dim), dtype=np.float32),
            cosines=cosines,
            sines=sines,
        )

    def _reserve_slots(self, slots: int) -> None:
        """Grow the cache if it has fewer than `slots` slots."""
        old_slots = len(self.cache.cosines)
        if slots > old_slots:
            # Grow by at least half, so that the cache of a growing conversation is copied only a few times.
            self._grow_cache(max(slots, old_slots + old_slots // 2))

    def _grow_cache(self, slots: int, copies: int = 1) -> None:
        """Replace the cache by one with `slots` slots and each row repeated `copies` times."""
        old, (_, rows, _, _, old_slots) = self.cache, self.cache.keys.shape
        self.cache, self.scratch = self._make_cache(rows * copies, slots), make_scratch(self.shape, slots)
        self.cache.keys[..., :old_slots] = old.keys.repeat(copies, axis=1)
        self.cache.values[..., :old_slots, :] = old.values.repeat(copies, axis=1)


def pack_weights(model: Qwen2) -> compiled.DecoderWeights:
    """Copy a model's weights into the layout of `DecoderWeights`."""
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}

    def stack(*names: str) -> compiled.Floats:
        """Stack weights over layers. Several weights per layer are concatenated along their outputs."""
        layers = [
            np.concatenate([weights[f"model.layers.{layer}.{name}"] for name in names])
            for layer in range(model.shape.num_hidden_layers)
        ]
        return np.stack([np.ascontiguousarray(layer.T) for layer in layers])

    return compiled.DecoderWeights(
        embedding=weights["model.embed_tokens.weight"].copy(),
        qkv=stack("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        qkv_bias=stack("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        output=stack("self_attn.o_proj.weight"),
        gate_up=stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=stack("mlp.down_proj.weight"),
        attention_gain=stack("input_layernorm.weight"),
        mlp_gain=stack("post_attention_layernorm.weight"),
        final_gain=weights["model.norm.weight"].copy(),
        head=np.ascontiguousarray(model.lm_head.weight.detach().numpy().T),
        eps=np.float32(model.shape.rms_norm_eps),
    )


def make_scratch(shape: Qwen2Shape, slots: int) -> compiled.DecoderScratch:
    """Allocate memory for passes over rows of at most `slots` tokens."""

    def make_rows(size: int) -> compiled.Floats:
        return np.zeros((compiled.BLOCK_TOKENS, size), dtype=np.float32)

    # One more score than the cache has slots.
    longest = (
        compiled.round_up(max(slots, shape.vocab_size, shape.intermediate_size), compiled.VECTOR) + compiled.VECTOR
    )
    return compiled.DecoderScratch(
        residual=make_rows(shape.hidden_size),
        normed=make_rows(shape.hidden_size),
        inverses=np.zeros(compiled.BLOCK_TOKENS, dtype=np.float32),
        qkv=make_rows(shape.hidden_size + 2 * shape.num_key_value_heads * shape.head_dim),
        attention=make_rows(shape.hidden_size),
        product=make_rows(shape.hidden_size),
        gate_up=make_rows(2 * shape.intermediate_size),
        gated=make_rows(shape.intermediate_size),
        logits=make_rows(shape.vocab_size),
        scores=np.zeros((2, longest), dtype=np.float32),
        mix=np.zeros((2, shape.head_dim), dtype=np.float32),
    )

"""Qwen2 in plain torch, with the hub's parameter names, for two uses that a generic forward handles inefficiently.

`compute_hidden_states` runs whole sequences without padding and finishes the last layer only at trained tokens.
`extend` grows a key-value cache with slots shared by all rows. Both reproduce transformers' Qwen2ForCausalLM.
"""

from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainable.models.interface import KVCache, LanguageHead, LanguageModel, Trunk
from trainable.models.packing import PackedRows, causal_attention, pack_rows
from trainable.models.qwen2_shape import Qwen2Shape, find_size_obstacle

MAX_COMPILED_LENGTH = 1024
"""Maximum tokens per sequence of a compiled pass, whose attention holds all scores of a sequence in memory. Torch runs
passes with longer sequences."""


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Divide `x` (..., size) by its root mean square and multiply by the gain."""
        output = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Several matrix products read this output, and autocast would cast it for each of them. Cast it once instead.
        device_type = x.device.type
        return output.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else output


def compute_rotary(positions: Tensor, shape: Qwen2Shape) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines `(*positions.shape, head_dim)` of the rotary embedding."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None].float() * (1.0 / shape.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def compute_rotary_halves(positions: int, shape: Qwen2Shape) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosines and sines (positions, head_dim / 2) for compiled code; both halves of a head share the angles."""
    cos, sin = (table[:, : shape.head_dim // 2].numpy() for table in compute_rotary(torch.arange(positions), shape))
    return np.ascontiguousarray(cos), np.ascontiguousarray(sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Qwen2Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        hidden, kv = shape.hidden_size, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, kv)
        self.v_proj = nn.Linear(hidden, kv)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def project_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x` (..., hidden) to queries `(..., heads, D)`, and keys and values `(..., kv_heads, D)`."""
        size = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(size), self.k_proj(x).view(size), self.v_proj(x).view(size)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def attend_cached(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, bias: Tensor, is_tree: bool = False
    ) -> Tensor:
        """Attend from `x` (B, q, hidden) to itself and the cache. bias: (B, 1 or q, used + q).

        is_tree: whether the cache is only read. Otherwise, the keys and values of `x` take its next q slots.
        """
        batch, new_tokens, _ = x.shape
        q, k, v = (heads.transpose(1, 2) for heads in self.project_heads(x, cos, sin))
        keys, values = cache.read(layer, k, v) if is_tree else cache.write(layer, k, v)
        groups = self.heads // self.kv_heads
        # The queries of heads that share a key head become rows of one product, so that keys need no copy.
        folded_queries = q.reshape(batch, self.kv_heads, groups * new_tokens, self.head_dim)
        # For a tree of many tokens, and in half precision, where the products below would round the scores.
        if is_tree or q.dtype in (torch.float16, torch.bfloat16):
            # Cast before repeating, so that in half precision the larger copy is never float32.
            mask = bias.to(q.dtype).repeat(1, groups, 1)[:, None]
            attention_output = F.scaled_dot_product_attention(folded_queries, keys, values, attn_mask=mask)
        else:
            scores = folded_queries @ keys.transpose(-1, -2) * self.head_dim**-0.5
            scores = scores.view(batch, self.kv_heads, groups, new_tokens, -1) + bias[:, None, None]
            weights = scores.softmax(-1).view(batch, self.kv_heads, groups * new_tokens, -1)
            attention_output = weights @ values
        attention_output = attention_output.view(batch, self.heads, new_tokens, self.head_dim)
        return attention_output.transpose(1, 2).reshape(batch, new_tokens, -1)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: Qwen2Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute down(silu(gate(x)) * up(x)), `(..., hidden)`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, shape: Qwen2Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward_packed(self, x: Tensor, cos: Tensor, sin: Tensor, packed: PackedRows, is_last: bool) -> Tensor:
        """Run the block over the rows of a stream `x` (N, hidden).

        If `is_last`, finish only the requested positions, since no later block attends to the others.
        """
        attention_output = causal_attention(*self.self_attn.project_heads(self.input_layernorm(x), cos, sin), packed)
        if is_last:
            x, attention_output = (
                x.index_select(0, packed.output_indices),
                attention_output.index_select(0, packed.output_indices),
            )
        return self.finish(x, attention_output)

    def list_weights(self) -> list[Tensor]:
        """List the block's weights in the order of `kernels.layer.LayerWeights`. ValueError if there are adapters."""
        attention, mlp = self.self_attn, self.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        linear_layers = (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(linear) is not nn.Linear for linear in linear_layers):
            raise ValueError(
                "Compiled code does not support LoRA adapters: use torch with --set rollout.name=torch --set "
                "model.compiled_passes=false."
            )
        return [
            self.input_layernorm.weight,
            *(projection.weight for projection in projections),
            *(projection.bias for projection in projections),
            attention.o_proj.weight,
            self.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        ]

    def finish(self, x: Tensor, attention_output: Tensor) -> Tensor:
        """Run the block after its attention (output projection, residuals, feed-forward) at any subset of positions."""
        x = x + self.self_attn.o_proj(attention_output)
        return x + self.mlp(self.post_attention_layernorm(x))


class TokenEmbedding(nn.Embedding):
    """An embedding that is made instantly on the meta device."""

    def reset_parameters(self) -> None:
        """Draw random weights, except on the meta device, where this would only import torch's compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Qwen2Trunk(Trunk):
    """Embedding, blocks and final norm."""

    shape: Qwen2Shape
    needs_padding = False
    """Rows are packed without padding."""

    def __init__(self, shape: Qwen2Shape) -> None:
        super().__init__(shape)
        self.embed_tokens = TokenEmbedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def blocks(self) -> list[Layer]:
        """The blocks, typed."""
        return cast(list[Layer], list(self.layers))

    def compute_hidden_states(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Compute hidden states (N, hidden) at chosen positions of whole sequences.

        tokens: (B, T) from position 0 on, padded on the right with any token. flat_positions: (N,) flat indices into
        B * T, none of them padding. Tokens after the last chosen position of a row are skipped, and the last block is
        finished only at `flat_positions`. Since attention is causal, this does not change the results.
        """
        packed = pack_rows((tokens.shape[0], tokens.shape[1]), flat_positions)
        if self.pass_settings.compiled and packed.length_groups[-1][1] <= MAX_COMPILED_LENGTH:
            return self.norm(self._run_compiled(tokens, packed))
        last_layer = len(self.layers) - 1
        angles = compute_rotary(torch.arange(packed.length_groups[-1][1], device=tokens.device), self.shape)
        cos, sin = (table.index_select(0, packed.positions) for table in angles)
        with self.pass_settings.autocast(tokens.device):
            x = self.embed_tokens(tokens.flatten().index_select(0, packed.source_indices))
            for layer_index, layer in enumerate(self.blocks):
                run = layer.forward_packed
                if self.pass_settings.recompute and torch.is_grad_enabled():
                    # Blocks are deterministic, so the generator's state need not be saved.
                    run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
                x = run(x, cos, sin, packed, layer_index == last_layer)
            return self.norm(x)

    def find_obstacle(self) -> str:
        """Explain why compiled code cannot run this network. Empty if it can."""
        if self.pass_settings.dtype != torch.float32 or self.embed_tokens.weight.device.type != "cpu":
            return "it does not compute in float32 on the CPU"
        sizes = self.shape.hidden_size, self.shape.intermediate_size
        return find_size_obstacle(*sizes, self.shape.num_attention_heads, self.shape.vocab_size)

    def _run_compiled(self, tokens: Tensor, packed: PackedRows) -> Tensor:
        """Run all blocks in compiled code and return the residual stream at the requested positions."""
        from trainable.kernels.layer import LayerInputs, StreamLayer

        shape = self.shape
        obstacle = "it has gradient checkpointing" if self.pass_settings.recompute else self.find_obstacle()
        if obstacle:
            raise ValueError(
                f"Compiled passes cannot run this model: {obstacle}. Use torch with --set model.compiled_passes=false."
            )
        cosines, sines = compute_rotary_halves(packed.length_groups[-1][1], shape)
        # Queries are in stream order; the requested order is restored at the end.
        query_indices, order = packed.output_indices.sort()
        positions, starts = packed.positions.numpy(), packed.cu_seqlens.numpy().astype(np.int64)
        inputs = LayerInputs(
            cosines=cosines,
            sines=sines,
            positions=positions,
            starts=starts,
            query_positions=positions,
            query_starts=starts,
            query_indices=None,
            heads=shape.num_attention_heads,
            kv_heads=shape.num_key_value_heads,
            eps=shape.rms_norm_eps,
        )
        last_inputs = inputs._replace(
            query_positions=positions[query_indices.numpy()],
            query_starts=np.searchsorted(query_indices.numpy(), starts),
            query_indices=query_indices,
        )
        x = self.embed_tokens(tokens.flatten().index_select(0, packed.source_indices))
        for layer_index, layer in enumerate(self.blocks):
            is_last = layer_index == len(self.layers) - 1
            x = StreamLayer.apply(x, last_inputs if is_last else inputs, *layer.list_weights())
        return x.index_select(0, torch.empty_like(order).scatter_(0, order, torch.arange(len(order))))

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (see `trainable.models.interface.Trunk.extend`)."""
        bias = cache.append_slots(valid)
        cos, sin = self._get_angles(positions, cache)
        last_layer = len(self.layers) - 1
        with self.pass_settings.autocast(tokens.device):
            x = self.embed_tokens(tokens)
            for layer_index, layer in enumerate(self.blocks):
                attention_output = layer.self_attn.attend_cached(
                    layer.input_layernorm(x), cos, sin, cache, layer_index, bias
                )
                if layer_index == last_layer:  # only the last token predicts an unknown token
                    x, attention_output = x[:, -1], attention_output[:, -1]
                x = layer.finish(x, attention_output)
            cache.used_slots += tokens.shape[1]
            return self.norm(x)

    def _get_angles(self, positions: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Look up cosines and sines of `positions` in the cache's table, recomputed when the cache has grown."""
        slots = cache.bias.shape[1]
        if cache.angles is None or len(cache.angles[0]) < slots:
            # Every token has a slot, so positions are smaller than the number of slots.
            cache.angles = compute_rotary(torch.arange(slots, device=positions.device), self.shape)
        return cache.angles[0][positions], cache.angles[1][positions]

    def forward_tree(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, lengths: Tensor, cache: KVCache
    ) -> Tensor:
        """Score a tree of tokens after every row (see `trainable.models.interface.Trunk.forward_tree`)."""
        rows = len(lengths)
        bias = cache.make_tree_bias(tree_mask, rows)
        cos, sin = compute_rotary(lengths[:, None] + depths, self.shape)
        with self.pass_settings.autocast(tokens.device):
            x = self.embed_tokens(tokens).expand(rows, -1, -1)
            for layer_index, layer in enumerate(self.blocks):
                normed = layer.input_layernorm(x)
                x = layer.finish(
                    x, layer.self_attn.attend_cached(normed, cos, sin, cache, layer_index, bias, is_tree=True)
                )
            return self.norm(x)


class Qwen2(LanguageModel):
    """Trunk and language-model head, with the hub's parameter names."""

    shape: Qwen2Shape
    model: Qwen2Trunk

    def __init__(self, shape: Qwen2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Qwen2Trunk(shape)
        self.lm_head = LanguageHead(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

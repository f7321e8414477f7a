"""The interface of causal language models of any architecture, as sampling, training and scoring use it.

Two classes implement `LanguageModel`: `trainable.models.qwen2.Qwen2`, written for these uses, and
`trainable.models.hub_model.HubModel`, a wrapper of all other architectures of transformers. They share cache, head and
critic.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainable.algo.vocabulary import compute_logits
from trainable.models.qwen2_shape import Qwen2Shape


@dataclass(frozen=True)
class HubShape:
    """Sizes of a model that transformers runs.

    max_position_embeddings: maximum tokens per conversation. eos_token_id: the end-of-text token. block_weights:
    numbers of weights per block that multiply a token, before and after the attention. The last block computes the
    second part only at requested positions.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_id: int
    block_weights: tuple[int, int]


Shape = Qwen2Shape | HubShape
"""Sizes of a model."""


class PassSettings(NamedTuple):
    """How a network computes its passes. Its weights are always float32.

    dtype: of matrix products. In half precision (torch.autocast), residuals, norms and rotary positions stay float32.
    recompute: gradient checkpointing, which keeps only each block's input and runs the block again in the backward
    pass. compiled: run blocks over whole sequences in compiled code, for float32 on the CPU without `recompute`.
    float32_logits: compute float32 logits from half-precision states (see `compute_logits`).
    """

    dtype: torch.dtype = torch.float32
    recompute: bool = False
    compiled: bool = False
    float32_logits: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for a pass; it does nothing in float32."""
        # A pass uses each weight once, so caching the casts would only take memory.
        is_float32 = self.dtype == torch.float32
        return nullcontext() if is_float32 else torch.autocast(device.type, self.dtype, cache_enabled=False)


class KVCache:
    """Keys and values of every layer, `(rows, kv_heads, slots, head_dim)`.

    All rows grow together: the new tokens of a step take the same slots in every row. Rows without a token there get a
    filler. `bias` (rows, slots) is 0 for tokens and -inf for fillers. Keys and values are allocated by the first write,
    in the dtype of the network's passes. angles: the network's table of rotary positions, with one entry per slot.
    """

    def __init__(self, rows: int, slots: int, like: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bias = like.new_full((rows, slots), -torch.inf)
        self.used_slots = 0
        self.angles: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write `k`, `v` (B, kv_heads, q, D) to a layer's next q slots; return its first B rows (..., used + q, D)."""
        if layer == len(self.keys):
            size = (self.bias.shape[0], k.shape[1], self.bias.shape[1], k.shape[3])
            # Zeros, because uninitialized memory may contain NaNs, which no bias can mask.
            self.keys.append(k.new_zeros(size))
            self.values.append(v.new_zeros(size))
        end = self.used_slots + k.shape[2]
        keys, values = self.keys[layer][: len(k)], self.values[layer][: len(k)]
        keys[:, :, self.used_slots : end] = k
        values[:, :, self.used_slots : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def read(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer, followed by `k`, `v` (rows, kv_heads, q, D), without storing these."""
        keys, values = self.keys[layer][:, :, : self.used_slots], self.values[layer][:, :, : self.used_slots]
        return torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)

    def append_slots(self, valid: Tensor) -> Tensor:
        """Reserve slots for q new tokens of the first B rows; return the attention bias (B, 1 or q, slots).

        valid: (B, q), False for fillers. The bias covers the used slots and the q new ones. The caller adds q to
        `used_slots` after all layers have been written.
        """
        batch, new_slots = valid.shape
        end = self.used_slots + new_slots
        if end > self.bias.shape[1]:
            # Grow by at least half, so that the cache of a growing conversation is copied only a few times.
            extra_slots = max(end - self.bias.shape[1], self.bias.shape[1] // 2)
            self.keys = [F.pad(keys, (0, 0, 0, extra_slots)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, extra_slots)) for values in self.values]
            self.bias = F.pad(self.bias, (0, extra_slots), value=-torch.inf)
        self.bias[:batch, self.used_slots : end] = torch.where(valid, 0.0, -torch.inf)
        bias = self.bias[:batch, None, :end]
        if new_slots > 1:  # new tokens must not see later ones; a single new token has none
            # Not -inf: a filler on the left sees no token, and a softmax over only -inf gives NaN. -6e4 is finite even
            # in float16, and its exponential is 0.
            causal_bias = torch.full((new_slots, new_slots), -torch.inf, device=valid.device).triu(1)
            bias = (bias + F.pad(causal_bias, (self.used_slots, 0))).clamp_min(-6e4)
        return bias

    def make_tree_bias(self, tree_mask: Tensor, rows: int) -> Tensor:
        """Make the bias (rows, F, used + F) of F tokens, which see all tokens of a row.

        tree_mask: (F, F) bool, True where a token (row) sees another (column).
        """
        prefix_bias = self.bias[:, None, : self.used_slots].expand(-1, len(tree_mask), -1)
        return torch.cat(
            (prefix_bias, torch.where(tree_mask, 0.0, -torch.inf).expand(rows, -1, -1).to(prefix_bias.dtype)), dim=-1
        )

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the given rows, in the given order. Indices may repeat."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.bias = self.bias.index_select(0, rows)

    def pack(self) -> None:
        """Move the tokens of each row to its first slots, so that attention computes fewer fillers."""
        filler_mask = self.bias != 0
        # A stable sort of False before True: tokens first, in their order.
        slots = torch.argsort(filler_mask, dim=1, stable=True)
        self.keys = [_gather_slots(keys, slots) for keys in self.keys]
        self.values = [_gather_slots(values, slots) for values in self.values]
        self.bias = self.bias.gather(1, slots)
        self.used_slots = int((~filler_mask).sum(1).max())


def _gather_slots(store: Tensor, slots: Tensor) -> Tensor:
    """Reorder the slots of each row of `store` (rows, kv_heads, slots, D) by `slots` (rows, slots)."""
    rows, heads, length, size = store.shape
    first_indices = torch.arange(rows * heads, device=store.device).view(rows, heads, 1) * length
    return store.view(-1, size).index_select(0, (first_indices + slots[:, None]).flatten()).view(store.shape)


class Trunk(nn.Module):
    """Maps tokens to hidden states in the dtype of `pass_settings`."""

    needs_padding: bool
    """Whether `compute_hidden_states` pads every row of a pass to the longest one."""
    embed_tokens: nn.Embedding

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.pass_settings = shape, PassSettings()

    def compute_hidden_states(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Compute hidden states (N, hidden) at `flat_positions` (N,) of right-padded sequences `tokens` (B, T)."""
        raise NotImplementedError

    def make_cache(self, rows: int, slots: int) -> KVCache:
        """Make an empty cache of `rows` rows with `slots` slots each."""
        return KVCache(rows, slots, self.embed_tokens.weight)

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (B, q) to the cache's first B rows; return hidden states (B, hidden) of each row's last token.

        positions, valid: (B, q). Fillers (valid False) are on the left. Rows beyond the first B get fillers.
        """
        raise NotImplementedError

    def forward_tree(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, lengths: Tensor, cache: KVCache
    ) -> Tensor:
        """Compute hidden states (B, F, hidden) of one tree of tokens (F,) after every row of the read-only cache.

        depths: (F,), 0 for a token right after the row. tree_mask: (F, F) bool, True in the columns of a token and its
        ancestors. lengths: (B,) tokens per row.
        """
        raise NotImplementedError


class LanguageHead(nn.Linear):
    """Maps hidden states to logits, in the dtype of the hidden states or in float32."""

    float32_logits = False
    """Whether logits of half-precision states are float32 (`model.head_dtype`)."""

    def forward(self, hidden: Tensor, head_function: Callable[..., Any] | None = None) -> Any:
        """Compute logits (..., V) of `hidden` (..., h).

        With `head_function`, return its result for (hidden, weight, float32_logits) instead. It can work in chunks, so
        that the logits are never all in memory.
        """
        return (head_function or compute_logits)(hidden, self.weight, float32_logits=self.float32_logits)


class LanguageModel(nn.Module):
    """A trunk and a head that maps its hidden states to logits."""

    shape: Shape
    model: Trunk
    """Everything but the head."""
    lm_head: LanguageHead

    def to_hub_name(self, name: str) -> str:
        """Return the name of weight `name` in the hub's files. A tied head is named separately."""
        return name

    def to_module_name(self, name: str) -> str:
        """Return transformers' name for the trunk's module `name`."""
        return name


class ValueHead(nn.Linear):
    """Maps hidden states to values in float32, which costs almost nothing. bfloat16 would round the values."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute values (..., 1) of `hidden` (..., h)."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class ValueModel(nn.Module):
    """The critic: a trunk with a value head."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.shape, self.model = trunk.shape, trunk
        self.score = ValueHead(trunk.shape.hidden_size, out_features=1)

    def compute_values(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Compute values (N,) at `flat_positions` (N,) of `tokens` (B, T)."""
        return self.score(self.model.compute_hidden_states(tokens, flat_positions)).squeeze(-1)

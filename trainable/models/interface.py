"""The interface of a causal language model that sampling, training and scoring use, for any architecture.

Two classes implement it: `trainable.models.qwen2.Qwen2`, written for these uses, and
`trainable.models.hub_model.HubModel`, a wrapper around any other architecture of transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from trainable.models.kv_cache import KVCache
from trainable.models.qwen2 import LanguageHead, PassSettings
from trainable.models.qwen2_shape import Qwen2Shape


@dataclass(frozen=True)
class HubShape:
    """Sizes of a model that transformers runs.

    max_position_embeddings: maximum tokens per conversation. eos_token_id: the end-of-text token. attention_size:
    channels of all query heads. block_weights: numbers of weights that one block multiplies a token with, before its
    attention and after it. The last block computes the second part only at requested positions.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_id: int
    attention_size: int
    block_weights: tuple[int, int]


Shape = Qwen2Shape | HubShape
"""Sizes of a model."""


class Trunk(Protocol):
    """Tokens to hidden states, which are in the type of `pass_settings`."""

    pass_settings: PassSettings
    needs_padding: bool
    """Whether `compute_hidden_states` pads every row of a pass to the longest one."""

    def compute_hidden_states(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Hidden states (N, hidden) at `flat_positions` (N,) of right-padded sequences `tokens` (B, T)."""

    def make_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache of `rows` rows with `slots` slots each."""

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (B, q) to the cache's first B rows; hidden states (B, hidden) of the last ones.

        positions, valid: (B, q); fillers (valid False) are on the left. Rows beyond the first B get a filler.
        """

    def forward_tree(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, lengths: Tensor, cache: KVCache
    ) -> Tensor:
        """Hidden states (B, F, hidden) of one tree of tokens (F,) after every row of the cache, which is only read.

        depths: (F,), 0 for a token right after the row. tree_mask: (F, F) bool, True in the columns of a token and of
        its ancestors. lengths: (B,) tokens per row.
        """


class LanguageModel(Protocol):
    """A trunk and a head that maps its hidden states to logits."""

    @property
    def shape(self) -> Shape:
        """The model's sizes."""

    @property
    def model(self) -> Trunk:
        """All but the head."""

    @property
    def lm_head(self) -> LanguageHead:
        """Hidden states to logits."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters; a tied head is the embedding, named once."""

    def to_hub_name(self, name: str) -> str:
        """The name of the weight `name` in the hub's files; a tied head has its own name."""

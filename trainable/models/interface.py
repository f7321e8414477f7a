"""What sampling, training and scoring ask of a causal language model, whatever its architecture.

Two kinds give it: `trainable.models.qwen2.Qwen2`, written for these uses, and `trainable.models.hub_model.HubModel`,
round any other architecture of transformers.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from trainable.models.kv_cache import KVCache
from trainable.models.qwen2 import LanguageHead, PassSettings


class Shape(Protocol):
    """Sizes of a model.

    max_position_embeddings: tokens of a conversation at most. eos_token_id: what the model ends a text with.
    attention_size: channels of all query heads. block_weights: weights that one block multiplies a token with, before
    its attention and after it; the last block does what is after it only where a hidden state is asked for.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def eos_token_id(self) -> int: ...  # noqa: D102
    @property
    def attention_size(self) -> int: ...  # noqa: D102
    @property
    def block_weights(self) -> tuple[int, int]: ...  # noqa: D102


class Trunk(Protocol):
    """Tokens to hidden states, which are in the type of `passes`."""

    pass_settings: PassSettings

    @property
    def needs_padding(self) -> bool:
        """Whether `hidden_at` reads every row of a pass as far as the longest one."""
        ...

    def compute_hidden_states(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Hidden states (N, hidden) at flat positions `where` (N,) of right-padded sequences `tokens` (B, T)."""
        ...

    def make_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache of `rows` rows, with room for `slots` tokens of each."""
        ...

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (B, q) to the cache's first B rows; hidden states (B, hidden) of the last ones.

        positions, valid: (B, q); fillers (valid False) stand on the left.
        """
        ...

    def forward_tree(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, lengths: Tensor, cache: KVCache
    ) -> Tensor:
        """Hidden states (B, F, hidden) of one tree of tokens (F,) after every row of the cache, which is only read.

        depths: (F,), 0 for a token right after the row. sees: (F, F) bool, True at a token's own column and its
        ancestors'. lengths: (B,) tokens of each row.
        """
        ...


class LanguageModel(Protocol):
    """A trunk and the head that makes logits of its hidden states."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""
        ...

    @property
    def model(self) -> Trunk:
        """All but the head."""
        ...

    @property
    def lm_head(self) -> LanguageHead:
        """Hidden states to logits."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters; a tied head is the embedding, named once."""
        ...

    def to_hub_name(self, name: str) -> str:
        """What the hub's files call the weight `name` of its state; a tied head has a name of its own."""
        ...


class Critic(Protocol):
    """A trunk with a head of one output."""

    @property
    def model(self) -> Trunk:
        """All but the head."""
        ...

    def compute_values(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Values (N,) at flat positions `where` (N,) of `tokens` (B, T)."""
        ...

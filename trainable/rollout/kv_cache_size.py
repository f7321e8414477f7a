"""Size of the KV cache that the conversations of a run need. Plans read this module, so it does not import torch."""

from typing import Protocol

from trainable.config.run_config import RunConfig

BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's cache on a GPU: a conversation takes whole blocks."""

TURN_TOKENS = {"full": 320, "compact": 16}
"""Maximum tokens of the game's messages per turn, by prompt style.

full: the published limit of 3600 tokens per conversation leaves (3600 - 5 x 400) / 5 for each of 5 turns with replies
of 400. compact: at least the longest prompt of the laptop preset and at most 1.5 times as long, which a test checks.
"""


class AttentionShape(Protocol):
    """The sizes of a model that determine its keys and values."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and of values per block."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""


def compute_max_tokens(config: RunConfig) -> int:
    """Maximum tokens of a conversation: all turns with replies of full length, but at most max_model_len.

    In a game of trees it is max_model_len, since code may print as much as it likes.
    """
    if config.env.kind.has_trees and config.rollout.max_model_len:
        return config.rollout.max_model_len
    tokens = config.env.max_turn * (config.rollout.response_length + TURN_TOKENS[config.model.prompt_style])
    return min(tokens, config.rollout.max_model_len or tokens)


def compute_token_kv_bytes(shape: AttentionShape, dtype_bytes: int) -> int:
    """Bytes of the keys and values of one token in all blocks, with `dtype_bytes` bytes per number."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype_bytes


def compute_conversation_kv_bytes(shape: AttentionShape, dtype_bytes: int, tokens: int) -> int:
    """Bytes of the blocks of a conversation of `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * compute_token_kv_bytes(shape, dtype_bytes)


def compute_step_kv_bytes(shape: AttentionShape, config: RunConfig, dtype_bytes: int, ranks: int) -> int:
    """Bytes of the cache with which a rank can sample all of its conversations of a training step at once.

    A validation may have more conversations. vLLM then lets some of them wait, which changes no number.
    """
    env = config.env
    conversations = -(-env.env_groups * env.group_size * env.max_conversations_per_rollout // ranks)
    return conversations * compute_conversation_kv_bytes(shape, dtype_bytes, compute_max_tokens(config))

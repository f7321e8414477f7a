"""Size of the KV cache for a run's conversations. Does not import torch, since plans use this module."""

from trainable.config.run_config import RunConfig
from trainable.models.qwen2_shape import PassShape

BLOCK_TOKENS = 16
"""Tokens per block of vLLM's cache on a GPU. A conversation takes whole blocks."""

TURN_TOKENS = {"full": 320, "compact": 16, "plain": 320}
"""Maximum tokens of a game's messages per turn, by prompt style. A data set has those of its longest row instead.

full: the published limit of 3600 tokens per conversation leaves (3600 - 5 x 400) / 5 per turn, for 5 turns with
replies of 400. plain: the same. compact: 1 to 1.5 times the longest prompt of the laptop preset, which a test checks.
"""
TEMPLATE_TOKENS = 40
"""Maximum tokens that a chat template adds to a system message and a prompt: ChatML 15, Llama 3 with its date 36."""


def count_ranks(config: RunConfig) -> int:
    """Count R, the processes of a run, one per GPU. A run on a fraction of a GPU, or on none, has one."""
    return max(1, int(config.trainer.n_gpus_per_node))


def get_dtype_bytes(config: RunConfig) -> int:
    """Return the bytes per number in the dtype of passes."""
    return 4 if config.model.dtype == "float32" else 2


def compute_max_tokens(config: RunConfig) -> int:
    """Compute the maximum tokens of a conversation: all turns with replies of full length, up to max_model_len.

    For a game of trees, it is max_model_len, since the output of code is unbounded. Raises DataFileError for a data
    set that cannot be read.
    """
    if config.env.kind.has_trees and config.rollout.max_model_len:
        return config.rollout.max_model_len
    turn_tokens = TURN_TOKENS[config.model.prompt_style]
    if config.env.dataset.file is not None:
        from trainable.envs.games.dataset import DataSet  # imports pyarrow, which most plans do not need

        # A token has at least one byte.
        turn_tokens = TEMPLATE_TOKENS + DataSet(**config.env.dataset.model_dump()).compute_max_bytes()
    tokens = config.env.max_turn * (config.rollout.response_length + turn_tokens)
    return min(tokens, config.rollout.max_model_len or tokens)


def compute_token_kv_bytes(shape: PassShape, config: RunConfig) -> int:
    """Compute the bytes of one token's keys and values in all blocks."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * get_dtype_bytes(config)


def compute_conversation_kv_bytes(shape: PassShape, config: RunConfig, tokens: int | None = None) -> int:
    """Compute the bytes of a conversation, in whole cache blocks. tokens: None for the maximum."""
    blocks = -(-(tokens or compute_max_tokens(config)) // BLOCK_TOKENS)
    return blocks * BLOCK_TOKENS * compute_token_kv_bytes(shape, config)


def compute_step_kv_bytes(shape: PassShape, config: RunConfig) -> int:
    """Compute the bytes of a cache in which a rank can sample all of its conversations of a training step at once.

    A validation may have more conversations. vLLM then lets some of them wait, which does not change results.
    """
    conversations = -(-config.episodes_per_step // count_ranks(config))  # rounded up
    return conversations * compute_conversation_kv_bytes(shape, config)

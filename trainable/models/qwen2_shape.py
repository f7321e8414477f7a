"""Sizes of a Qwen2 model, read from its config.json, and the FLOP of a pass. Without torch, since plans use it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class PassShape(Protocol):
    """The sizes of a model that determine the FLOP of its passes and the bytes of its KV cache."""

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""

    @property
    def num_key_value_heads(self) -> int:
        """Key (and value) heads per block."""

    @property
    def head_dim(self) -> int:
        """Channels of a head."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads per block."""

    @property
    def block_weights(self) -> tuple[int, int]:
        """Weights per block that multiply a token, before and after the attention."""


@dataclass(frozen=True)
class Qwen2Shape:
    """Sizes of a model, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_id: int

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def block_weights(self) -> tuple[int, int]:
        """Weights per block that multiply a token, before and after the attention (see `interface.HubShape`)."""
        hidden, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        return hidden * (hidden + 2 * kv), hidden * (hidden + 3 * self.intermediate_size)

    @staticmethod
    def read(folder: Path) -> "Qwen2Shape":
        """Read the shape of the model in `folder`, which must pass `is_plain_qwen2`."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # transformers 5 writes rope_parameters; earlier versions wrote rope_theta.
        rope, eos = config.get("rope_parameters") or {}, config["eos_token_id"]
        return Qwen2Shape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
        )


def estimate_forward_flops(
    shape: PassShape, lengths: Sequence[int], output_tokens: int, output_size: int, cached_tokens: int = 0
) -> float:
    """Estimate the FLOP of a forward pass over sequences of `lengths` tokens, each after `cached_tokens` cached ones.

        2 · products + 4 · blocks · channels of all heads · pairs of tokens that attend to each other

    A product is a multiplication and an addition. A pair costs two products per channel, for its attention score and
    for its value.

    output_tokens: number of tokens, over all sequences, that also pass through the rest of the last block and the head,
    which has `output_size` outputs. Other tokens only need the keys and values of the last block.
    """
    weights_before, weights_after = shape.block_weights
    blocks, tokens = shape.num_hidden_layers, sum(lengths)
    products = tokens * (blocks * weights_before + (blocks - 1) * weights_after) + output_tokens * (
        weights_after + output_size * shape.hidden_size
    )
    # Causal attention: a token attends to itself, to all tokens before it, and to all cached tokens.
    pairs = sum(length * (length + 1) / 2 + cached_tokens * length for length in lengths)
    return 2.0 * products + 4.0 * blocks * shape.num_attention_heads * shape.head_dim * pairs

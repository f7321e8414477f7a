"""Which models are Qwen2, their sizes, the FLOP of a pass, and what compiled code and 4-bit weights can run.

Without torch, since plans use it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trainable.config.constants import QWEN2_ARCHITECTURE

MAX_HIDDEN_SIZE = 512
"""Matrix products of larger models exceed the caches of one core, and torch is faster for them."""

MAX_MATRIX_SIZE = 4_000_000
"""Maximum number of elements of a weight matrix, each of which is read again for every few rows."""

FOUR_BIT_BLOCK = 64
"""Number of 4-bit weights that share a scale. Default of bitsandbytes."""

MULTIPLE = 4
"""Model sizes must be multiples of this: compiled products take inputs in groups, and only such sizes are tested."""


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
        own_entries = {
            "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "eos_token_id": eos[0] if isinstance(eos, list) else eos,
        }
        return Qwen2Shape(
            **{field.name: config[field.name] for field in fields(Qwen2Shape) if field.name not in own_entries},
            **own_entries,
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


def is_plain_qwen2(config: Mapping[str, Any]) -> bool:
    """Check whether a config.json describes a Qwen2 model with full attention, unscaled RoPE and SiLU.

    Our own implementation runs these models, and transformers runs all others.
    """
    # transformers 5 writes rope_parameters with rope_type; earlier versions wrote rope_scaling, the oldest with type.
    rope = (config.get("rope_parameters") or {}) | (config.get("rope_scaling") or {})
    is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    is_plain &= not config.get("use_sliding_window") and config.get("hidden_act", "silu") == "silu"
    return is_plain and (config.get("architectures") or [None])[0] == QWEN2_ARCHITECTURE


def find_size_obstacle(hidden_size: int, intermediate_size: int, heads: int, vocab_size: int) -> str:
    """Explain why compiled code cannot run a Qwen2 model of these sizes. Empty if it can.

    Example:
        >>> find_size_obstacle(64, 192, 2, 193)
        ''
        >>> find_size_obstacle(2048, 11008, 16, 151936)
        'its hidden size of 2048 is above 512'
    """
    if hidden_size > MAX_HIDDEN_SIZE:
        return f"its hidden size of {hidden_size} is above {MAX_HIDDEN_SIZE}"
    largest = hidden_size * max(vocab_size, 2 * intermediate_size)
    if largest > MAX_MATRIX_SIZE:
        return f"its largest matrix has {largest:,} elements, and compiled code takes at most {MAX_MATRIX_SIZE:,}"
    sizes = {"hidden": hidden_size, "intermediate": intermediate_size, "head": hidden_size // heads}
    for name, size in sizes.items():
        if size % MULTIPLE:
            return f"its {name} size of {size} is not a multiple of {MULTIPLE}"
    return ""


def find_four_bit_obstacle(inputs: Iterable[int]) -> str:
    """Explain why layers with these numbers of inputs cannot have 4-bit weights here. Empty if they can.

    bitsandbytes' CPU kernel assumes that no block spans two rows of a weight, and returns wrong numbers otherwise
    (seen in 0.50.2).

    Example:
        >>> find_four_bit_obstacle([64, 96])
        'model.load_in_4bit needs layers whose number of inputs is a multiple of 64, and this model has one of 96'
    """
    if find_spec("bitsandbytes") is None:
        return "model.load_in_4bit needs bitsandbytes: type `pip install 'bitsandbytes>=0.50,<0.51'`"
    rule = f"model.load_in_4bit needs layers whose number of inputs is a multiple of {FOUR_BIT_BLOCK}"
    misfits = (f"{rule}, and this model has one of {number}" for number in inputs if number % FOUR_BIT_BLOCK)
    return next(misfits, "")

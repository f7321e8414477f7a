"""Limits of models: for our own Qwen2 implementation, for compiled code, and for 4-bit weights."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from trainable.config.constants import QWEN2_ARCHITECTURE

MAX_HIDDEN_SIZE = 512
"""Matrix products of larger models exceed the caches of one core, and torch is faster for them."""

MAX_MATRIX_SIZE = 4_000_000
"""Maximum number of elements of a weight matrix, each of which is read again for every few rows."""

FOUR_BIT_BLOCK = 64
"""Number of 4-bit weights that share a scale. Default of bitsandbytes."""

MULTIPLE = 4
"""Model sizes must be multiples of this: compiled products take inputs in groups, and only such sizes are tested."""


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
    head_size = hidden_size // heads
    sizes = {"hidden size": hidden_size, "intermediate size": intermediate_size, "head size": head_size}
    for name, size in sizes.items():
        if size % MULTIPLE:
            return f"its {name} of {size} is not a multiple of {MULTIPLE}"
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
    misfits = [number for number in inputs if number % FOUR_BIT_BLOCK]
    return (
        f"model.load_in_4bit needs layers whose number of inputs is a multiple of {FOUR_BIT_BLOCK}, and this model has "
        f"one of {misfits[0]}"
        if misfits
        else ""
    )

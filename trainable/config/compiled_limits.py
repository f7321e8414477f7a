"""Which models the compiled sampler runs."""

MAX_HIDDEN_SIZE = 512
"""Products of larger models leave the caches of one core, and torch is faster there."""

MULTIPLE = 4
"""Sizes of a model must be multiples of this, since the compiled products take that many inputs at a time."""


def find_size_obstacle(hidden_size: int, intermediate_size: int, heads: int) -> str:
    """Why the compiled sampler cannot run a Qwen2 model of these sizes; empty if it can.

    Example:
        >>> find_size_obstacle(64, 192, 2)
        ''
        >>> find_size_obstacle(2048, 11008, 16)
        'its hidden size of 2048 is above 512'
    """
    if hidden_size > MAX_HIDDEN_SIZE:
        return f"its hidden size of {hidden_size} is above {MAX_HIDDEN_SIZE}"
    head_dim = hidden_size // heads
    sizes = {"hidden size": hidden_size, "intermediate size": intermediate_size, "head size": head_dim}
    for name, size in sizes.items():
        if size % MULTIPLE:
            return f"its {name} of {size} is not a multiple of {MULTIPLE}"
    return ""

"""Text to token ids and back, as rollouts ask for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Text to token ids and back, many at a time."""

    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]

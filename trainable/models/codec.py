"""Batched encoding and decoding of text, for rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Functions from texts to token ids and back, for many texts at a time.

    decode: leaves out special tokens, such as the end marker of a reply. decode_all: shows them, too.
    """

    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]
    decode_all: Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]

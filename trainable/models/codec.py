"""Batched encoding and decoding of text, for rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Functions from batches of texts to token ids and back.

    decode: omits special tokens, such as a reply's end marker. decode_all: includes them.
    """

    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]
    decode_all: Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]

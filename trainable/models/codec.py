"""Batched encoding and decoding of text, for rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Batches of texts to token ids and back, by a tokenizer of the package `tokenizers`."""

    tokenizer: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode without adding special tokens, since the chat format writes them as text."""
        # The fast variant does not compute the tokens' offsets in the text.
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[Sequence[int] | np.ndarray], skip_special_tokens: bool = True) -> list[str]:
        """Decode, by default without special tokens, such as a reply's end marker."""
        rows = [row.tolist() if isinstance(row, np.ndarray) else list(row) for row in ids]
        texts: list[str] = self.tokenizer.decode_batch(rows, skip_special_tokens)
        return texts

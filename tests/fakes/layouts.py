"""Small Qwen2 models of several layouts, and rows that grow in their cache."""

import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.models.interface import LanguageModel
from trainable.models.qwen2 import Qwen2

# heads, key-value heads, tied head, layers, rotary base
LAYOUTS = [
    (4, 4, True, 2, 10_000.0),  # one key head per query head
    (4, 2, False, 3, 1_000_000.0),  # grouped
    (4, 1, True, 1, 500.0),  # one key head for all
    (2, 1, False, 2, 10_000.0),
]


def make_layout(heads: int, kv_heads: int, tied: bool, layers: int, theta: float) -> Qwen2:
    sizes = make_qwen2_shape(
        hidden_size=32,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        num_hidden_layers=layers,
        rope_theta=theta,
        rms_norm_eps=1e-5,
    )
    return make_random_model(sizes, seed=heads + kv_heads, std=0.3)


class Rows:
    """Rows that grow in a cache, compared with a full forward pass over each row.

    limit: of the difference, relative and absolute.
    """

    def __init__(self, model: LanguageModel, rows: int, slots: int, limit: float = 1e-5) -> None:
        self.model, self.limit = model, limit
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.cache = model.model.make_cache(rows, slots)

    def extend(self, chunks: list[list[int]]) -> None:
        """Append a chunk to each of the first rows, and compare their last hidden states."""
        width = max(map(len, chunks))
        paddings = torch.tensor([width - len(chunk) for chunk in chunks])[:, None]
        tokens = torch.tensor([[0] * (width - len(chunk)) + chunk for chunk in chunks])
        starts = torch.tensor([len(row) for row in self.tokens[: len(chunks)]])[:, None]
        steps = torch.arange(width) - paddings
        hidden = self.model.model.extend(tokens, (starts + steps).clamp_min(0), steps >= 0, self.cache)
        for row, chunk in enumerate(chunks):
            self.tokens[row] = self.tokens[row] + chunk
            if chunk:
                expected = self.compute_last_hidden(self.tokens[row])
                torch.testing.assert_close(hidden[row], expected, rtol=self.limit, atol=self.limit)

    def compute_last_hidden(self, tokens: list[int]) -> Tensor:
        return self.model.model.compute_hidden_states(torch.tensor([tokens]), torch.tensor([len(tokens) - 1]))[0]

    def select(self, rows: list[int]) -> None:
        self.cache.select_rows(torch.tensor(rows))
        self.tokens = [self.tokens[row] for row in rows]

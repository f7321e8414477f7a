"""Keys and values of tokens that were read, in slots that rows which grow together share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainable.qwen2_shape import Qwen2Shape, rotary


class KVCache:
    """Keys and values of every layer, `(rows, kv_heads, slots, head_dim)`; rows that grow together share slots.

    A slot may be a filler for a row; `bias` (rows, slots) is 0 where the row has a token and -inf where it does not.
    Keys and values are made when they are first written, in the type that the network computes in.
    """

    def __init__(self, shape: Qwen2Shape, rows: int, slots: int, like: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bias = like.new_full((rows, slots), -torch.inf)
        self.used = 0
        self.shape = shape
        self.angles = rotary(torch.arange(slots, device=like.device), shape)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Fill a layer's next q slots with `k`, `v` (B, kv_heads, q, D); all of its first B rows (..., used + q, D)."""
        if layer == len(self.keys):
            size = (self.bias.shape[0], k.shape[1], self.bias.shape[1], k.shape[3])
            # Zeros, since memory never written may hold a NaN, which no bias hides.
            self.keys.append(k.new_zeros(size))
            self.values.append(v.new_zeros(size))
        end = self.used + k.shape[2]
        keys, values = self.keys[layer][: len(k)], self.values[layer][: len(k)]
        keys[:, :, self.used : end] = k
        values[:, :, self.used : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, slots: int) -> None:
        """Make room for `slots` more."""
        short = self.used + slots - self.bias.shape[1]
        if short > 0:
            grow = max(short, self.bias.shape[1] // 2)
            self.keys = [F.pad(keys, (0, 0, 0, grow)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, grow)) for values in self.values]
            self.bias = F.pad(self.bias, (0, grow), value=-torch.inf)
            self.angles = rotary(torch.arange(self.bias.shape[1], device=self.bias.device), self.shape)

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (indices, repeats allowed) in that order."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.bias = self.bias.index_select(0, rows)

    def pack(self) -> None:
        """Move each row's tokens into its first slots, so that fillers cost no attention."""
        filler = self.bias != 0
        slots = torch.argsort(filler, dim=1, stable=True)
        self.keys = [_gathered(keys, slots) for keys in self.keys]
        self.values = [_gathered(values, slots) for values in self.values]
        self.bias = self.bias.gather(1, slots)
        self.used = int((~filler).sum(1).max())


def _gathered(store: Tensor, slots: Tensor) -> Tensor:
    """`store` (rows, kv_heads, slots, D) with each row's slots in the order `slots` (rows, slots)."""
    rows, heads, length, size = store.shape
    first = torch.arange(rows * heads, device=store.device).view(rows, heads, 1) * length
    return store.view(-1, size).index_select(0, (first + slots[:, None]).flatten()).view(store.shape)

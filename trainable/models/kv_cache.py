"""A key-value cache for a batch of conversations and any architecture."""

import torch
from torch import Tensor
from torch.nn import functional as F


class KVCache:
    """Keys and values of every layer, `(rows, kv_heads, slots, head_dim)`.

    All rows grow together: the new tokens of a step take the same slots in every row. Rows without a token there get a
    filler. `bias` (rows, slots) is 0 for tokens and -inf for fillers. Keys and values are allocated by the first write,
    in the dtype of the network's passes. angles: the network's table of rotary positions, with one entry per slot.
    """

    def __init__(self, rows: int, slots: int, like: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bias = like.new_full((rows, slots), -torch.inf)
        self.used_slots = 0
        self.angles: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write `k`, `v` (B, kv_heads, q, D) to a layer's next q slots; return its first B rows (..., used + q, D)."""
        if layer == len(self.keys):
            size = (self.bias.shape[0], k.shape[1], self.bias.shape[1], k.shape[3])
            # Zeros, because uninitialized memory may contain NaNs, which no bias can mask.
            self.keys.append(k.new_zeros(size))
            self.values.append(v.new_zeros(size))
        end = self.used_slots + k.shape[2]
        keys, values = self.keys[layer][: len(k)], self.values[layer][: len(k)]
        keys[:, :, self.used_slots : end] = k
        values[:, :, self.used_slots : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, slots: int) -> None:
        """Grow the cache if it has fewer than `slots` unused slots."""
        missing_slots = self.used_slots + slots - self.bias.shape[1]
        if missing_slots > 0:
            # Grow by at least half, so that the cache of a growing conversation is copied only a few times.
            extra_slots = max(missing_slots, self.bias.shape[1] // 2)
            self.keys = [F.pad(keys, (0, 0, 0, extra_slots)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, extra_slots)) for values in self.values]
            self.bias = F.pad(self.bias, (0, extra_slots), value=-torch.inf)

    def append_slots(self, valid: Tensor) -> Tensor:
        """Reserve slots for q new tokens of the first B rows; return the attention bias (B, 1 or q, slots).

        valid: (B, q), False for fillers. The bias covers the used slots and the q new ones. The caller adds q to
        `used_slots` after all layers have been written.
        """
        batch, new_slots = valid.shape
        self.reserve(new_slots)
        end = self.used_slots + new_slots
        self.bias[:batch, self.used_slots : end] = torch.where(valid, 0.0, -torch.inf)
        bias = self.bias[:batch, None, :end]
        if new_slots > 1:  # new tokens must not see later ones; a single new token has none
            # Not -inf: a filler on the left sees no token, and a softmax over only -inf gives NaN. -6e4 is finite even
            # in float16, and its exponential is 0.
            causal_bias = torch.full((new_slots, new_slots), -torch.inf, device=valid.device).triu(1)
            bias = (bias + F.pad(causal_bias, (self.used_slots, 0))).clamp_min(-6e4)
        return bias

    def make_tree_bias(self, tree_mask: Tensor, rows: int) -> Tensor:
        """Make the bias (rows, F, used + F) of F tokens, which see all tokens of a row.

        tree_mask: (F, F) bool, True where a token (row) sees another (column).
        """
        prefix_bias = self.bias[:, None, : self.used_slots].expand(-1, len(tree_mask), -1)
        return torch.cat(
            (prefix_bias, torch.where(tree_mask, 0.0, -torch.inf).expand(rows, -1, -1).to(prefix_bias.dtype)), dim=-1
        )

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the given rows, in the given order. Indices may repeat."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.bias = self.bias.index_select(0, rows)

    def pack(self) -> None:
        """Move the tokens of each row to its first slots, so that attention computes fewer fillers."""
        filler_mask = self.bias != 0
        # A stable sort of False before True: tokens first, in their order.
        slots = torch.argsort(filler_mask, dim=1, stable=True)
        self.keys = [_gather_slots(keys, slots) for keys in self.keys]
        self.values = [_gather_slots(values, slots) for values in self.values]
        self.bias = self.bias.gather(1, slots)
        self.used_slots = int((~filler_mask).sum(1).max())


def _gather_slots(store: Tensor, slots: Tensor) -> Tensor:
    """Reorder the slots of each row of `store` (rows, kv_heads, slots, D) by `slots` (rows, slots)."""
    rows, heads, length, size = store.shape
    first_indices = torch.arange(rows * heads, device=store.device).view(rows, heads, 1) * length
    return store.view(-1, size).index_select(0, (first_indices + slots[:, None]).flatten()).view(store.shape)

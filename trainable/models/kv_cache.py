"""The key-value cache of a conversation's rows, which share slots whatever the architecture of the model."""

import torch
from torch import Tensor
from torch.nn import functional as F


class KVCache:
    """Keys and values of every layer, `(rows, kv_heads, slots, head_dim)`; rows that grow together share slots.

    A slot may be a filler for a row; `bias` (rows, slots) is 0 where the row has a token and -inf where it does not.
    Keys and values are made when they are first written, in the type that the network computes in. angles: a network's
    own table of rotary positions, kept here since it is as long as the cache.
    """

    def __init__(self, rows: int, slots: int, like: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bias = like.new_full((rows, slots), -torch.inf)
        self.used = 0
        self.angles: tuple[Tensor, Tensor] | None = None

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

    def admit(self, valid: Tensor) -> Tensor:
        """Make room for `valid` (B, q) new tokens, fillers False, in the first B rows; their bias (B, 1 or q, slots).

        Slots are those used and the q new ones, which count as used once the network has written them.
        """
        batch, new = valid.shape
        self.reserve(new)
        end = self.used + new
        self.bias[:batch, self.used : end] = torch.where(valid, 0.0, -torch.inf)
        bias = self.bias[:batch, None, :end]
        if new > 1:
            # The finite floor keeps a filler's own row of scores from being all -inf, which softmax turns into NaN.
            later = torch.full((new, new), -torch.inf, device=valid.device).triu(1)
            bias = (bias + F.pad(later, (self.used, 0))).clamp_min(-1e30)
        return bias

    def bias_after(self, sees: Tensor, rows: int) -> Tensor:
        """The bias (rows, F, used + F) of F tokens that see the row and, of each other, `sees` (F, F) bool."""
        prefix = self.bias[:, None, : self.used].expand(-1, len(sees), -1)
        return torch.cat((prefix, torch.where(sees, 0.0, -torch.inf).expand(rows, -1, -1).to(prefix.dtype)), dim=-1)

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

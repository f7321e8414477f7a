"""E causal transformers of one shape, side by side: every weight has a leading axis of members.

The model of the sequence tasks: token embedding times sqrt(d_model) plus a learned position, pre-norm blocks with a
ReLU feed-forward of 4 d_model, a final normalisation, a head without bias. It computes what a
`torch.nn.TransformerEncoder` of the same weights computes, in fewer passes over memory: a normalisation's scale and
shift are folded into the matrix that follows it, and the last block leaves out the positions nobody reads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.sandbox.batch.members import Streams


@dataclass(frozen=True)
class TransformerShape:
    """Sizes: tokens of the vocabulary, width d, heads of d / heads channels, blocks, and the longest sequence."""

    vocab: int
    d_model: int
    heads: int
    blocks: int
    positions: int


class Linear(NamedTuple):
    """matrix [E, in, out] and shift [E, 1, out]."""

    matrix: Tensor
    shift: Tensor


class Block(NamedTuple):
    """What one block multiplies with; the normalisation before a matrix is part of it, as is 1 / sqrt(d / heads)."""

    query: Linear
    key_value: Linear
    out: Linear
    up: Linear
    down: Linear


class Folded(NamedTuple):
    """All of the models' weights as a pass uses them. tokens: [E, vocab, d], scaled. positions: [E, positions, d]."""

    tokens: Tensor
    positions: Tensor
    blocks: tuple[Block, ...]
    head: Linear


class Transformers:
    """E causal transformers (see the module). Weights are named and laid out as torch's layers have them, after E."""

    def __init__(self, shape: TransformerShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.weights = dict(weights)

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """All weights, [E, ...] each."""
        return self.weights

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        """Logits [E, B, last, vocab] at the last positions of tokens [E, B, L]; all sequences have one length."""
        folded = self.folded()
        hidden = embedded(folded, tokens, 0)
        for number, block in enumerate(folded.blocks):
            read = last if number == self.shape.blocks - 1 else tokens.shape[-1]
            normal = normalised(hidden)
            keys, values = keys_and_values(block, normal, self.shape.heads)
            hidden = after_attention(block, hidden[:, :, -read:], normal[:, :, -read:], keys, values)
        return linear(normalised(hidden), folded.head)

    def folded(self) -> Folded:
        """The weights as passes use them; gradients flow through."""
        weights = self.weights
        return Folded(
            weights["embedding.weight"] * math.sqrt(self.shape.d_model),
            weights["positions.weight"],
            tuple(self._block(f"blocks.{number}.") for number in range(self.shape.blocks)),
            _after_norm(weights["norm.weight"], weights["norm.bias"], weights["head.weight"], None),
        )

    def _block(self, prefix: str) -> Block:
        width = self.shape.d_model
        own = {name.removeprefix(prefix): weight for name, weight in self.weights.items() if name.startswith(prefix)}
        norm1, norm2 = ((own[f"{norm}.weight"], own[f"{norm}.bias"]) for norm in ("norm1", "norm2"))
        attention, shift = own["self_attn.in_proj_weight"], own["self_attn.in_proj_bias"]
        scale = math.sqrt(self.shape.heads / width)
        return Block(
            query=_after_norm(*norm1, attention[:, :width] * scale, shift[:, :width] * scale),
            key_value=_after_norm(*norm1, attention[:, width:], shift[:, width:]),
            out=_plain(own["self_attn.out_proj.weight"], own["self_attn.out_proj.bias"]),
            up=_after_norm(*norm2, own["linear1.weight"], own["linear1.bias"]),
            down=_plain(own["linear2.weight"], own["linear2.bias"]),
        )


def _plain(weight: Tensor, bias: Tensor) -> Linear:
    return Linear(weight.transpose(1, 2), bias[:, None])


def _after_norm(norm_scale: Tensor, norm_shift: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    """What applies `weight` [E, out, in] and `bias` [E, out] to a state times norm_scale plus norm_shift [E, in]."""
    shift = torch.bmm(norm_shift[:, None], weight.transpose(1, 2))
    return Linear((weight * norm_scale[:, None]).transpose(1, 2), shift if bias is None else shift + bias[:, None])


def normalised(hidden: Tensor) -> Tensor:
    """Layer normalisation of the last axis, without scale and shift."""
    return F.layer_norm(hidden, hidden.shape[-1:])


def linear(states: Tensor, by: Linear) -> Tensor:
    """States [E, B, L, in] times the members' matrices, plus their shifts: [E, B, L, out]."""
    return _flat_linear(states, by).view(*states.shape[:-1], -1)


def _flat_linear(states: Tensor, by: Linear) -> Tensor:
    """`linear` with all states of a member in one axis: [E, B L, out]."""
    return torch.baddbmm(by.shift, states.reshape(states.shape[0], -1, states.shape[-1]), by.matrix)


def embedded(folded: Folded, tokens: Tensor, first: int) -> Tensor:
    """Hidden states [E, B, L, d] of tokens [E, B, L] that stand at positions first, first + 1, ..."""
    members, rows, length = tokens.shape
    hot = tokens.flatten(1)[..., None] == torch.arange(folded.tokens.shape[1])
    states = torch.bmm(hot.to(folded.tokens.dtype), folded.tokens).view(members, rows, length, -1)
    return states + folded.positions[:, None, first : first + length]


def keys_and_values(block: Block, normal: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, [E, B, heads, L, d / heads] each, of normalised states [E, B, L, d]."""
    both = linear(normal, block.key_value).unflatten(-1, (2, heads, -1))
    keys, values = both.permute(3, 0, 1, 4, 2, 5)
    return keys, values


def after_attention(block: Block, hidden: Tensor, normal: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Hidden states [E, B, q, d] after the block.

    hidden, normal: [E, B, q, d], what enters it and the same normalised, at the last q positions of the keys.
    """
    queries = linear(normal, block.query).unflatten(-1, (keys.shape[2], -1)).transpose(2, 3)
    hidden = _added(hidden, _attention(queries, keys, values).flatten(1, 2), block.out)
    # In place before it is a view: in place on a view would cost copies of it in the backward pass.
    return _added(hidden, _flat_linear(normalised(hidden), block.up).relu_(), block.down)


def _added(hidden: Tensor, update: Tensor, by: Linear) -> Tensor:
    """Hidden states [E, B, q, d] plus an update [E, B q, in] times the members' matrices, plus their shifts."""
    start = (hidden + by.shift[:, None]).flatten(1, 2)
    return torch.baddbmm(start, update, by.matrix).view(hidden.shape)


def _attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values [E, B, q, d] of scaled queries [E, B, heads, q, c]; a query sees keys up to its own position."""
    members, rows, heads, asked, channels = queries.shape
    length = keys.shape[3]
    unseen = torch.full((asked, length), -math.inf).triu(length - asked + 1)
    scores = torch.baddbmm(unseen, queries.reshape(-1, asked, channels), keys.flatten(0, 2).transpose(1, 2))
    mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 2))
    return mixed.view(members, rows, heads, asked, channels).transpose(2, 3).flatten(3)


def first_transformers(shape: TransformerShape, streams: Streams) -> Transformers:
    """First weights of each member from its own stream, distributed as torch's layers start.

    Normal embeddings; all blocks alike, as torch.nn.TransformerEncoder copies one layer.
    """
    width = shape.d_model
    drawn = {
        "embedding.weight": streams.normal("sandbox_weights", 1, shape=(shape.vocab, width)),
        "positions.weight": streams.normal("sandbox_weights", 2, shape=(shape.positions, width)),
        "head.weight": _uniform(streams, 3, (shape.vocab, width), width**-0.5),
    }
    block = {
        "self_attn.in_proj_weight": _uniform(streams, 4, (3 * width, width), math.sqrt(6 / (4 * width))),
        "self_attn.out_proj.weight": _uniform(streams, 5, (width, width), width**-0.5),
        "linear1.weight": _uniform(streams, 6, (4 * width, width), width**-0.5),
        "linear1.bias": _uniform(streams, 7, (4 * width,), width**-0.5),
        "linear2.weight": _uniform(streams, 8, (width, 4 * width), (4 * width) ** -0.5),
        "linear2.bias": _uniform(streams, 9, (width,), (4 * width) ** -0.5),
    }
    members = len(streams.seeds)
    zeros = {"self_attn.in_proj_bias": 3 * width, "self_attn.out_proj.bias": width}
    block |= {name: torch.zeros(members, size) for name, size in zeros.items()}
    block |= _unit_norm("norm1", members, width) | _unit_norm("norm2", members, width)
    drawn |= _unit_norm("norm", members, width)
    drawn |= {f"blocks.{k}.{name}": first.clone() for k in range(shape.blocks) for name, first in block.items()}
    return Transformers(shape, {name: first.float().requires_grad_() for name, first in drawn.items()})


def _uniform(streams: Streams, number: int, shape: tuple[int, ...], bound: float) -> Tensor:
    return (2 * streams.uniform("sandbox_weights", number, shape=shape) - 1) * bound


def _unit_norm(name: str, members: int, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(members, width), f"{name}.bias": torch.zeros(members, width)}

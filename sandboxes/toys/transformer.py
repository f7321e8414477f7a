"""Ensemble of E causal transformers of one shape; every weight has a leading axis of members.

The model of the sequence tasks: token embedding times sqrt(d_model) plus a learned position embedding, pre-norm blocks
with a ReLU feed-forward layer of width 4 d_model, a final normalization, and a head without bias. It equals a
`torch.nn.TransformerEncoder` with the same weights but needs fewer passes over memory: the scale and shift of a
normalization are folded into the matrix that follows it, and the last block skips positions whose output is not used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer: vocabulary, width d, heads of d / heads channels, blocks, and the longest sequence."""

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    max_positions: int


class Linear(NamedTuple):
    """An affine map per member: matrix [E, in, out] and bias [E, 1, out]."""

    matrix: Tensor
    bias: Tensor


class Block(NamedTuple):
    """The maps of one block, with the preceding normalization and the scale 1 / sqrt(d / heads) folded in."""

    query: Linear
    key_value: Linear
    out: Linear
    up: Linear
    down: Linear


class FoldedWeights(NamedTuple):
    """The models' weights in the form that a forward pass uses."""

    token_embeddings: Tensor
    """[E, vocab, d], scaled by sqrt(d)."""
    position_embeddings: Tensor
    """[E, positions, d]."""
    blocks: tuple[Block, ...]
    head: Linear


class TransformerEnsemble:
    """E causal transformers (see the module). Names and shapes of weights are torch's, with a leading axis E."""

    def __init__(self, shape: TransformerShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.weights = dict(weights)

    def compute_logits(self, tokens: Tensor, logits_to_keep: int) -> Tensor:
        """Compute logits [E, B, logits_to_keep, vocab] at the last positions of tokens [E, B, L], without padding."""
        folded_weights = self.fold_weights()
        hidden, _ = self.read_tokens(folded_weights, tokens, logits_to_keep)
        return linear(layer_norm(hidden), folded_weights.head)

    def read_tokens(
        self, folded_weights: FoldedWeights, tokens: Tensor, num_last: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute hidden states [E, B, num_last, d] at the last positions of tokens [E, B, L], and keys and values."""
        hidden, keys_values = embed_tokens(folded_weights, tokens, start_position=0), []
        for layer, block in enumerate(folded_weights.blocks):
            # The last block is computed only at the positions whose output is used.
            num_queries = num_last if layer == self.shape.num_layers - 1 else tokens.shape[-1]
            normed_hidden = layer_norm(hidden)
            keys, values = compute_keys_values(block, normed_hidden, self.shape.num_heads)
            hidden = apply_block(block, hidden[:, :, -num_queries:], normed_hidden[:, :, -num_queries:], keys, values)
            keys_values.append((keys, values))
        return hidden, keys_values

    def fold_weights(self) -> FoldedWeights:
        """Convert the weights to the form that forward passes use; gradients flow through."""
        weights = self.weights
        return FoldedWeights(
            weights["embedding.weight"] * math.sqrt(self.shape.d_model),
            weights["positions.weight"],
            tuple(self._fold_block(f"blocks.{layer}.") for layer in range(self.shape.num_layers)),
            _fold_norm(weights["norm.weight"], weights["norm.bias"], weights["head.weight"], bias=None),
        )

    def _fold_block(self, prefix: str) -> Block:
        width = self.shape.d_model
        block_weights = {
            name.removeprefix(prefix): weight for name, weight in self.weights.items() if name.startswith(prefix)
        }
        norm1, norm2 = ((block_weights[f"{norm}.weight"], block_weights[f"{norm}.bias"]) for norm in ("norm1", "norm2"))
        in_proj_weight, in_proj_bias = (block_weights[f"self_attn.in_proj_{name}"] for name in ("weight", "bias"))
        # The scale of attention, 1 / sqrt(d / heads), is folded into the queries.
        scale = math.sqrt(self.shape.num_heads / width)
        return Block(
            query=_fold_norm(*norm1, in_proj_weight[:, :width] * scale, in_proj_bias[:, :width] * scale),
            key_value=_fold_norm(*norm1, in_proj_weight[:, width:], in_proj_bias[:, width:]),
            out=_make_linear(block_weights["self_attn.out_proj.weight"], block_weights["self_attn.out_proj.bias"]),
            up=_fold_norm(*norm2, block_weights["linear1.weight"], block_weights["linear1.bias"]),
            down=_make_linear(block_weights["linear2.weight"], block_weights["linear2.bias"]),
        )


def _make_linear(weight: Tensor, bias: Tensor) -> Linear:
    return Linear(weight.transpose(1, 2), bias[:, None])


def _fold_norm(norm_scale: Tensor, norm_shift: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    """Fold a normalization [E, in] into an affine map [E, out, in]: x to weight (norm_scale x + norm_shift) + bias."""
    folded_bias = torch.bmm(norm_shift[:, None], weight.transpose(1, 2))
    return Linear(
        (weight * norm_scale[:, None]).transpose(1, 2), folded_bias if bias is None else folded_bias + bias[:, None]
    )


def layer_norm(hidden: Tensor) -> Tensor:
    """Normalize over the last axis, without scale and shift, which are folded into the next matrix."""
    return F.layer_norm(hidden, hidden.shape[-1:])


def linear(states: Tensor, layer: Linear) -> Tensor:
    """Apply each member's affine map to states [E, B, L, in]: [E, B, L, out]."""
    return _flat_linear(states, layer).view(*states.shape[:-1], -1)


def _flat_linear(states: Tensor, layer: Linear) -> Tensor:
    """Apply `linear` with all states of a member flattened into one axis: [E, B L, out]."""
    return torch.baddbmm(layer.bias, states.reshape(states.shape[0], -1, states.shape[-1]), layer.matrix)


def embed_tokens(folded_weights: FoldedWeights, tokens: Tensor, start_position: int) -> Tensor:
    """Embed tokens [E, B, L] at positions start_position, start_position + 1, ... as hidden states [E, B, L, d]."""
    num_members, rows, length = tokens.shape
    # One batched product with one-hot rows looks up each member's tokens in that member's table.
    one_hot = tokens.flatten(1)[..., None] == torch.arange(folded_weights.token_embeddings.shape[1])
    states = torch.bmm(one_hot.to(folded_weights.token_embeddings.dtype), folded_weights.token_embeddings).view(
        num_members, rows, length, -1
    )
    return states + folded_weights.position_embeddings[:, None, start_position : start_position + length]


def compute_keys_values(block: Block, normed_hidden: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Compute keys and values, [E, B, heads, L, d / heads] each, of normalized hidden states [E, B, L, d]."""
    keys_values = linear(normed_hidden, block.key_value).unflatten(-1, (2, num_heads, -1))
    keys, values = keys_values.permute(3, 0, 1, 4, 2, 5)
    return keys, values


def apply_block(block: Block, hidden: Tensor, normed_hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Apply a block; returns hidden states [E, B, q, d].

    hidden, normed_hidden: [E, B, q, d], the input and the normalized input, at the last q positions of the keys.
    """
    queries = linear(normed_hidden, block.query).unflatten(-1, (keys.shape[2], -1)).transpose(2, 3)
    hidden = _add_linear(hidden, _attention(queries, keys, values).flatten(1, 2), block.out)
    # The flat result is not a view; an in-place operation on a view would cost copies in the backward pass.
    return _add_linear(hidden, _flat_linear(layer_norm(hidden), block.up).relu_(), block.down)


def _add_linear(hidden: Tensor, update: Tensor, layer: Linear) -> Tensor:
    """Add each member's affine map of an update [E, B q, in] to hidden states [E, B, q, d], in one operation."""
    residual = (hidden + layer.bias[:, None]).flatten(1, 2)
    return torch.baddbmm(residual, update, layer.matrix).view(hidden.shape)


def _attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Apply causal attention to scaled queries [E, B, heads, q, c] at the last q positions; returns [E, B, q, d]."""
    num_members, rows, num_heads, num_queries, channels = queries.shape
    length = keys.shape[3]
    # The queries are at the last positions, so the diagonal of the mask is shifted by the number of earlier keys.
    causal_mask = torch.full((num_queries, length), -math.inf).triu(length - num_queries + 1)
    scores = torch.baddbmm(causal_mask, queries.reshape(-1, num_queries, channels), keys.flatten(0, 2).transpose(1, 2))
    attention_output = torch.bmm(scores.softmax(-1), values.flatten(0, 2))
    return attention_output.view(num_members, rows, num_heads, num_queries, channels).transpose(2, 3).flatten(3)


def make_shape(config: Any) -> TransformerShape:
    """Make the shape of a configuration with num_actions, d_model, nhead, num_layers and max_positions."""
    return TransformerShape(config.num_actions, config.d_model, config.nhead, config.num_layers, config.max_positions)


def init_transformer_ensemble(shape: TransformerShape, rngs: MemberRngs) -> TransformerEnsemble:
    """Initialize each member's weights from a separate random stream, with the distributions of torch's layers.

    Embeddings are normal. All blocks start with equal weights, because torch.nn.TransformerEncoder copies one layer.
    """
    width = shape.d_model
    initial_weights = {
        "embedding.weight": rngs.normal("sandbox_weights", 1, shape=(shape.vocab_size, width)),
        "positions.weight": rngs.normal("sandbox_weights", 2, shape=(shape.max_positions, width)),
        "head.weight": rngs.bounded_weights(3, (shape.vocab_size, width), width**-0.5),
    }
    block_weights = {
        # Xavier's bound, sqrt(6 / (inputs + outputs)), as torch.nn.MultiheadAttention uses.
        "self_attn.in_proj_weight": rngs.bounded_weights(4, (3 * width, width), math.sqrt(6 / (4 * width))),
        "self_attn.out_proj.weight": rngs.bounded_weights(5, (width, width), width**-0.5),
        "linear1.weight": rngs.bounded_weights(6, (4 * width, width), width**-0.5),
        "linear1.bias": rngs.bounded_weights(7, (4 * width,), width**-0.5),
        "linear2.weight": rngs.bounded_weights(8, (width, 4 * width), (4 * width) ** -0.5),
        "linear2.bias": rngs.bounded_weights(9, (width,), (4 * width) ** -0.5),
    }
    ones, zeros = torch.ones(len(rngs.seeds), width), torch.zeros(len(rngs.seeds), width)
    block_weights |= {"self_attn.in_proj_bias": zeros.repeat(1, 3), "self_attn.out_proj.bias": zeros.clone()}
    for weights, name in ((block_weights, "norm1"), (block_weights, "norm2"), (initial_weights, "norm")):
        weights |= {f"{name}.weight": ones.clone(), f"{name}.bias": zeros.clone()}
    initial_weights |= {
        f"blocks.{k}.{name}": first.clone() for k in range(shape.num_layers) for name, first in block_weights.items()
    }
    return TransformerEnsemble(shape, {name: first.float().requires_grad_() for name, first in initial_weights.items()})

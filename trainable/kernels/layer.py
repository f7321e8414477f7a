"""A block of a tiny Qwen2 over a stream of sequences, with gradient: matrix products in torch, the rest compiled."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainable.kernels import compiled


class LayerWeights(NamedTuple):
    """The weights of a block. As in torch, matrices are (outputs, inputs)."""

    attention_gain: Tensor
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    output_weight: Tensor
    mlp_gain: Tensor
    gate_weight: Tensor
    up_weight: Tensor
    down_weight: Tensor


class LayerInputs(NamedTuple):
    """Inputs of a block besides its residual stream (N, hidden) and weights.

    cosines, sines: (positions, head_dim / 2). positions: (N,) of each token in its sequence. starts: (R + 1,), bounds
    of the sequences in the stream. query_positions: (M,), ascending within each sequence. query_starts: (R + 1,),
    bounds of each sequence's queries. query_indices: (M,) tokens whose residuals the block returns; None for all
    tokens. heads, kv_heads: of the attention. eps: of the norms.
    """

    cosines: compiled.Floats
    sines: compiled.Floats
    positions: compiled.Integers
    starts: compiled.Integers
    query_positions: compiled.Integers
    query_starts: compiled.Integers
    query_indices: Tensor | None
    heads: int
    kv_heads: int
    eps: float

    @property
    def attention_arguments(self) -> tuple[compiled.Integers, compiled.Integers, compiled.Integers, int, int]:
        """The arguments of the compiled attention that do not depend on the weights."""
        return self.starts, self.query_positions, self.query_starts, self.heads, self.kv_heads


class StreamLayer(torch.autograd.Function):
    """A block as one autograd operation, `apply(x, inputs, *weights)`, with the weights of `LayerWeights`.

    x: (N, hidden), float32 on the CPU. Returns it (M, hidden) at the queries.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: LayerInputs, *layer_weights: Tensor) -> Tensor:
        """Run the block and save tensors for the gradient."""
        w, eps = LayerWeights(*layer_weights), np.float32(inputs.eps)
        qkv_weight = torch.cat((w.q_weight, w.k_weight, w.v_weight))
        gate_up_weight = torch.cat((w.gate_weight, w.up_weight))
        normed, inverses = _normalize(x, w.attention_gain, eps)
        qkv = torch.addmm(torch.cat((w.q_bias, w.k_bias, w.v_bias)), normed, qkv_weight.t())
        head_size = len(w.q_weight) // inputs.heads
        _rotate(qkv, inputs, head_size, 1)
        num_queries = len(inputs.query_positions)
        attention, log_totals = x.new_empty(num_queries, len(w.q_weight)), x.new_empty(num_queries, inputs.heads)
        compiled.attend_stream(qkv.numpy(), *inputs.attention_arguments, attention.numpy(), log_totals.numpy())
        residual = x if inputs.query_indices is None else x.index_select(0, inputs.query_indices)
        residual = torch.addmm(residual, attention, w.output_weight.t())
        mlp_normed, mlp_inverses = _normalize(residual, w.mlp_gain, eps)
        gate_up = mlp_normed @ gate_up_weight.t()
        gated = gate_up.new_empty(num_queries, len(w.gate_weight))
        compiled.apply_gate(gate_up.numpy(), gated.numpy(), num_queries)
        attention_tensors = (x, normed, inverses, qkv, attention, log_totals)
        mlp_tensors = (residual, mlp_normed, mlp_inverses, gate_up, gated)
        weights = (qkv_weight, gate_up_weight, w.attention_gain, w.output_weight, w.mlp_gain, w.down_weight)
        ctx.save_for_backward(*attention_tensors, *mlp_tensors, *weights)
        ctx.inputs, ctx.head_size = inputs, head_size
        return torch.addmm(residual, gated, w.down_weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the residual stream and the weights."""
        saved_tensors = ctx.saved_tensors
        x, normed, inverses, qkv, attention, log_totals = saved_tensors[:6]
        residual, mlp_normed, mlp_inverses, gate_up, gated = saved_tensors[6:11]
        qkv_weight, gate_up_weight, attention_gain, output_weight, mlp_gain, down_weight = saved_tensors[11:]
        inputs: LayerInputs = ctx.inputs
        head_size: int = ctx.head_size
        y_grad = y_grad.contiguous()
        gated_grad, gate_up_grad = y_grad @ down_weight, torch.empty_like(gate_up)
        compiled.apply_gate_backward(gate_up.numpy(), gated_grad.numpy(), gate_up_grad.numpy())
        residual_grad, mlp_gain_grad = y_grad.clone(), torch.zeros_like(mlp_gain)
        _normalize_backward(
            gate_up_grad @ gate_up_weight, residual, mlp_gain, mlp_inverses, residual_grad, mlp_gain_grad
        )
        if inputs.query_indices is None:
            x_grad, qkv_grad = residual_grad.clone(), torch.empty_like(qkv)
        else:
            x_grad = torch.zeros_like(x).index_copy_(0, inputs.query_indices, residual_grad)
            qkv_grad = torch.zeros_like(qkv)
        arguments = (qkv.numpy(), *inputs.attention_arguments, attention.numpy(), log_totals.numpy())
        compiled.attend_stream_backward(*arguments, (residual_grad @ output_weight).numpy(), qkv_grad.numpy())
        _rotate(qkv_grad, inputs, head_size, -1)
        attention_gain_grad = torch.zeros_like(attention_gain)
        _normalize_backward(qkv_grad @ qkv_weight, x, attention_gain, inverses, x_grad, attention_gain_grad)
        sizes = [inputs.heads * head_size, inputs.kv_heads * head_size, inputs.kv_heads * head_size]
        gate_grad, up_grad = (gate_up_grad.t() @ mlp_normed).chunk(2)
        return (  # in the order of `forward`'s arguments, with weights as in `LayerWeights`
            x_grad,
            None,
            attention_gain_grad,
            *(qkv_grad.t() @ normed).split(sizes),
            *qkv_grad.sum(0).split(sizes),
            residual_grad.t() @ attention,
            mlp_gain_grad,
            gate_grad,
            up_grad,
            y_grad.t() @ gated,
        )


def _normalize(x: Tensor, gain: Tensor, eps: np.float32) -> tuple[Tensor, Tensor]:
    """Normalize the rows of `x`; also return 1 / their root mean squares."""
    normed, inverses = torch.empty_like(x), x.new_empty(len(x))
    compiled.normalize(x.detach().numpy(), gain.detach().numpy(), eps, normed.numpy(), inverses.numpy(), len(x))
    return normed, inverses


def _normalize_backward(
    y_grad: Tensor, x: Tensor, gain: Tensor, inverses: Tensor, x_grad: Tensor, gain_grad: Tensor
) -> None:
    """Add the gradients of `_normalize` to `x_grad` and `gain_grad`."""
    compiled.normalize_backward(
        y_grad.numpy(), x.detach().numpy(), gain.detach().numpy(), inverses.numpy(), x_grad.numpy(), gain_grad.numpy()
    )


def _rotate(qkv: Tensor, inputs: LayerInputs, head_size: int, direction: int) -> None:
    """Rotate queries and keys in place."""
    heads, tables = inputs.heads + inputs.kv_heads, (inputs.cosines, inputs.sines)
    compiled.rotate(qkv.numpy(), *tables, inputs.positions, heads, head_size, np.float32(direction))

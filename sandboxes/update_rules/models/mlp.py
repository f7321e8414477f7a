"""Ensemble of E multilayer perceptrons of one shape; every weight has a leading axis of members.

The model of mnist: two hidden layers with ReLU, initialized like torch.nn.Linear, with weights and biases uniform
within 1 / sqrt(inputs).
"""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs


class MLPEnsemble:
    """E perceptrons. weights: "layers.<k>.weight" [E, out, in] and "layers.<k>.bias" [E, out] of each layer k."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    def get_parameters(self) -> Mapping[str, Tensor]:
        """All weights, [E, ...] each."""
        return self.weights

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Logits [E, B, out] of inputs [E, B, in]; with gradients."""
        num_layers = len(self.weights) // 2
        for layer in range(num_layers):
            weight, bias = self.weights[f"layers.{layer}.weight"], self.weights[f"layers.{layer}.bias"]
            inputs = torch.baddbmm(bias[:, None], inputs, weight.transpose(1, 2))
            if layer < num_layers - 1:
                inputs = inputs.relu_()
        return inputs


def init_mlp_ensemble(layer_sizes: tuple[int, ...], rngs: MemberRngs) -> MLPEnsemble:
    """Initial weights of each member from its own stream. layer_sizes: of the input, the hidden layers, the output."""
    weights = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(layer_sizes)):
        for tensor_index, shape in enumerate(((fan_out, fan_in), (fan_out,))):
            # Index 1, 2, ... of the stream: weight and bias of the first layer, then of the next.
            uniforms = rngs.uniform("sandbox_weights", 2 * layer + tensor_index + 1, shape=shape)
            name = f"layers.{layer}.{('weight', 'bias')[tensor_index]}"
            weights[name] = ((2 * uniforms - 1) * fan_in**-0.5).float().requires_grad_()
    return MLPEnsemble(weights)

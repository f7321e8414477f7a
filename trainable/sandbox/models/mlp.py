"""E multilayer perceptrons of one shape, side by side: every weight has a leading axis of members.

The model of mnist: two hidden layers with ReLU, started as torch.nn.Linear starts: weights and biases uniform within
1 / sqrt(inputs).
"""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from trainable.sandbox.batch.members import Streams


class Perceptrons:
    """weights: "layers.<k>.weight" [E, out, in] and "layers.<k>.bias" [E, out], of any number of layers."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """All weights, [E, ...] each."""
        return self.weights

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits [E, B, out] of inputs [E, B, in]; with gradients."""
        layers = len(self.weights) // 2
        for layer in range(layers):
            weight, bias = self.weights[f"layers.{layer}.weight"], self.weights[f"layers.{layer}.bias"]
            inputs = torch.baddbmm(bias[:, None], inputs, weight.transpose(1, 2))
            if layer < layers - 1:
                inputs = inputs.relu_()
        return inputs


def first_perceptrons(sizes: tuple[int, ...], streams: Streams) -> Perceptrons:
    """First weights of each member from its own stream; sizes: of the input, of each hidden layer, of the output."""
    weights = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        for part, shape in enumerate(((outputs, inputs), (outputs,))):
            uniforms = streams.uniform("sandbox_weights", 2 * layer + part + 1, shape=shape)
            name = f"layers.{layer}.{('weight', 'bias')[part]}"
            weights[name] = ((2 * uniforms - 1) * inputs**-0.5).float().requires_grad_()
    return Perceptrons(weights)

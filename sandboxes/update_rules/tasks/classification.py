"""The classification bandit: the observation is an image, and the action that names its class has reward 1.

The model has two hidden layers with ReLU, initialized like torch.nn.Linear, with weights and biases uniform within 1 /
sqrt(inputs). Every weight has a leading axis of members.
"""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.tasks.bandits import BanditTask, make_bandit_rollouts
from sandboxes.update_rules.tasks.images import NUM_CLASSES, Images, read_images


class MLPEnsemble:
    """E perceptrons. weights: "layers.<k>.weight" [E, out, in] and "layers.<k>.bias" [E, out] of each layer k."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Compute logits [E, B, out] of inputs [E, B, in], with gradients."""
        num_layers = len(self.weights) // 2
        for layer in range(num_layers):
            weight, bias = self.weights[f"layers.{layer}.weight"], self.weights[f"layers.{layer}.bias"]
            inputs = torch.baddbmm(bias[:, None], inputs, weight.transpose(1, 2))
            if layer < num_layers - 1:
                inputs = inputs.relu_()
        return inputs


def init_mlp_ensemble(layer_sizes: tuple[int, ...], rngs: MemberRngs) -> MLPEnsemble:
    """Initialize each member's weights from a separate random stream. layer_sizes: input, hidden layers, output."""
    weights = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(layer_sizes)):
        for tensor_index, shape in enumerate(((fan_out, fan_in), (fan_out,))):
            # Index 1, 2, ... of the stream: weight and bias of the first layer, then of the next.
            weight = rngs.bounded_weights(2 * layer + tensor_index + 1, shape, fan_in**-0.5)
            weights[f"layers.{layer}.{('weight', 'bias')[tensor_index]}"] = weight.float().requires_grad_()
    return MLPEnsemble(weights)


class ClassificationTask(BanditTask):
    """mnist: observations are 784 pixels between 0 and 1."""

    def __init__(self, config: UpdateRuleConfig, images: Images | None = None) -> None:
        self.config = config
        self.images = read_images(config.mnist_folder) if images is None else images

    def make_models(self, rngs: MemberRngs) -> MLPEnsemble:
        """Initialize the model of each member."""
        hidden = self.config.hidden
        return init_mlp_ensemble((self.images.train_images.shape[1], hidden, hidden, NUM_CLASSES), rngs)

    @torch.no_grad()
    def sample(self, models: MLPEnsemble, rngs: MemberRngs, step: int) -> Rollouts:
        """Sample a batch: batch_size actions on as many images, or batch_size / group_size images for grouped rules."""
        images, classes = self.images.train_images, self.images.train_labels
        shape = (self.config.batch_size // self.config.samples_per_prompt,)
        image_indices = rngs.integers("sandbox_prompts", step, high=len(classes), shape=shape)
        observations = _scale_pixels(images[image_indices])
        log_probs = models.compute_logits(observations).log_softmax(-1)
        return make_bandit_rollouts(self.config, rngs, step, observations, classes[image_indices], log_probs)

    @torch.no_grad()
    def evaluate(self, models: MLPEnsemble, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        """Compute error and entropy over all test images, and whether the images are synthetic."""
        num_members = len(rngs.seeds)
        inputs = _scale_pixels(self.images.test_images).expand(num_members, -1, -1)
        log_probs = models.compute_logits(inputs).log_softmax(-1)
        return {
            "test_error": (log_probs.argmax(-1) != self.images.test_labels).float().mean(-1),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean(-1),
            "synthetic_data": torch.full((num_members,), float(self.images.source == "synthetic")),
        }


def _scale_pixels(images: Tensor) -> Tensor:
    """Convert bytes 0 ... 255 to floats 0 ... 1. All images are stored as bytes, which take a quarter of the memory."""
    return images.float() / 255

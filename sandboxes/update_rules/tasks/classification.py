"""The classification bandit: the observation is an image, and the action that names its class has reward 1.

The images are MNIST's four IDX files, or synthetic ones of the same shape from a fixed seed, on which results are not
comparable with MNIST. Each of the ten classes has eight smooth prototypes; an example is a prototype, shifted by up to
two pixels in each direction, plus noise. After 1000 batches of 100 images, a linear model has an error of 0.43, and a
perceptron with two hidden layers of width 50 one of 0.20 (Adam at 1e-3).

The model has two hidden layers with ReLU, initialized like torch.nn.Linear, with weights and biases uniform within 1 /
sqrt(inputs). Every weight has a leading axis of members.
"""

import gzip
import itertools
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.tasks.bandits import BanditTask, make_bandit_rollouts
from trainable.config.seeds import make_rng

Pixels = NDArray[np.float32]
IMAGE_SIDE, NUM_CLASSES = 28, 10
NUM_TRAIN, NUM_TEST = 60_000, 10_000
PROTOTYPES_PER_CLASS = 8
_FILES = (
    ("train-images-idx3-ubyte", (NUM_TRAIN, IMAGE_SIDE, IMAGE_SIDE)),
    ("train-labels-idx1-ubyte", (NUM_TRAIN,)),
    ("t10k-images-idx3-ubyte", (NUM_TEST, IMAGE_SIDE, IMAGE_SIDE)),
    ("t10k-labels-idx1-ubyte", (NUM_TEST,)),
)


class Images(NamedTuple):
    """Pixels 0 ... 255 [N, 784] and classes [N], for training and test. source: "mnist" or "synthetic"."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str


def read_images(folder: str | None) -> Images:
    """Read MNIST's images from a folder, or make synthetic images if `folder` is None.

    Raises ValueError, with what to do, if a file is missing, damaged or not MNIST's.
    """
    if folder is None:
        return make_synthetic_images()
    folder_path = Path(folder).expanduser()
    train_images, train_labels, test_images, test_labels = (
        _read_idx(folder_path, name, shape) for name, shape in _FILES
    )
    return Images(train_images.flatten(1), train_labels.long(), test_images.flatten(1), test_labels.long(), "mnist")


def _read_idx(folder: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read an IDX file, gzipped or not: two zeros, type 8 (bytes), the number of axes, their lengths, the bytes."""
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
    try:
        path = folder / name
        content = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
        if not content.startswith(header):
            raise ValueError(f"it begins with {content[: len(header)].hex(' ')} instead of {header.hex(' ')}")
        # A copy, because frombuffer is read-only, which torch does not support.
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape).copy())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(
            f"mnist_folder={folder} has no usable file {name} or {name}.gz ({error}). Put MNIST's four IDX files "
            "there, or set mnist_folder=null for synthetic images."
        ) from None


@cache  # All conditions of a process share the images, which are never changed; making them can take longer than a run.
def make_synthetic_images() -> Images:
    """Make synthetic images of MNIST's shape, always the same ones."""
    rng = make_rng(0, "sandbox_data", 1)
    # Prototypes [classes, prototypes, side, side] of smooth random strokes between 0 and 1: 7 x 7 random numbers,
    # enlarged four times to 28 x 28 and blurred over 5 x 5 pixels.
    coarse_noise = rng.standard_normal((NUM_CLASSES, PROTOTYPES_PER_CLASS, 7, 7)).astype(np.float32)
    smooth_noise = np.kron(coarse_noise, np.ones((4, 4), dtype=np.float32))
    for axis in (-1, -2):
        smooth_noise = np.mean([np.roll(smooth_noise, shift, axis) for shift in range(-2, 3)], axis=0)
    images, labels = _make_examples(smooth_noise.clip(0, 1), NUM_TRAIN + NUM_TEST, rng)
    return Images(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:], source="synthetic")


def _make_examples(prototypes: Pixels, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Make images [count, 784] uint8 and classes [count]."""
    labels = rng.integers(NUM_CLASSES, size=count)
    prototype_ids = rng.integers(PROTOTYPES_PER_CLASS, size=count)
    offsets = rng.integers(-2, 3, size=(count, 2))
    images = np.empty((count, IMAGE_SIDE, IMAGE_SIDE), dtype=np.uint8)
    # Processes all examples with the same shift of -2 ... 2 pixels at once.
    for row, col in np.ndindex(5, 5):
        indices = np.flatnonzero((offsets == (row - 2, col - 2)).all(1))
        clean_pixels = np.roll(prototypes, (row - 2, col - 2), (-2, -1))[labels[indices], prototype_ids[indices]]
        noisy_pixels = clean_pixels + 0.5 * rng.standard_normal(clean_pixels.shape, dtype=np.float32)
        images[indices] = (255 * np.clip(noisy_pixels, 0, 1)).astype(np.uint8)
    return torch.from_numpy(images).flatten(1), torch.from_numpy(labels)


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

"""The classification bandit: an image is the observation, its class the action that is worth 1."""

import torch
from torch import Tensor

from trainable.sandbox.batch.members import Streams
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.mlp import Perceptrons, first_perceptrons
from trainable.sandbox.tasks.bandits import bandit_rollouts, prompts_a_step
from trainable.sandbox.tasks.images import CLASSES, Images, read_images
from trainable.sandbox.tasks.task import Models


class ClassificationTask:
    """mnist (see `trainable.sandbox.tasks.task.Task`): T is 1, observations are 784 pixels between 0 and 1."""

    def __init__(self, config: UpdateRuleConfig, images: Images | None = None) -> None:
        self.config = config
        self.images = read_images(config.mnist_folder) if images is None else images

    @property
    def actions(self) -> int:
        """The classes."""
        return CLASSES

    def make_models(self, streams: Streams) -> Perceptrons:
        """First weights of every member."""
        hidden = self.config.hidden
        return first_perceptrons((self.images.train_images.shape[1], hidden, hidden, CLASSES), streams)

    @torch.no_grad()
    def sample(self, models: Models, streams: Streams, step: int) -> Rollouts:
        """One batch: batch_size guesses, of as many images, or of batch_size / group_size for grouped rules."""
        images, classes = self.images.train_images, self.images.train_labels
        shape = (prompts_a_step(self.config),)
        chosen = streams.integers("sandbox_prompts", step, below=len(classes), shape=shape)
        observations = _pixels(images[chosen])
        log_probs = _own(models).logits(observations).log_softmax(-1)
        return bandit_rollouts(self.config, streams, step, observations, classes[chosen], log_probs)

    def log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, 1, A] log-probabilities; with gradients."""
        return self.raw_logits(models, rollouts).log_softmax(-1)

    def raw_logits(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, 1, A] logits; with gradients."""
        return _own(models).logits(rollouts.observations)[:, :, None]

    def oracle_log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """Those of `log_probs`: no token comes before the action."""
        return self.log_probs(models, rollouts)

    @torch.no_grad()
    def evaluate(self, models: Models, streams: Streams, step: int) -> dict[str, Tensor]:
        """Error of the likeliest class and entropy, over all test images; whether the images are the stand-in."""
        members = len(streams.seeds)
        inputs = _pixels(self.images.test_images).expand(members, -1, -1)
        log_probs = _own(models).logits(inputs).log_softmax(-1)
        return {
            "test_error": (log_probs.argmax(-1) != self.images.test_labels).float().mean(-1),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean(-1),
            "stand_in_data": torch.full((members,), float(self.images.source == "stand-in")),
        }


def _pixels(images: Tensor) -> Tensor:
    return images.float() / 255


def _own(models: Models) -> Perceptrons:
    assert isinstance(models, Perceptrons), "models are those of make_models"
    return models

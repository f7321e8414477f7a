"""The classification bandit: an image is the observation, its class the action that is worth 1."""

import torch
from torch import Tensor

from trainable.sandbox.config import UpdateRuleConfig
from trainable.sandbox.decoding import drawn, taken
from trainable.sandbox.members import Streams
from trainable.sandbox.methods import GROUPED
from trainable.sandbox.mlp import Perceptrons, first_perceptrons
from trainable.sandbox.reward_noise import bandit_feature, corrupted
from trainable.sandbox.rollouts import Rollouts
from trainable.sandbox.task import Models
from trainable.sandbox.tasks.groups import all_kept, kept_rollouts, split_groups
from trainable.sandbox.tasks.images import CLASSES, Images, read_images


class ClassificationTask:
    """mnist (see `trainable.sandbox.task.Task`): T is 1, observations are 784 pixels between 0 and 1."""

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
        config, grouped = self.config, self.config.method in GROUPED
        each = config.group_size if grouped else 1
        shape = (config.batch_size // each,)
        chosen = streams.integers("sandbox_prompts", step, below=len(self.images.train_labels), shape=shape)
        labels = self.images.train_labels[chosen].repeat_interleave(each, dim=1)
        observations = _pixels(self.images.train_images[chosen])
        log_probs = _own(models).logits(observations).log_softmax(-1).repeat_interleave(each, dim=1)
        actions = drawn(log_probs, streams.uniform("sandbox_samples", step, shape=(config.batch_size,)))
        rewards = self._noisy_rewards(actions, labels, streams, step)
        keep, scalars = kept_rollouts(split_groups(rewards, each), each) if grouped else all_kept(rewards)
        return Rollouts(
            observations=observations.repeat_interleave(each, dim=1),
            actions=actions[..., None],
            labels=labels[..., None],
            rewards=rewards,
            actor_log_probs=taken(log_probs, actions)[..., None],
            actor_baseline=log_probs.exp().square().sum(-1, keepdim=True),
            keep=keep,
            age=torch.zeros(len(rewards), dtype=torch.int64),
            group_size=each if grouped else None,
            expected_reward=None if grouped or config.reward_noise > 0 else taken(log_probs, labels).exp(),
            scalars=scalars,
        )

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

    def _noisy_rewards(self, actions: Tensor, labels: Tensor, streams: Streams, step: int) -> Tensor:
        config, solved = self.config, actions == labels
        if config.reward_noise_mode == "none":
            return solved.float()
        uniforms = streams.uniform("sandbox_noise", step, shape=(config.batch_size, 2))
        featured = bandit_feature(config.reward_noise_mode, actions)
        return corrupted(solved.float(), uniforms, config.reward_noise_mode, config.reward_noise, solved, featured)


def _pixels(images: Tensor) -> Tensor:
    return images.float() / 255


def _own(models: Models) -> Perceptrons:
    assert isinstance(models, Perceptrons), "models are those of make_models"
    return models

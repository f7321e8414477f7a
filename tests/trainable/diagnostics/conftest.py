from typing import NamedTuple

import numpy as np
import pytest
import torch

from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_training_levels
from trainable.envs.prompts import make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.codec import Codec
from trainable.models.load import load_policy
from trainable.models.qwen2 import Qwen2
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler


class Rollout(NamedTuple):
    """A policy and the episodes that it played."""

    model: Qwen2
    codec: Codec
    episodes: list[Episode]


@pytest.fixture(scope="session")
def rollout() -> Rollout:
    policy = load_policy("sokoban-tiny", torch.device("cpu"))
    codec = Codec(policy.tokenizer)
    template, limits = make_prompt_template(Sokoban(), "compact", 10), TurnLimits(3, 2, 10)
    levels, params = make_training_levels(Sokoban(), range(10_000, 10_003)), SamplingParams(1.0, 24, policy.stop_token)
    rng, luck_rng = np.random.default_rng(0), np.random.default_rng(0)
    request = RolloutRequest(levels, 6, TorchSampler(policy.model), params, rng, luck_rng)
    episodes = TurnPlayer(Sokoban(), template, codec, limits, -0.1, 512).roll_out(request)
    assert isinstance(policy.model, Qwen2)
    return Rollout(policy.model, codec, episodes)

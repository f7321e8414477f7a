from typing import NamedTuple

import numpy as np
import pytest
import torch

from trainable.envs.level_sets import make_training_levels
from trainable.envs.prompts import make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.codec import Codec
from trainable.models.load import load_policy, make_codec
from trainable.models.qwen2 import Qwen2
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import EpisodeLimits, draw_luck, roll_out_episodes
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
    codec = make_codec(policy.tokenizer)
    rules = EpisodeLimits(max_turn=3, max_actions_per_turn=2, max_actions=10, format_penalty=-0.1, context_length=512)
    episodes = roll_out_episodes(
        Sokoban(),
        make_training_levels(Sokoban(), 0, 1, 3, 10_000),
        6,
        TorchSampler(policy.model),
        make_prompt_template(Sokoban(), "compact", 10),
        codec,
        rules,
        SamplingParams(1.0, 24, policy.stop_token),
        np.random.default_rng(0),
        draw_luck(np.random.default_rng(0), 18, rules),
    )
    assert isinstance(policy.model, Qwen2)
    return Rollout(policy.model, codec, episodes)

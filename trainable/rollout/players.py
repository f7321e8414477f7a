"""Players of a run's game: turn by turn with an environment, or as the game itself defines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np

from trainable.config.run_config import RunConfig
from trainable.envs.environment import Environment, Level, RewardFunction
from trainable.envs.games.make import make_environment, make_reward_function
from trainable.envs.prompts import Observation, PromptTemplate, make_prompt_template
from trainable.models.codec import Codec
from trainable.models.load import Policy
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import EpisodeLimits, draw_luck, roll_out_episodes
from trainable.rollout.sampler import Sampler, SamplingParams


@dataclass(frozen=True)
class RolloutRequest:
    """What to play, and with which random numbers."""

    levels: Sequence[Any]
    """At least one."""
    group_size: int
    """Episodes per level."""
    sampler: Sampler
    params: SamplingParams
    rng: np.random.Generator
    """Spawns one generator per episode for the sampler."""
    luck_rng: np.random.Generator
    """Generates the environment's random numbers."""
    first_episode: int = 0
    """Index of the first of these episodes among the episodes of all ranks."""
    num_episodes: int | None = None
    """Number of episodes of all ranks; None if these are all."""


class Player(Protocol):
    """Plays levels with a sampler."""

    def encode_first_turn(self, level: Any) -> list[int]:
        """Encode the conversation up to the first reply."""

    def check_first_turns(self, levels: Sequence[Any], response_length: int) -> None:
        """Raise ValueError if the first prompt of a level and a reply of full length do not fit into the context.

        Later turns need no check: an episode ends if its next turn might not fit.
        """

    def roll_out(self, request: RolloutRequest) -> list[Episode]:
        """Play the requested episodes. The episodes of a level are consecutive, and groups are numbered from 0."""


def check_length(prompt_tokens: int, response_length: int, context_length: int) -> None:
    """Raise ValueError if a prompt and a reply of full length do not fit into the context."""
    needed_tokens = prompt_tokens + response_length
    if needed_tokens > context_length:
        raise ValueError(
            f"The first turn may need {needed_tokens} tokens ({prompt_tokens} of the prompt and "
            f"rollout.response_length={response_length}), but the context has only {context_length}: shorten replies "
            f"with --set rollout.response_length=N."
        )


@dataclass(frozen=True)
class TurnPlayer:
    """Plays a turn-based game. compute_rewards: replaces the game's rewards, if not None."""

    environment: Environment[Any]
    template: PromptTemplate
    codec: Codec
    limits: EpisodeLimits
    compute_rewards: RewardFunction | None

    def encode_first_turn(self, level: Level) -> list[int]:
        """See `Player.encode_first_turn`."""
        return self._encode_first_turns([level])[0]

    def check_first_turns(self, levels: Sequence[Level], response_length: int) -> None:
        """See `Player.check_first_turns`."""
        check_length(max(map(len, self._encode_first_turns(levels))), response_length, self.limits.context_length)

    def _encode_first_turns(self, levels: Sequence[Level]) -> list[list[int]]:
        texts = [
            self.template.format_first_turn(Observation(turn=1, state=state, actions_left=self.limits.max_actions))
            for state in self.environment.start(levels)
        ]
        # Many levels of a small game look the same, so each text is encoded once.
        distinct_texts = list(dict.fromkeys(texts))
        tokens_by_text = dict(zip(distinct_texts, self.codec.encode(distinct_texts), strict=True))
        return [tokens_by_text[text] for text in texts]

    def roll_out(self, request: RolloutRequest) -> list[Episode]:
        """See `Player.roll_out`."""
        num_episodes = request.num_episodes or len(request.levels) * request.group_size
        luck = draw_luck(request.luck_rng, num_episodes, self.limits)
        return roll_out_episodes(
            self.environment,
            request.levels,
            request.group_size,
            request.sampler,
            self.template,
            self.codec,
            self.limits,
            request.params,
            request.rng,
            luck[request.first_episode :],
            self.compute_rewards,
        )


def make_player(config: RunConfig, policy: Policy, codec: Codec, context_length: int) -> Player:
    """Make the player of the game that env.name selects. context_length: maximum tokens of a conversation."""
    env, style = config.env, config.model.prompt_style
    if env.kind.player:
        player: Player = resolve_name(env.kind.player)(config, policy, codec, context_length)
        return player
    environment = make_environment(env)
    template = make_prompt_template(environment, style, env.max_actions_per_traj, policy.chat_format)
    limits = EpisodeLimits(
        env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj, env.format_penalty, context_length
    )
    return TurnPlayer(environment, template, codec, limits, make_reward_function(env))

"""Players of a run's game: turn by turn with an environment, or as the game itself defines."""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from trainable.config.run_config import RunConfig
from trainable.envs.games.make import get_turn_limits, make_environment, make_reward_function
from trainable.envs.prompts import make_prompt_template
from trainable.models.codec import Codec
from trainable.models.load import Policy
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer


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


def make_player(config: RunConfig, policy: Policy, codec: Codec, context_length: int) -> Player:
    """Make the player of the game that env.name selects. context_length: maximum tokens of a conversation."""
    env, style = config.env, config.model.prompt_style
    if env.kind.player:
        player: Player = resolve_name(env.kind.player)(config, policy, codec, context_length)
        return player
    environment = make_environment(env)
    template = make_prompt_template(environment, style, env.max_actions_per_traj, policy.chat_format)
    limits, compute_rewards = get_turn_limits(env), make_reward_function(env)
    return TurnPlayer(environment, template, codec, limits, env.format_penalty, context_length, compute_rewards)

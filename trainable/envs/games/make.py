"""Make the environment that env.name selects."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainable.config.sections import EnvConfig
from trainable.envs.environment import Environment, TurnLimits
from trainable.envs.games.countdown import Countdown
from trainable.envs.games.frozen_lake import FrozenLake
from trainable.envs.games.mastermind import Mastermind
from trainable.envs.sokoban.game import Sokoban

GAMES: Mapping[str, Callable[[EnvConfig], Environment[Any]]] = MappingProxyType(
    {
        "sokoban": lambda env: Sokoban(env.observation_format),
        "frozenlake": lambda env: FrozenLake(
            env.frozenlake.size, env.frozenlake.p, env.frozenlake.success_rate, env.observation_format
        ),
        "mastermind": lambda env: Mastermind(env.mastermind.positions, env.mastermind.colors),
        "countdown": lambda env: Countdown(env.countdown.count, env.countdown.max_number),
    }
)
"""For each value of env.name, the function that makes the environment from its settings."""


def make_environment(env: EnvConfig) -> Environment[Any]:
    """The environment that `env` selects, with the settings of its game."""
    return GAMES[env.name](env)


def get_turn_limits(env: EnvConfig) -> TurnLimits:
    """The limits of an episode under `env`."""
    return TurnLimits(env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj)

"""Make the environment selected by env.name."""

from pkgutil import resolve_name
from typing import Any

from trainable.config.own_parts import get_part
from trainable.config.sections import GAME_REWARD, EnvConfig
from trainable.envs.environment import Environment, LevelSource, RewardFunction, TurnLimits
from trainable.envs.level_sets import make_validation_levels

MAX_SHOWN_LEVELS = 512
MAX_FOLLOWED_ACTIONS = 100
"""Limits of `describe_success_range`, whose time grows with both."""
_DEFAULT_RANGE = (
    "Game sokoban: uniformly random actions succeed in 0.184, the best policy in 1.000 of the validation levels"
)
"""The answer of `describe_success_range` for the default levels, which no plan needs to generate and solve again."""


def make_environment(env: EnvConfig) -> Environment[Any]:
    """Make the environment that `env` selects, with its game's settings.

    Your own game is an object, or a class or function without arguments that makes one.
    """
    environment: Environment[Any]
    if env.kind.environment:
        section = getattr(env, env.name).model_dump() if env.kind.section else {}
        other_settings = {name: getattr(env, name) for name in env.kind.reads}
        environment = resolve_name(env.kind.environment)(**section, **other_settings)
    else:
        own_game = get_part(env.name)
        environment = own_game() if callable(own_game) else own_game
    return environment


def make_level_source(env: EnvConfig) -> LevelSource[Any]:
    """Make the level source of the game that `env` selects. Raise ValueError if its file of levels is unusable."""
    if env.kind.level_source:
        source: LevelSource[Any] = resolve_name(env.kind.level_source)(getattr(env, env.name))
        return source
    return make_environment(env)


def make_reward_function(env: EnvConfig) -> RewardFunction | None:
    """Return your own reward function if `env` selects one, or None to keep the game's rewards."""
    return None if env.reward == GAME_REWARD else get_part(env.reward)


def get_turn_limits(env: EnvConfig) -> TurnLimits:
    """Return the limits of an episode."""
    return TurnLimits(env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj)


def describe_success_range(env: EnvConfig) -> str:
    """Describe in a sentence how often random actions and the best policy solve the validation levels, where known.

    To keep plans fast, only the first 512 levels are examined, and nothing is computed for very long episodes.
    """
    if env == EnvConfig():
        return _DEFAULT_RANGE
    source, limits = make_level_source(env), get_turn_limits(env)
    unknown = f"Game {source.name}: success of random actions and of the best policy not known"
    if limits.reachable_actions > MAX_FOLLOWED_ACTIONS:
        return unknown
    count = min(env.val_env_groups, MAX_SHOWN_LEVELS)
    levels = make_validation_levels(source, count, env.seed_val)
    shares = {
        "uniformly random actions succeed in": source.compute_chance(levels, limits),
        "the best policy in": source.compute_best(levels, limits),
    }
    known_shares = [f"{label} {float(share.mean()):.3f}" for label, share in shares.items() if share is not None]
    if not known_shares:
        return unknown
    selection = "" if count == env.val_env_groups else f"first {count} "
    return f"Game {source.name}: {', '.join(known_shares)} of the {selection}validation levels"

"""The settings that come with each game, which `--env NAME` applies."""

from collections.abc import Mapping
from types import MappingProxyType

from trainable.families import GameSettings

# One guess per turn, since each one needs the answer to the one before.
_MASTERMIND_LIMITS = {"env.max_turn": 5, "env.max_actions_per_turn": 1, "env.max_actions_per_traj": 5}
_ONE_ACTION = {"env.max_turn": 1, "env.max_actions_per_turn": 1, "env.max_actions_per_traj": 1}

GAMES: Mapping[str, GameSettings] = MappingProxyType(
    {
        "sokoban": GameSettings({"env.name": "sokoban"}),
        "frozenlake": GameSettings({"env.name": "frozenlake"}, {"laptop": {"model.path": "frozenlake-tiny"}}),
        "mastermind": GameSettings(
            {"env.name": "mastermind", **_MASTERMIND_LIMITS},
            # A thought repeats all guesses so far.
            {"laptop": {"model.path": "mastermind-tiny", "rollout.response_length": 32}},
        ),
        # No tiny policy calculates. On a laptop, this is the smallest model of the hub that may.
        "countdown": GameSettings(
            {"env.name": "countdown", **_ONE_ACTION},
            {
                "laptop": {
                    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
                    "model.prompt_style": "full",
                    "rollout.response_length": 200,
                    "actor.lr": 1e-6,
                    "critic.lr": 1e-5,
                }
            },
        ),
        # A tree has one reward, at its root, so its credit is that of GRPO; thoughts have no tags.
        "papers": GameSettings(
            {
                "env.name": "papers",
                "env.max_turn": 10,
                "env.format_penalty": 0.0,
                "algorithm.adv_estimator": "grpo",
                "collapse_detection.first_turn_enabled": False,
                "collapse_detection.multi_turn_enabled": False,
            },
            {
                "laptop": {
                    "model.path": "papers-tiny",
                    "env.max_turn": 3,
                    "rollout.response_length": 32,
                    "env.papers.execution_seconds": 5.0,
                }
            },
        ),
    }
)
"""The games by name, as env.name and --env select them."""

"""Registry of the games of the package, with their settings.

Only the settings of the game that env.name selects are read.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from trainable.config.base_config import SettingsSection
from trainable.config.setting_types import (
    Common,
    Endpoint,
    Fraction,
    KeyVariable,
    LocalPath,
    Outside,
    ParseNull,
    Positive,
    is_pattern,
    require,
)


class FrozenLakeConfig(SettingsSection):
    """FrozenLake: the map and the ice, as in RAGEN."""

    size: int = Field(4, ge=2, le=16, description="side of the square map")
    p: float = Field(0.9, gt=0, le=1, description="probability that a tile is frozen; otherwise it is a hole")
    success_rate: Common[Fraction] = 0.8
    """probability that a move goes where intended; otherwise it slips to one side; 1: no slips"""


class MastermindConfig(SettingsSection):
    """Mastermind: the secret code."""

    positions: int = Field(3, ge=1, le=6, description="letters of the code")
    colors: int = Field(4, ge=2, le=8, description="different letters that the code may have")


class CountdownConfig(SettingsSection):
    """Countdown: the numbers of a problem."""

    count: int = Field(4, ge=2, le=6, description="numbers of a problem")
    max_number: int = Field(99, ge=9, le=999, description="largest number of a problem")


DataScore = Literal["exact", "number", "regex", "format"]


class DatasetConfig(SettingsSection):
    """Dataset: the rows of a file, and how a reply is scored."""

    file: Annotated[LocalPath | None, ParseNull, Outside("file")] = None
    """a .jsonl or .parquet file of prompts with answers (docs/games.md)"""
    digest: Annotated[str | None, ParseNull] = None
    """beginning of the SHA-256 of the file, which `--env FILE` sets; null: not checked"""
    prompt: str = Field("prompt", description="field of a row with the prompt: a text, or a list of messages")
    answer: str = Field("answer", description="field of a row with the answer")
    score: DataScore = "exact"
    """what is right: the answer but for blanks; its last number; a match of the answer as a regular expression; or any
    answer that pattern finds"""
    pattern: Annotated[str | None, ParseNull, require(is_pattern, "must be a regular expression, such as [0-9]+")] = (
        None
    )
    """regular expression for the answer in a reply: the first group of its last match; null: the whole reply"""
    instructions: str = Field("You are a helpful assistant.", description="the system message")


class PapersConfig(SettingsSection):
    """Papers: questions about documents, which a tree of rollouts answers in Python REPLs, as in rlm_grpo."""

    file: Annotated[LocalPath | None, ParseNull, Outside("file")] = None
    """a .jsonl or .parquet file of questions (docs/tree_grpo.md); null: generated questions"""
    num_papers: int = Field(3, ge=1, le=16, description="papers of a generated question")
    num_sentences: int = Field(4, ge=2, le=64, description="sentences of a generated paper")
    score: Literal["char_f1", "judge"] = "char_f1"
    """reward of the final answer: overlap of quoted characters, or a judge at judge_url"""
    judge_url: Annotated[Endpoint | None, ParseNull, Outside("host")] = None
    """OpenAI-compatible endpoint of the judge, up to /v1; http:// on this machine only; null: none"""
    judge_model: str = Field("gpt-4.1-nano", description="the judge's name at the endpoint")
    judge_key_variable: Annotated[KeyVariable, Outside("variable")] = "OPENAI_API_KEY"
    """environment variable with the judge's key: NAME_API_KEY, or TUNE_STUDY_NAME"""
    max_children_per_call: int = Field(4, ge=1, le=64, description="maximum questions to children in one call")
    max_children: int = Field(8, ge=0, le=64, description="maximum children of a tree; 0: none")
    observation_chars: int = Field(3_000, ge=16, description="characters that a policy sees of an output")
    execution_seconds: Positive = Field(30.0, le=3_600, description="CPU time of the code of one reply in seconds")
    execution_mib: int = Field(512, ge=128, le=16_384, description="MiB of memory of the code of one rollout")


class Game(NamedTuple):
    """The declaration of a game."""

    environment: str = ""
    """Its `trainable.envs.environment.Environment`, as "module:CLASS", constructed with the settings of its section
    and `reads` as keyword arguments. Empty for a game of trees and for a plug-in."""
    section: type[SettingsSection] | None = None
    """The type of its section in `env`, or None if it has no section."""
    reads: tuple[str, ...] = ()
    """Shared settings of `env` that this game reads, but not every game."""
    has_trees: bool = False
    """Whether a rollout may ask children, which are trained with it."""
    level_source: str = ""
    """If the game is not played in turns: the function that makes its levels from its section, as "module:NAME"."""
    player: str = ""
    """For such a game, the function that makes its player, like `trainable.rollout.episode_loop.make_player`."""
    requirements: str = ""
    """What it requires of a machine: a `tune_study.placement.resources.GameRequirements`, as "module:NAME"."""
    settings: Mapping[str, object] = MappingProxyType({})
    """Dotted settings that the game changes under every preset."""
    presets: Mapping[str, Mapping[str, object]] = MappingProxyType({})
    """Further settings, by preset. Variants of a preset inherit them."""


GAMES: Mapping[str, Game] = MappingProxyType(
    {
        "sokoban": Game("trainable.envs.sokoban.game:Sokoban", reads=("observation_format",)),
        "frozenlake": Game(
            "trainable.envs.games.frozen_lake:FrozenLake",
            FrozenLakeConfig,
            reads=("observation_format",),
            presets={"laptop": {"model.path": "frozenlake-tiny"}, "small": {}},
        ),
        "mastermind": Game(
            "trainable.envs.games.mastermind:Mastermind",
            MastermindConfig,
            # One guess per turn, since each guess needs the answer to the previous one.
            settings={"env.max_turn": 5, "env.max_actions_per_turn": 1, "env.max_actions_per_traj": 5},
            # A thought repeats all guesses so far.
            presets={"laptop": {"model.path": "mastermind-tiny", "rollout.response_length": 32}, "small": {}},
        ),
        "countdown": Game(
            "trainable.envs.games.countdown:Countdown",
            CountdownConfig,
            settings={"env.max_turn": 1, "env.max_actions_per_turn": 1, "env.max_actions_per_traj": 1},
            # No tiny policy can calculate. This is the smallest model of the hub that may, and it runs on a laptop.
            presets={
                "laptop": {
                    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
                    "model.prompt_style": "full",
                    "rollout.response_length": 200,
                    "actor.lr": 1e-6,
                    "critic.lr": 1e-5,
                },
                "small": {"rollout.response_length": 64},
            },
        ),
        "dataset": Game(
            "trainable.envs.games.dataset:DataSet",
            DatasetConfig,
            requirements="tune_study.placement.data_files:REQUIREMENTS",
            settings={
                "env.max_turn": 1,
                "env.max_actions_per_turn": 1,
                "env.max_actions_per_traj": 1,
                "model.prompt_style": "plain",
                "collapse_detection.multi_turn_enabled": False,
            },
            presets={
                "laptop": {"model.path": "Qwen/Qwen2.5-0.5B-Instruct", "rollout.response_length": 200},
                "small": {},
            },
        ),
        # A tree has a single reward, at its root, so GRPO assigns the credit. Thoughts have no tags.
        "papers": Game(
            section=PapersConfig,
            has_trees=True,
            level_source="sandboxes.trees.repl.papers:make_papers",
            player="sandboxes.trees.player:make_player",
            requirements="sandboxes.trees.requirements:REQUIREMENTS",
            settings={
                "env.max_turn": 10,
                "env.format_penalty": 0.0,
                "algorithm.adv_estimator": "grpo",
                "collapse_detection.first_turn_enabled": False,
                "collapse_detection.multi_turn_enabled": False,
            },
            presets={
                "laptop": {
                    "model.path": "papers-tiny",
                    "env.max_turn": 3,
                    "rollout.response_length": 32,
                    "env.papers.execution_seconds": 5.0,
                },
                "small": {"env.max_turn": 3, "env.papers.execution_seconds": 5.0},
            },
        ),
    }
)
"""The games by name, as env.name and --env select them. The first is the default."""
OWN_GAME = Game()
"""The declaration of a plug-in game."""

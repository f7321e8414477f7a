"""The settings of each game: only those of the game that env.name selects are read."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from trainable.config.base_config import Section
from trainable.config.setting_types import (
    Common,
    Endpoint,
    Fraction,
    KeyVariable,
    LocalPath,
    Outside,
    ParseNull,
    Positive,
)


class FrozenLakeConfig(Section):
    """FrozenLake: the map and the ice, as in RAGEN."""

    size: int = Field(4, ge=2, le=16, description="side of the square map")
    p: float = Field(0.9, gt=0, le=1, description="probability that a tile is frozen; otherwise it is a hole")
    success_rate: Common[Fraction] = Field(
        0.8, description="probability that a move goes where intended; otherwise it slips to one side; 1: no slips"
    )


class MastermindConfig(Section):
    """Mastermind: the secret code."""

    positions: int = Field(3, ge=1, le=6, description="letters of the code")
    colors: int = Field(4, ge=2, le=8, description="different letters that the code may have")


class CountdownConfig(Section):
    """Countdown: the numbers of a problem."""

    count: int = Field(4, ge=2, le=6, description="numbers of a problem")
    max_number: int = Field(99, ge=9, le=999, description="largest number of a problem")


class PapersConfig(Section):
    """Papers: questions about documents, which a tree of rollouts answers in Python REPLs, as in rlm_grpo."""

    file: Annotated[LocalPath | None, ParseNull, Outside("file")] = Field(
        None, description="a .jsonl or .parquet file of questions (docs/tree_grpo.md); null: generated questions"
    )
    num_papers: int = Field(3, ge=1, le=16, description="papers of a generated question")
    num_sentences: int = Field(4, ge=2, le=64, description="sentences of a generated paper")
    score: Literal["char_f1", "judge"] = Field(
        "char_f1", description="reward of the final answer: overlap of quoted characters, or a judge at judge_url"
    )
    judge_url: Annotated[Endpoint | None, ParseNull, Outside("host")] = Field(
        None, description="OpenAI-compatible endpoint of the judge, up to /v1; http:// on this machine only; null: none"
    )
    judge_model: str = Field("gpt-4.1-nano", description="the judge's name at the endpoint")
    judge_key_variable: Annotated[KeyVariable, Outside("variable")] = Field(
        "OPENAI_API_KEY", description="environment variable with the judge's key: NAME_API_KEY, or TUNE_STUDY_NAME"
    )
    max_children_per_call: int = Field(4, ge=1, le=64, description="maximum questions to children in one call")
    max_children: int = Field(8, ge=0, le=64, description="maximum children of a tree; 0: none")
    observation_chars: int = Field(3_000, ge=16, description="characters that a policy sees of an output")
    execution_seconds: Positive = Field(30.0, le=3_600, description="CPU time of the code of one reply in seconds")
    execution_mib: int = Field(512, ge=128, le=16_384, description="MiB of memory of the code of one rollout")


class GameKind(NamedTuple):
    """What a game brings along."""

    section: type[Section] | None = None
    """The type of its section of `env`; None for a game without settings of its own."""
    settings: tuple[str, ...] = ()
    """Other settings of `env` that it reads, and not every game."""
    has_trees: bool = False
    """Whether a rollout may ask children, which are trained with it."""
    level_source: str = ""
    """In a game that is not played in turns, the function of its section that makes its levels, as "module:NAME"."""
    player: str = ""
    """In such a game, the function that makes its player, as `trainable.rollout.players.make_player` does."""
    requirements: str = ""
    """What it needs of a machine, a `tune_study.placement.resources.GameRequirements` as "module:NAME"."""


GAME_KINDS: Mapping[str, GameKind] = MappingProxyType(
    {
        "sokoban": GameKind(settings=("observation_format",)),
        "frozenlake": GameKind(FrozenLakeConfig, settings=("observation_format",)),
        "mastermind": GameKind(MastermindConfig),
        "countdown": GameKind(CountdownConfig),
        "papers": GameKind(
            PapersConfig,
            has_trees=True,
            level_source="sandboxes.trees.repl.papers:make_papers",
            player="sandboxes.trees.player:make_player",
            requirements="sandboxes.trees.requirements:REQUIREMENTS",
        ),
    }
)
"""The games by name."""
OWN_GAME = GameKind()
"""A game of the user."""

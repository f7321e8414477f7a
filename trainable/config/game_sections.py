"""The settings of each game: only those of the game that env.name selects are read."""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import Field

from trainable.config.section import Section
from trainable.config.setting_types import Common, Fraction


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


GAME_SECTIONS: Mapping[str, type[Section] | None] = MappingProxyType(
    {"sokoban": None, "frozenlake": FrozenLakeConfig, "mastermind": MastermindConfig, "countdown": CountdownConfig}
)
"""The games by name, each with the type of its section of `env`; None for a game without settings of its own."""

"""The interface between a game and everything that plays it: levels, texts, rules, and what is known of a level."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle

State = Any
"""What an environment remembers of one episode. Only the environment looks into it."""

FIRST_TEST_SEED = 900_000_000
"""Test levels have seeds from here on; no level of another set has one."""


class Level(Protocol):
    """One problem of a game: a board, a code, an equation."""

    @property
    def seed(self) -> int:
        """The seed that was asked for."""

    @property
    def key(self) -> bytes:
        """Equal for two levels if one is a symmetric twin of the other, such as a mirrored board.

        Twins are one cluster in confidence intervals, and never in training and test at once.
        """


L = TypeVar("L", bound=Level)

Measure = Callable[[Any, Sequence[str]], float]
"""A function of a level and of all actions of one episode on it, or NaN where the episode has no such number."""


class TurnLimits(NamedTuple):
    """Maximum numbers of turns, of actions per turn, and of actions in an episode."""

    turns: int
    actions_per_turn: int
    actions: int

    @property
    def reachable_actions(self) -> int:
        """The most actions that an episode can have."""
        return min(self.actions, self.turns * self.actions_per_turn)


class TurnOutcome(NamedTuple):
    """The result of one turn of B episodes.

    states: B states, new ones: `step` does not change those that it was given.
    rewards: float64 (B,), the sum over the actions of the turn.
    action_counts: int64 (B,), how many of the actions were executed; those after the end of an episode are not.
    done: bool (B,), True where the level has ended.
    success: bool (B,), True where it has ended with success; never True where `done` is False.
    """

    states: list[State]
    rewards: npt.NDArray[np.float64]
    action_counts: npt.NDArray[np.int64]
    done: npt.NDArray[np.bool_]
    success: npt.NDArray[np.bool_]


class PlayedTurn(NamedTuple):
    """One turn of an episode, for a reward function.

    text: the reply, after the forced `<think>`. actions: the actions that were executed. reward: that of the game.
    is_valid: whether the reply had the required form and an action.
    """

    text: str
    actions: tuple[str, ...]
    reward: float
    is_valid: bool


RewardFunction = Callable[[Any, Sequence[PlayedTurn]], Sequence[float]]
"""A function of a level and of all turns of an episode on it, which returns a reward for each turn."""


class LevelSource(Protocol[L]):
    """The levels of a game of type L, and what is known of them."""

    @property
    def name(self) -> str:
        """Name of the game in rows, reports and file names."""

    @property
    def title(self) -> str:
        """Name of the game in sentences; it is the whole system message of the compact style."""

    @property
    def has_held_out_levels(self) -> bool:
        """Whether there are so many levels that the test levels can be kept out of training.

        If not, all sets draw from the same few levels.
        """

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Functions of an episode, by the name of the column that has their mean, without `train_` or `val_`."""

    def make_levels(self, seeds: Sequence[int]) -> Sequence[L]:
        """The level of each seed. It depends on the seed and on the settings of the game only."""

    def make_test_levels(self, count: int) -> Sequence[L]:
        """The first `count` test levels, in a fixed order; their seeds are at least `FIRST_TEST_SEED`."""

    def compute_chance(self, levels: Sequence[L], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """For each level, the probability that uniformly random actions succeed within `limits`; None if unknown."""

    def compute_best(self, levels: Sequence[L], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """For each level, the largest probability of success of any policy within `limits`; None if unknown.

        The policy sees what the prompts show, and chooses all actions of a turn before it sees what they do.
        """


class Environment(LevelSource[L], Protocol[L]):
    """A game of turns with levels of type L, and with its settings.

    All methods are functions of their arguments: an environment keeps nothing between calls, so any subset of episodes
    can be stepped at any time.
    """

    def start(self, levels: Sequence[L]) -> list[State]:
        """The state of an episode before its first turn, for each level."""

    def step(
        self, states: Sequence[State], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Play one turn of B episodes.

        Args:
            states: B states of episodes that have not ended.
            actions: for each episode, the actions of its turn, as `read_action` returns them; may be empty.
            luck: float64 (B, A) uniform random numbers from [0, 1), one per action. They are the only source of chance:
                a deterministic game ignores them.
        """

    def read_action(self, word: str) -> str | None:
        """The action that a word of an answer names, in its canonical spelling; None if it names none."""

    def format_instructions(self, max_actions: int) -> str:
        """The system message of the full style: the game, its symbols, its actions, and an example of an answer."""

    def format_state(self, state: State, style: PromptStyle) -> str:
        """What the policy sees of a state, as lines without a newline at the end."""

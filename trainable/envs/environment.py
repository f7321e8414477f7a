"""The interface of a game for everything that plays it: levels, prompts, rules, and known success probabilities."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle

State = Any
"""An environment's state of one episode. Only the environment looks into it."""

FIRST_TEST_SEED = 900_000_000
"""The first seed of test levels. Levels of other sets have other seeds."""


class Level(Protocol):
    """One problem of a game: a board, a code, an equation."""

    @property
    def seed(self) -> int:
        """The seed that was asked for."""

    @property
    def key(self) -> bytes:
        """Identifies a level up to symmetry: a mirrored board has the same key.

        Levels with one key are one cluster in confidence intervals, and are never split between training and test.
        """


L = TypeVar("L", bound=Level)

Measure = Callable[[Any, Sequence[str]], float]
"""Computes a number from a level and all actions of one episode on it; NaN where it is undefined."""


class TurnLimits(NamedTuple):
    """Maximum numbers of turns, of actions per turn, and of actions in an episode."""

    turns: int
    actions_per_turn: int
    actions: int

    @property
    def reachable_actions(self) -> int:
        """Largest number of actions of an episode under all three limits."""
        return min(self.actions, self.turns * self.actions_per_turn)


class TurnOutcome(NamedTuple):
    """The result of one turn of B episodes.

    states: B new states; `step` leaves its arguments unchanged.
    rewards: float64 (B,), summed over the actions of the turn.
    action_counts: int64 (B,), number of executed actions; actions after the end of an episode are not executed.
    done: bool (B,), True where the level has ended.
    success: bool (B,), True where it has ended with success, which implies `done`.
    """

    states: list[State]
    rewards: npt.NDArray[np.float64]
    action_counts: npt.NDArray[np.int64]
    done: npt.NDArray[np.bool_]
    success: npt.NDArray[np.bool_]


class PlayedTurn(NamedTuple):
    """One turn of an episode, for a reward function.

    text: the reply, after the forced `<think>`. actions: the executed actions. reward: the game's own reward.
    is_valid: whether the reply had the required form and an action.
    """

    text: str
    actions: tuple[str, ...]
    reward: float
    is_valid: bool


RewardFunction = Callable[[Any, Sequence[PlayedTurn]], Sequence[float]]
"""Computes the reward of each turn from a level and all turns of an episode on it."""


class LevelSource(Protocol[L]):
    """The levels (of type L) of a game, and how often random actions and the best policy solve them."""

    @property
    def name(self) -> str:
        """Name of the game in rows, reports and file names."""

    @property
    def title(self) -> str:
        """Name of the game in sentences, and the whole system message of the compact style."""

    @property
    def has_held_out_levels(self) -> bool:
        """Whether enough levels exist to keep test levels out of training. Otherwise all sets share the same few."""

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Functions of an episode. Keys are the columns that report their means, without `train_` or `val_`."""

    def make_levels(self, seeds: Sequence[int]) -> Sequence[L]:
        """Make the level of each seed, which depends only on the seed and the game's settings."""

    def make_test_levels(self, count: int) -> Sequence[L]:
        """Make the first `count` test levels, in a fixed order. Their seeds are at least `FIRST_TEST_SEED`."""

    def compute_chance(self, levels: Sequence[L], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """Compute each level's probability of success of uniformly random actions within `limits`; None if unknown."""

    def compute_best(self, levels: Sequence[L], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """Compute each level's largest probability of success of any policy within `limits`; None if unknown.

        The policy sees only the prompts, and chooses all actions of a turn before it sees their results.
        """


class Environment(LevelSource[L], Protocol[L]):
    """A turn-based game with its settings and levels of type L.

    Methods are pure functions: an environment keeps no state between calls, so any subset of episodes can be stepped
    at any time.
    """

    def start(self, levels: Sequence[L]) -> list[State]:
        """Return the initial state of an episode on each level."""

    def step(
        self, states: Sequence[State], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Play one turn of B episodes.

        states: B states of episodes that have not ended. actions: the actions of each episode's turn, as returned by
        `read_action`; may be empty. luck: float64 (B, A) uniform random numbers from [0, 1), one per action: the only
        source of randomness. Deterministic games ignore them.
        """

    def read_action(self, word: str) -> str | None:
        """Parse a word of an answer into the canonical name of an action; None if it names none."""

    def format_instructions(self, max_actions: int) -> str:
        """Write the full style's system message: the game, its symbols, its actions and an example of an answer."""

    def format_state(self, state: State, style: PromptStyle) -> str:
        """Render a state as the policy sees it, without a newline at the end."""

"""Episodes: the results of rollouts, with a mask of sampled tokens."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class StopReason(StrEnum):
    """How an episode ended."""

    SUCCESS = "success"  # the level ended with success
    FAILURE = "failure"  # the level ended without success, such as in a hole
    OUT_OF_ACTIONS = "out of actions"  # the level did not end within the maximum number of actions
    OUT_OF_TURNS = "out of turns"  # the level did not end within the maximum number of turns
    MALFORMED = "malformed"  # no reply of any turn contained a valid action
    OUT_OF_CONTEXT = "out of context"  # another turn, with a reply of full length, might exceed the context


class Episode(NamedTuple):
    """One rollout of one level. T is the number of tokens in the conversation.

    level_seed: seed of the level. group: index of the level among the levels that were rolled out together.
    tokens: (T,) int64, in the order in which the model saw or sampled them.
    mask: (T,) bool, True for sampled tokens.
    logprobs, entropies: (T,) float32, of the sampling distribution at each sampled token, in nats; 0 elsewhere.
    turns: (T,) int64, number of the turn, from 0.
    turn_rewards: sum of rewards and format penalty of each turn. turn_actions: names of the executed actions of each
    turn. turn_validity: whether the answer of each turn was valid; empty answers are invalid. stop_reason: how the
    episode ended. texts: the reply of each turn.
    children: in a game of trees, the episodes of the rollouts that this one asked. parent_turn: of a child, the turn in
    which its root asked it. answer: in a game of trees, the final answer, if any. evidence: the passages that a perfect
    answer of the root quotes.
    engine_logprobs: (T,), the log-probs reported by the engine if the trainer has recomputed `logprobs`, otherwise
    None.
    """

    level_seed: int
    group: int
    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    turns: npt.NDArray[np.int64]
    turn_rewards: tuple[float, ...]
    turn_actions: tuple[tuple[str, ...], ...]
    turn_validity: tuple[bool, ...]
    stop_reason: StopReason
    texts: tuple[str, ...]
    engine_logprobs: npt.NDArray[np.float32] | None = None
    children: tuple["Episode", ...] = ()
    parent_turn: int = -1
    answer: str | None = None
    evidence: tuple[str, ...] = ()

    @property
    def rollouts(self) -> tuple["Episode", ...]:
        """The episode and its children."""
        return (self, *self.children)

    @property
    def score(self) -> float:
        """Sum of all turn rewards, including penalties."""
        return float(sum(self.turn_rewards))

    @property
    def actions(self) -> int:
        """Number of executed actions."""
        return sum(map(len, self.turn_actions))

    @property
    def invalid_turns(self) -> int:
        """Number of turns with an invalid or empty answer."""
        return self.turn_validity.count(False)

    @property
    def success(self) -> bool:
        """Whether the level ended with success."""
        return self.stop_reason is StopReason.SUCCESS

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())


def list_rollouts(episodes: Sequence[Episode]) -> list[Episode]:
    """Flatten trees: list each episode followed by its children, all as rollouts without children.

    Batches and others that take episodes have one row per rollout, in this order.
    """
    return [
        rollout
        for episode in episodes
        for rollout in ((episode._replace(children=()), *episode.children) if episode.children else (episode,))
    ]


def replace_rollouts(episodes: Sequence[Episode], rollouts: Sequence[Episode]) -> list[Episode]:
    """Rebuild the trees of `episodes` from `rollouts`, which replace them in the order of `list_rollouts`."""
    replacements = iter(rollouts)
    return [
        next(replacements)._replace(children=tuple(next(replacements) for _ in episode.children))
        for episode in episodes
    ]

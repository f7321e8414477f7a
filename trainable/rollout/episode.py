"""What rolling out gives: turns and episodes, frozen, with the mask made where the tokens were made."""

from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class StopReason(StrEnum):
    """How an episode ended."""

    SOLVED = "solved"  # every box stands on a target
    OUT_OF_ACTIONS = "out of actions"  # all actions of the episode executed, unsolved
    OUT_OF_TURNS = "out of turns"  # all turns replied, actions left, unsolved
    MALFORMED = "malformed"  # all turns replied and not one held a valid action
    OUT_OF_CONTEXT = "out of context"  # the conversation filled the model's context


class Episode(NamedTuple):
    """One rollout of one level. T counts all tokens of the conversation.

    tokens: (T,) int64, in the order in which the model saw or sampled them.
    mask: (T,) bool, True where the token was sampled.
    logprobs, entropies: (T,) float32, of the sampling distribution at each sampled token, in nats; 0 elsewhere.
    turns: (T,) int64, number of the turn from 0.
    score: sum of rewards and penalties. turn_rewards: the same, by turn. engine_logprobs: (T,) as logprobs, what the
    engine gave its tokens where the trainer has read them again since; None where the two are one.
    """

    level_seed: int
    group: int
    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    turns: npt.NDArray[np.int64]
    turn_rewards: tuple[float, ...]
    actions: int
    invalid_turns: int
    stop_reason: StopReason
    texts: tuple[str, ...]
    engine_logprobs: npt.NDArray[np.float32] | None = None

    @property
    def score(self) -> float:
        """Sum of the turns' rewards, penalties included."""
        return float(sum(self.turn_rewards))

    @property
    def solved(self) -> bool:
        """Whether the level was solved."""
        return self.stop_reason is StopReason.SOLVED

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())

"""The one seam between rollouts and engines: a conversation with many rows, token ids in and token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SamplingParams:
    """How replies are drawn.

    temperature: 0 takes the likeliest token. max_new_tokens: a reply's length at most. stop_token: ends a reply and
    is part of it.
    """

    temperature: float
    max_new_tokens: int
    stop_token: int


class SampledReply(NamedTuple):
    """One reply of one row: ids (N,), and the log-prob and entropy (N,) of the distribution each was drawn from.

    At temperature 0 both are those of temperature 1. finished: the stop token was sampled.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    finished: bool


class Conversation(Protocol):
    """Rows that talk in turns; each keeps its own history."""

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Give each of `rows` (ascending, a subset of those of the turn before) new tokens, and sample its reply.

        Rows left out are finished and never come back. Before the first turn every row holds its prompt, and
        `given` is empty for each.
        """
        ...


class Sampler(Protocol):
    """An engine that samples from the current policy."""

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: np.random.Generator
    ) -> Conversation:
        """Open a conversation of `len(prompts) * copies` rows; row r starts with prompt r // copies.

        All randomness is drawn from `uniforms`, by row: dropping a row changes no other row's draws.
        """
        ...

"""The interface between the episode loop and engines: conversations with many rows, token ids in and out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    temperature: 0 takes the most likely token. max_new_tokens: maximum length of a reply. stop_token: ends a reply, and
    is part of it.
    """

    temperature: float
    max_new_tokens: int
    stop_token: int


class SampledReply(NamedTuple):
    """One reply of one row: token ids (N,), and log-probs and entropies (N,) of the distributions they were drawn from.

    At temperature 0, log-probs and entropies are those at temperature 1. finished: whether the stop token was sampled.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    finished: bool


class Conversation(Protocol):
    """Rows that take turns with the environment; each has its own history."""

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to each of `rows`, and sample a reply of each.

        rows: ascending, and a subset of the rows of the previous turn; rows that are left out are finished. new_tokens:
        empty for every row in the first turn, when the rows contain their prompts.
        """
        ...


class Sampler(Protocol):
    """An engine that samples from the current policy."""

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: np.random.Generator
    ) -> Conversation:
        """Start a conversation of `len(prompts) * group_size` rows; row r starts with prompt r // group_size.

        All random numbers come from `rng`, row by row: those of a row do not depend on which other rows are finished.
        """
        ...

"""The interface between the episode loop and sampling engines: token ids in and out, for conversations of many rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainable.runs.failures import NonFiniteError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    temperature: 0 takes the most likely token. max_new_tokens: maximum tokens per reply. stop_token: the chat format's
    end marker, which ends a reply and is part of it. other_stop_tokens: further tokens that do so, such as a base
    model's end-of-text token.
    """

    temperature: float
    max_new_tokens: int
    stop_token: int
    other_stop_tokens: tuple[int, ...] = ()


class SampledReply(NamedTuple):
    """One reply of one row, with N tokens.

    token_ids: (N,). logprobs, entropies: (N,), in nats, of the sampling distributions; at temperature 0, of the
    distributions at temperature 1. Entropies are NaN if the engine has none. finished: whether the last token is the
    end marker, so that the next message can follow; False if another token ended the reply or it was cut at
    max_new_tokens.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    finished: bool


def check_entropies(entropies: npt.NDArray[np.float32], temperature: float) -> None:
    """Raise NonFiniteError if an entropy is not finite, as caused by logits of NaN or +inf."""
    if not np.isfinite(entropies).all():
        raise NonFiniteError(
            f"the policy's logits, divided by the temperature {temperature or 1:g}, were not finite during sampling"
        )


@runtime_checkable
class Turns(Protocol):
    """A conversation that may start a row's next turn as soon as its reply has been collected."""

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Append new tokens to each of `rows` and request replies (see `Conversation.sample_replies`)."""

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Sample until at least one reply is finished; return (row, reply) of all finished ones, by ascending row."""


class Conversation(Protocol):
    """Rows that take turns with the environment. A row is one episode with its history."""

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to each of `rows` and sample its reply.

        rows: ascending subset of the previous turn's rows. Omitted rows are finished. new_tokens: the tokens between
        the last reply and the next one, for each of `rows`. Empty in the first turn, since rows already contain their
        prompts.
        """


class RowStreams(Protocol):
    """Provides random numbers for the rows of a conversation, as `numpy.random.Generator` does."""

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        """Make a separate generator for each row."""


class Sampler(Protocol):
    """An engine that samples from the current policy."""

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: RowStreams
    ) -> Conversation:
        """Start a conversation of `len(prompts) * group_size` rows. Row r starts with prompt r // group_size.

        Each row draws from its own child of `rng`, so its random numbers depend neither on which other rows are
        finished nor on how many ranks share the rows.
        """


class LockStepTurns:
    """Turns of a conversation that samples rows together, so that all requested replies finish at the same time."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._new_tokens: dict[int, Sequence[int]] = {}

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Remember the new tokens of `rows` (see `Turns.submit`)."""
        self._new_tokens |= dict(zip(rows, new_tokens, strict=True))

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Sample the replies of all submitted rows (see `Turns.collect`)."""
        rows = sorted(self._new_tokens)
        replies = self._conversation.sample_replies(rows, [self._new_tokens[row] for row in rows])
        self._new_tokens = {}
        return list(zip(rows, replies, strict=True))

"""The interface between the episode loop and sampling engines: conversations of many rows, token ids in and out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainable.runs.failures import NonFiniteError


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    temperature: 0 takes the most likely token. max_new_tokens: maximum tokens per reply. stop_token: the end marker of
    the chat format, which ends a reply and is part of it. other_stop_tokens: further tokens of which the same is true,
    such as the end-of-text token of a base model.
    """

    temperature: float
    max_new_tokens: int
    stop_token: int
    other_stop_tokens: tuple[int, ...] = ()


class SampledReply(NamedTuple):
    """One reply of one row, with N tokens.

    token_ids: (N,). logprobs, entropies: (N,), in nats, of the distributions that the tokens were drawn from; at
    temperature 0, of the distributions at temperature 1. Entropies are NaN if the engine has none. finished: whether
    the last token is the end marker, after which the next message can begin, as opposed to another token that ended the
    reply and to a reply that was cut at max_new_tokens.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    finished: bool


def check_entropies(entropies: npt.NDArray[np.float32], temperature: float) -> None:
    """Raise NonFiniteError if an entropy is not finite: a logit of NaN or +inf makes it NaN."""
    if not np.isfinite(entropies).all():
        raise NonFiniteError(
            f"the policy's logits, divided by the temperature {temperature or 1:g}, were not finite during sampling"
        )


class Turns(Protocol):
    """The turns of a conversation's rows: a row's next turn can be submitted as soon as its reply was collected."""

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Ask for a reply of each of `rows`, after its new tokens (see `Conversation.sample_replies`)."""

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Sample until at least one reply is finished; return (row, reply) of the finished ones, in ascending order."""


class Conversation(Protocol):
    """Rows that take turns with the environment; a row is one episode with its own history."""

    def take_turns(self) -> Turns:
        """The turns of all rows, which wait for one another. They are not mixed with calls of `sample_replies`."""
        return LockStepTurns(self)

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to each of `rows`, and sample a reply for each.

        Args:
            rows: ascending, and a subset of the rows of the previous turn. Rows that are left out are finished.
            new_tokens: the tokens between the last reply and the next one, for each of `rows`. Empty for every row in
                the first turn, in which the rows contain their prompts already.
        """


class RowStreams(Protocol):
    """Random numbers for the rows of a conversation, such as a `numpy.random.Generator`."""

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        """A generator of its own for each row."""


class Sampler(Protocol):
    """An engine that samples from the current policy."""

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: RowStreams
    ) -> Conversation:
        """Start a conversation of `len(prompts) * group_size` rows; row r starts with prompt r // group_size.

        Each row draws from its own child of `rng`, so its random numbers do not depend on which other rows are
        finished, or on how many ranks share the rows.
        """


class LockStepTurns:
    """Turns of a conversation that samples rows together: all replies that were asked for finish at the same time."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._new_tokens: dict[int, Sequence[int]] = {}

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Remember the new tokens of `rows` (see `Turns.submit`)."""
        self._new_tokens |= dict(zip(rows, new_tokens, strict=True))

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Sample a reply of each row that was submitted (see `Turns.collect`)."""
        rows = sorted(self._new_tokens)
        replies = self._conversation.sample_replies(rows, [self._new_tokens[row] for row in rows])
        self._new_tokens = {}
        return list(zip(rows, replies, strict=True))

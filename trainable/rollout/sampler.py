"""The interface between the episode loop and sampling engines: token ids in and out, for conversations of many rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

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


class Conversation:
    """Rows that take turns with the environment. A row is one episode with its history.

    Engines that start a row's next turn as soon as its reply has been collected override `submit` and `collect`. Here,
    all requested replies finish at the same time.
    """

    _submitted_tokens: Mapping[int, Sequence[int]] = MappingProxyType({})

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to each of `rows` and sample its reply.

        rows: ascending subset of the previous turn's rows. Omitted rows are finished. new_tokens: the tokens between
        the last reply and the next one, for each of `rows`. Empty in the first turn, since rows already contain their
        prompts.
        """
        raise NotImplementedError

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Append new tokens to each of `rows` and request replies (see `sample_replies`)."""
        self._submitted_tokens = {**self._submitted_tokens, **dict(zip(rows, new_tokens, strict=True))}

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Sample until at least one reply is finished; return (row, reply) of all finished ones, by ascending row."""
        tokens_by_row, self._submitted_tokens = dict(sorted(self._submitted_tokens.items())), {}
        replies = self.sample_replies(list(tokens_by_row), list(tokens_by_row.values()))
        return list(zip(tokens_by_row, replies, strict=True))


class Sampler(Protocol):
    """An engine that samples from the current policy."""

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation in which equally many consecutive rows start with each prompt.

        rngs: the generator of each row, so that its random numbers depend neither on which other rows are finished nor
        on how many ranks share the rows.
        """

"""The messages of one episode in progress, and their conversion to arrays of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainable.rollout.sampler import SampledReply


@dataclass
class Transcript:
    """Prompts and replies in turn.

    tokens, replies, turns: one entry per message; `replies` has None for prompts. texts: of the replies. length: tokens
    of all messages so far.
    """

    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    replies: list[SampledReply | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    length: int = 0

    @property
    def num_turns(self) -> int:
        """Number of replies so far."""
        return len(self.texts)

    @property
    def is_closed(self) -> bool:
        """Whether the last message ends with its end marker, which the chat format needs between messages.

        A reply that was cut at its maximum length has none.
        """
        last_reply = self.replies[-1]
        return last_reply is not None and last_reply.finished

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Append the tokens that the policy reads before its next reply."""
        self._append(np.asarray(ids, dtype=np.int64), None)

    def append_prompt_if_it_fits(self, ids: Sequence[int], response_length: int, context_length: int) -> bool:
        """Append a prompt unless it and a reply of full length exceed the context; return whether it was appended."""
        if self.length + len(ids) + response_length > context_length:
            return False
        self.append_prompt(ids)
        return True

    def append_reply(self, reply: SampledReply, text: str) -> None:
        """Append a sampled reply with its text."""
        self._append(np.asarray(reply.token_ids, dtype=np.int64), reply)
        self.texts.append(text)

    def _append(self, ids: npt.NDArray[np.int64], reply: SampledReply | None) -> None:
        self.tokens.append(ids)
        self.replies.append(reply)
        self.turns.append(self.num_turns)
        self.length += len(ids)

    def make_arrays(self) -> dict[str, Any]:
        """Concatenate the tokens of all messages, as in `Episode`. Log-probs and entropies of prompts are 0."""
        mask, turns = np.zeros(self.length, dtype=bool), np.zeros(self.length, dtype=np.int64)
        logprobs, entropies = np.zeros(self.length, dtype=np.float32), np.zeros(self.length, dtype=np.float32)
        end = 0
        for ids, reply, turn in zip(self.tokens, self.replies, self.turns, strict=True):
            start, end = end, end + len(ids)
            turns[start:end] = turn
            if reply is not None:
                mask[start:end], logprobs[start:end], entropies[start:end] = True, reply.logprobs, reply.entropies
        return {
            "tokens": np.concatenate(self.tokens),
            "mask": mask,
            "logprobs": logprobs,
            "entropies": entropies,
            "turns": turns,
        }

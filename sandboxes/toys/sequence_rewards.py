"""The five sequence tasks: the correct answer to a prompt, and the reward of an answer.

A prompt is H tokens from 0 ... V - 1, followed by the separator V. An answer is H tokens. The policy can also emit the
separator, which is never correct.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceKind:
    """One sequence task."""

    make_labels: Callable[[Tensor, int], Tensor]
    """Maps prompts [..., H] and V to the correct answers [..., H]."""
    make_chain_spans: Callable[[int], tuple[slice, slice]] | None = None
    """Maps H to the two spans of positions of a chain task. Each correct span is worth a third of the reward, and a
    fully correct answer another third. None: the reward is the fraction of correct positions."""
    num_extra_tokens: int = 0
    """Tokens in addition to the V content tokens and the separator."""


def _make_reversal_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    return prompts.flip(-1)


def _make_sum_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    """Copy the prompt, replacing the last token by the sum of the others, modulo V."""
    return torch.cat((prompts[..., :-1], prompts[..., :-1].sum(-1, keepdim=True) % vocab_size), dim=-1)


def _make_format_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    """Make the answer token V + 1, then the sum of the first two tokens modulo V, then a copy of the rest."""
    answer_token = torch.full_like(prompts[..., :1], vocab_size + 1)
    return torch.cat((answer_token, prompts[..., :2].sum(-1, keepdim=True) % vocab_size, prompts[..., 2:]), dim=-1)


SEQUENCE_KINDS: Mapping[str, SequenceKind] = {
    "token_reversal": SequenceKind(_make_reversal_labels),
    "masked_reversal": SequenceKind(_make_reversal_labels),
    "chain_reversal": SequenceKind(
        _make_reversal_labels, lambda length: (slice(0, length // 2), slice(length // 2, None))
    ),
    "chain_arithmetic": SequenceKind(_make_sum_labels, lambda length: (slice(0, -1), slice(-1, None))),
    "format_answer": SequenceKind(_make_format_labels, lambda length: (slice(0, 1), slice(1, 2)), num_extra_tokens=1),
}
"""Sequence tasks by name; masked_reversal is token_reversal with only the last positions scored."""


def compute_sequence_rewards(kind: SequenceKind, is_correct: Tensor, score_mask: Tensor, binary: bool) -> Tensor:
    """Compute the rewards [...] of answers, in [0, 1].

    Chain tasks: a third for each correct span, and a third for a fully correct answer. Other tasks: the fraction of
    the positions in score_mask [H] that are correct, or, with `binary`, 1 if all of them are and 0 otherwise.
    """
    if kind.make_chain_spans is not None:
        spans = (*kind.make_chain_spans(is_correct.shape[-1]), slice(None))
        return torch.stack([is_correct[..., span].all(-1) for span in spans]).float().mean(0)
    scored_correct = is_correct[..., score_mask]
    return scored_correct.all(-1).float() if binary else scored_correct.float().mean(-1)

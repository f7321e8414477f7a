"""The five sequence tasks: what the right answer to a prompt is, and what an answer is worth.

A prompt is H tokens of 0 ... V - 1, then the separator V; an answer is H tokens. The policy may answer with the
separator too, which is never right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceKind:
    """One sequence task.

    labels: prompts [..., H] and V to the right answers [..., H]. parts: of H, the two spans of positions that a chain
    task pays a third for each, and the last third for all; None: the share of right positions counts.
    own_tokens: tokens beyond V and the separator.
    """

    make_labels: Callable[[Tensor, int], Tensor]
    make_chain_spans: Callable[[int], tuple[slice, slice]] | None = None
    num_extra_tokens: int = 0


def _make_reversal_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    return prompts.flip(-1)


def _make_sum_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    """A copy whose last token is the sum of the others, modulo V."""
    return torch.cat((prompts[..., :-1], prompts[..., :-1].sum(-1, keepdim=True) % vocab_size), dim=-1)


def _make_format_labels(prompts: Tensor, vocab_size: int) -> Tensor:
    """The answer token V + 1, the sum of the first two modulo V, then a copy of the rest."""
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
"""Name -> task; masked_reversal is token_reversal of which only the last positions are scored."""


def compute_sequence_rewards(kind: SequenceKind, is_correct: Tensor, score_mask: Tensor, binary: bool) -> Tensor:
    """Rewards [...] in [0, 1] of answers that are right at positions right [..., H].

    scored: [H] bool, positions that count. Chain tasks: a third for either part and a third for both. Others: the
    share of scored positions that are right, or where `binary`, 1 if all of them are.
    """
    if kind.make_chain_spans is not None:
        first_span, second_span = kind.make_chain_spans(is_correct.shape[-1])
        chain_correct = (is_correct[..., first_span].all(-1), is_correct[..., second_span].all(-1), is_correct.all(-1))
        return torch.stack(chain_correct).float().mean(0)
    scored_correct = is_correct[..., score_mask]
    return scored_correct.all(-1).float() if binary else scored_correct.float().mean(-1)

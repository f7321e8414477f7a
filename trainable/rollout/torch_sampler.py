"""Sampling in plain torch, with one prefill per group and a KV cache that is kept across turns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.models.interface import LanguageModel
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams, check_entropies

COMPACT_FRACTION = 0.5
"""Live rows are moved together when fewer than this fraction of rows is live. This copies the cache: with one half, at
most log2(rows) times per turn."""


class TorchSampler:
    """Samples from the trainer's own model, so that no weights need syncing."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation (see `Sampler.start_conversation`)."""
        return TorchConversation(self.model, prompts, params, rngs)


class _TurnBuffers(NamedTuple):
    """Buffers of the current turn: (rows, steps) each, except `lengths` (rows,). Rows are in cache order.

    uniforms: the random numbers that select tokens. lengths: number of sampled tokens of each row so far.
    """

    uniforms: Tensor
    token_ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    lengths: Tensor


class TorchConversation(Conversation):
    """Samples rows in lock-step with one cache. Live rows come first, so that passes can skip the finished ones.

    A place is an index into the cache. `rows` maps each place to a row of the conversation, and `pending_tokens` to the
    last token of its reply, which no pass has read yet (None before the first reply).
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        self.model, self.params = model, params
        self.device = model.lm_head.weight.device
        self.row_rngs = rngs
        self.rows = list(range(len(rngs)))
        self.pending_tokens: list[int | None] = [None] * len(self.rows)
        longest = max(len(prompt) for prompt in prompts)
        # Room for a few turns; the cache grows when it is full.
        self.cache = model.model.make_cache(len(prompts), longest + 4 * params.max_new_tokens)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.hidden = self._extend(prompts)
            # So far, the cache has one row per prompt. Repeat each for its group.
            self._select_places(
                torch.arange(len(prompts), device=self.device).repeat_interleave(len(rngs) // len(prompts))
            )

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to `rows` and sample their replies (see `Conversation.sample_replies`)."""
        tokens_by_row = dict(zip(rows, new_tokens, strict=True))
        with torch.inference_mode():
            # In the first turn nothing has been sampled yet, and the cache already contains the prompts.
            if any(last is not None for last in self.pending_tokens):
                self._reorder([place for place, row in enumerate(self.rows) if row in tokens_by_row])
                # Remove the padding that finished rows got while others were sampled, so that attention computes less.
                self.cache.pack()
                # Here every row has a pending token; the check for None is for the type checker.
                chunks = [
                    [*([] if pending is None else [pending]), *tokens_by_row[row]]
                    for row, pending in zip(self.rows, self.pending_tokens, strict=True)
                ]
                self.hidden = self._extend(chunks)
            replies = self._sample_turn()
        return [replies[row] for row in rows]  # compacting may have reordered the rows of the cache

    def _select_places(self, places: Tensor) -> None:
        """Index the rows of the cache, the lengths and the hidden states by `places`."""
        self.cache.select_rows(places)
        self.hidden, self.lengths = self.hidden[places], self.lengths[places]

    def _reorder(self, places: Sequence[int]) -> None:
        """Keep only the rows at `places`, in that order."""
        self._select_places(torch.tensor(places, device=self.device))
        self.rows = [self.rows[place] for place in places]
        self.pending_tokens = [self.pending_tokens[place] for place in places]

    def _extend(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append a chunk of tokens to each place of the cache; return the last tokens' hidden states (rows, hidden)."""
        # Right-aligned, so that the last column has the last token of every chunk.
        widest = max(len(chunk) for chunk in chunks)
        tokens = torch.zeros((len(chunks), widest), dtype=torch.long)
        for row, chunk in enumerate(chunks):
            tokens[row, widest - len(chunk) :] = torch.tensor(chunk, dtype=torch.long)
        counts = torch.tensor([len(chunk) for chunk in chunks], device=self.device)
        steps = torch.arange(widest, device=self.device) - (widest - counts[:, None])
        # `steps` is negative on the left padding, which is masked, so any valid position will do.
        hidden = self.model.model.extend(
            tokens.to(self.device), (self.lengths[:, None] + steps).clamp_min(0), steps >= 0, self.cache
        )
        self.lengths = self.lengths + counts
        return hidden

    def _sample_turn(self) -> dict[int, SampledReply]:
        """Sample in lock-step until every row has a stop token or the maximum length; return replies by row."""
        buffers, live_mask = self._make_buffers(), torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(self.params.max_new_tokens):
            active_count = len(live_mask)  # live rows are among the first `active_count` places
            samples = sample_tokens(
                self.model.lm_head(self.hidden[:active_count]),
                self.params.temperature,
                buffers.uniforms[:active_count, step],
            )
            for buffer, column in zip((buffers.token_ids, buffers.logprobs, buffers.entropies), samples, strict=True):
                buffer[:active_count, step] = column
            buffers.lengths[:active_count] += live_mask  # before the mask is updated: the stop token counts
            tokens = samples[0]
            for stop_token in (self.params.stop_token, *self.params.other_stop_tokens):
                live_mask = live_mask & (tokens != stop_token)
            live_count = int(live_mask.sum())
            # The last tokens are not appended to the cache here: the next turn appends them with its new tokens.
            if step + 1 == self.params.max_new_tokens or live_count == 0:
                break
            if live_count < COMPACT_FRACTION * active_count:
                buffers, tokens, live_mask = self._compact_rows(buffers, tokens, live_mask)
            self._append_tokens(tokens, live_mask)
        return self._collect_replies(buffers)

    def _make_buffers(self) -> _TurnBuffers:
        """Make the buffers of a turn and draw its random numbers."""
        rows, steps = len(self.rows), self.params.max_new_tokens
        # Each row has its own generator, so that its tokens do not depend on which other rows are live.
        uniforms = np.stack([self.row_rngs[row].random(steps, dtype=np.float32) for row in self.rows])
        float_buffers = torch.zeros((2, rows, steps), device=self.device)
        return _TurnBuffers(
            uniforms=torch.from_numpy(uniforms).to(self.device),
            token_ids=torch.zeros((rows, steps), dtype=torch.long, device=self.device),
            logprobs=float_buffers[0],
            entropies=float_buffers[1],
            lengths=torch.zeros(rows, dtype=torch.long, device=self.device),
        )

    def _compact_rows(
        self, buffers: _TurnBuffers, tokens: Tensor, live_mask: Tensor
    ) -> tuple[_TurnBuffers, Tensor, Tensor]:
        """Move the live rows to the first places; return reordered buffers, and tokens and mask of the live rows."""
        # `live_mask` covers only the first places; the rows behind them have finished earlier.
        finished_mask = torch.cat((~live_mask, live_mask.new_ones(len(self.rows) - len(live_mask))))
        places = torch.argsort(finished_mask, stable=True)
        self._reorder(places.tolist())
        return _TurnBuffers(*(buffer[places] for buffer in buffers)), tokens[live_mask], live_mask[live_mask]

    def _append_tokens(self, tokens: Tensor, live_mask: Tensor) -> None:
        """Append one token to each of the first rows. Finished rows among them get padding."""
        active_count = len(live_mask)
        self.hidden[:active_count] = self.model.model.extend(
            tokens[:, None], self.lengths[:active_count, None], live_mask[:, None], self.cache
        )
        self.lengths[:active_count] += live_mask

    def _collect_replies(self, buffers: _TurnBuffers) -> dict[int, SampledReply]:
        """Cut each row's reply out of the buffers; its last token is pending, since no pass has read it.

        Raises NonFiniteError if logits were not finite.
        """
        token_ids, logprobs, entropies = (
            buffer.cpu().numpy() for buffer in (buffers.token_ids, buffers.logprobs, buffers.entropies)
        )
        check_entropies(entropies, self.params.temperature)
        replies = {}
        for place, length in enumerate(buffers.lengths.tolist()):
            last_token = self.pending_tokens[place] = int(token_ids[place, length - 1])
            replies[self.rows[place]] = SampledReply(
                token_ids[place, :length],
                logprobs[place, :length],
                entropies[place, :length],
                last_token == self.params.stop_token,
            )
        return replies


def sample_tokens(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    logits: (B, V). uniforms: (B,) in [0, 1). Returns tokens, their log-probs and the entropies, each (B,), of the
    distribution at `temperature`. At temperature 0, takes the most likely token, with log-probs and entropies at
    temperature 1.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    probs = logprobs.exp()
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        # In float64, because sums over a large vocabulary accumulate rounding errors.
        cdf = probs.double().cumsum(-1)
        # The last entry may differ from 1 by rounding. The uniforms are scaled by it, so that every draw is within the
        # distribution. With right=True, tokens of probability 0, whose entry equals the one before, are never drawn.
        tokens = torch.searchsorted(cdf, (uniforms.double() * cdf[:, -1])[:, None], right=True).squeeze(-1)
        tokens = tokens.clamp_max(logits.shape[-1] - 1)  # NaN sorts behind all entries; `_collect_replies` reports it
    # Clamped, because the product of a log-prob of -inf and the probability 0 would be NaN.
    entropies = -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropies

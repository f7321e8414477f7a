"""Sampling in plain torch: each prompt prefilled once for its group, the key-value cache kept across turns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.models.interface import LanguageModel
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams
from trainable.runs.failures import NonFiniteError

COMPACT_FRACTION = 0.5  # share of talking rows below which they are moved together; moving copies the cache


class TorchSampler:
    """Samples from a model that it shares with the trainer: there are no weights to push."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: np.random.Generator
    ) -> Conversation:
        """Open a conversation (see `Sampler.converse`)."""
        return TorchConversation(self.model, prompts, group_size, params, rng)


class _TurnBuffers(NamedTuple):
    """A turn while it is sampled, by place in the cache: (rows, steps) each, but for the lengths `counts` (rows,)."""

    uniforms: Tensor
    token_ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    lengths: Tensor


class TorchConversation:
    """Rows in one cache, in lock-step. Rows that are still talking stand first, so that finished ones cost nothing."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        rng: np.random.Generator,
    ) -> None:
        self.model, self.params = model, params
        self.device = model.lm_head.weight.device
        self.row_rngs = rng.spawn(len(prompts) * group_size)
        self.rows = list(range(len(prompts) * group_size))  # the conversation's row at each place of the cache
        self.pending_tokens: list[int | None] = [None] * len(self.rows)  # a reply's last token, not in the cache yet
        longest = max(len(prompt) for prompt in prompts)
        self.cache = model.model.make_cache(len(prompts), longest + 4 * params.max_new_tokens)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.hidden = self._extend(prompts)
            self._select_places(torch.arange(len(prompts), device=self.device).repeat_interleave(group_size))

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Give `rows` new tokens and sample a reply of each (see `Conversation.reply`)."""
        tokens_by_row = dict(zip(rows, new_tokens, strict=True))
        with torch.inference_mode():
            if any(last is not None for last in self.pending_tokens):
                self._reorder([place for place, row in enumerate(self.rows) if row in tokens_by_row])
                self.cache.pack()
                chunks = [
                    [*([] if last is None else [last]), *tokens_by_row[row]]
                    for row, last in zip(self.rows, self.pending_tokens, strict=True)
                ]
                self.hidden = self._extend(chunks)
            replies = self._sample_turn()
        return [replies[row] for row in rows]

    def _select_places(self, places: Tensor) -> None:
        """Fill the places with the rows that stand at `places` now; lengths and hidden states move along."""
        self.cache.select_rows(places)
        self.hidden, self.lengths = self.hidden[places], self.lengths[places]

    def _reorder(self, places: Sequence[int]) -> None:
        """Keep the rows at `places`, in that order."""
        self._select_places(torch.tensor(places, device=self.device))
        self.rows = [self.rows[place] for place in places]
        self.pending_tokens = [self.pending_tokens[place] for place in places]

    def _extend(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append a chunk to every row, right-aligned; hidden state of the last token (rows, hidden)."""
        widest = max(len(chunk) for chunk in chunks)
        tokens = torch.zeros((len(chunks), widest), dtype=torch.long)
        for row, chunk in enumerate(chunks):
            tokens[row, widest - len(chunk) :] = torch.tensor(chunk, dtype=torch.long)
        counts = torch.tensor([len(chunk) for chunk in chunks], device=self.device)
        steps = torch.arange(widest, device=self.device) - (widest - counts[:, None])
        hidden = self.model.model.extend(
            tokens.to(self.device), (self.lengths[:, None] + steps).clamp_min(0), steps >= 0, self.cache
        )
        self.lengths = self.lengths + counts
        return hidden

    def _sample_turn(self) -> dict[int, SampledReply]:
        """Draw tokens in lock-step until every row has its stop token or its length; replies by row."""
        buffers, live_mask = self._make_buffers(), torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(self.params.max_new_tokens):
            active_count = len(live_mask)  # places 0 .. active - 1 hold every row that is still talking
            samples = sample_tokens(
                self.model.lm_head(self.hidden[:active_count]),
                self.params.temperature,
                buffers.uniforms[:active_count, step],
            )
            for buffer, column in zip((buffers.token_ids, buffers.logprobs, buffers.entropies), samples, strict=True):
                buffer[:active_count, step] = column
            buffers.lengths[:active_count] += live_mask
            tokens, live_mask = samples[0], live_mask & (samples[0] != self.params.stop_token)
            live_count = int(live_mask.sum())
            if step + 1 == self.params.max_new_tokens or live_count == 0:
                break
            if live_count < COMPACT_FRACTION * active_count:
                buffers, tokens, live_mask = self._compact_rows(buffers, tokens, live_mask)
            self._append_tokens(tokens, live_mask)
        return self._collect_replies(buffers)

    def _make_buffers(self) -> _TurnBuffers:
        rows, steps = len(self.rows), self.params.max_new_tokens
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
        """Move the rows that are still talking to the first places; tokens and live are cut to them."""
        finished_mask = torch.cat((~live_mask, live_mask.new_ones(len(self.rows) - len(live_mask))))
        places = torch.argsort(finished_mask, stable=True)
        self._reorder(places.tolist())
        return _TurnBuffers(*(part[places] for part in buffers)), tokens[live_mask], live_mask[live_mask]

    def _append_tokens(self, tokens: Tensor, live_mask: Tensor) -> None:
        """Append one token to each row at the first places; a finished row among them gets a filler."""
        active_count = len(live_mask)
        self.hidden[:active_count] = self.model.model.extend(
            tokens[:, None], self.lengths[:active_count, None], live_mask[:, None], self.cache
        )
        self.lengths[:active_count] += live_mask

    def _collect_replies(self, buffers: _TurnBuffers) -> dict[int, SampledReply]:
        """Cut each row to its reply; its last token is still to be appended to the cache."""
        token_ids, logprobs, entropies = (
            part.cpu().numpy() for part in (buffers.token_ids, buffers.logprobs, buffers.entropies)
        )
        if not np.isfinite(entropies).all():
            raise NonFiniteError("the policy's logits were not finite while it was sampled from")
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
    """Draw one token a row by inverting the distribution function.

    logits: (B, V). uniforms: (B,) in [0, 1). Returns tokens (B,), and their log-probs and the entropies (B,) of the
    distribution at `temperature`, or at 1 where temperature is 0 and the likeliest token is taken.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    probs = logprobs.exp()
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cdf = probs.double().cumsum(-1)
        # Scaled by the last height: rounding must not let a draw fall beyond the distribution.
        tokens = torch.searchsorted(cdf, (uniforms.double() * cdf[:, -1])[:, None], right=True).squeeze(-1)
        tokens = tokens.clamp_max(logits.shape[-1] - 1)  # what is not finite is beyond every height
    entropies = -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropies

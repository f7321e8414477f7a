"""Sampling in plain torch: each prompt prefilled once for its group, the key-value cache kept across turns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.models.interface import LanguageModel
from trainable.rollout.sampler import Conversation, Sampled, SamplingParams
from trainable.runs.failures import NonFiniteError

CROWDED = 0.5  # share of talking rows below which they are moved together; moving copies the cache


class TorchSampler:
    """Samples from a model that it shares with the trainer: there are no weights to push."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def converse(
        self, prompts: Sequence[Sequence[int]], copies: int, params: SamplingParams, uniforms: np.random.Generator
    ) -> Conversation:
        """Open a conversation (see `Sampler.converse`)."""
        return TorchConversation(self.model, prompts, copies, params, uniforms)


class _Turn(NamedTuple):
    """A turn while it is sampled, by place in the cache: (rows, steps) each, but for the lengths `counts` (rows,)."""

    uniforms: Tensor
    ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    counts: Tensor


class TorchConversation:
    """Rows in one cache, in lock-step. Rows that are still talking stand first, so that finished ones cost nothing."""

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Sequence[int]], copies: int, params: SamplingParams,
        uniforms: np.random.Generator,
    ) -> None:  # fmt: skip
        self.model, self.params = model, params
        self.device = model.lm_head.weight.device
        self.uniforms = uniforms.spawn(len(prompts) * copies)
        self.rows = list(range(len(prompts) * copies))  # the conversation's row at each place of the cache
        self.pending: list[int | None] = [None] * len(self.rows)  # a reply's last token, not in the cache yet
        longest = max(len(prompt) for prompt in prompts)
        self.cache = model.model.new_cache(len(prompts), longest + 4 * params.max_new_tokens)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.hidden = self._extend(prompts)
            self._place(torch.arange(len(prompts), device=self.device).repeat_interleave(copies))

    def reply(self, rows: Sequence[int], given: Sequence[Sequence[int]]) -> list[Sampled]:
        """Give `rows` new tokens and sample a reply of each (see `Conversation.reply`)."""
        new = dict(zip(rows, given, strict=True))
        with torch.inference_mode():
            if any(last is not None for last in self.pending):
                self._reorder([place for place, row in enumerate(self.rows) if row in new])
                self.cache.pack()
                chunks = [
                    [*([] if last is None else [last]), *new[row]]
                    for row, last in zip(self.rows, self.pending, strict=True)
                ]
                self.hidden = self._extend(chunks)
            replies = self._sample()
        return [replies[row] for row in rows]

    def _place(self, places: Tensor) -> None:
        """Fill the places with the rows that stand at `places` now; lengths and hidden states move along."""
        self.cache.select(places)
        self.hidden, self.lengths = self.hidden[places], self.lengths[places]

    def _reorder(self, places: Sequence[int]) -> None:
        """Keep the rows at `places`, in that order."""
        self._place(torch.tensor(places, device=self.device))
        self.rows = [self.rows[place] for place in places]
        self.pending = [self.pending[place] for place in places]

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

    def _sample(self) -> dict[int, Sampled]:
        """Draw tokens in lock-step until every row has its stop token or its length; replies by row."""
        turn, live = self._open_turn(), torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for number in range(self.params.max_new_tokens):
            active = len(live)  # places 0 .. active - 1 hold every row that is still talking
            drawn = draw(
                self.model.lm_head(self.hidden[:active]), self.params.temperature, turn.uniforms[:active, number]
            )
            for store, column in zip((turn.ids, turn.logprobs, turn.entropies), drawn, strict=True):
                store[:active, number] = column
            turn.counts[:active] += live
            tokens, live = drawn[0], live & (drawn[0] != self.params.stop_token)
            left = int(live.sum())
            if number + 1 == self.params.max_new_tokens or left == 0:
                break
            if left < CROWDED * active:
                turn, tokens, live = self._bring_forward(turn, tokens, live)
            self._append(tokens, live)
        return self._collect(turn)

    def _open_turn(self) -> _Turn:
        rows, steps = len(self.rows), self.params.max_new_tokens
        draws = np.stack([self.uniforms[row].random(steps, dtype=np.float32) for row in self.rows])
        floats = torch.zeros((2, rows, steps), device=self.device)
        return _Turn(
            uniforms=torch.from_numpy(draws).to(self.device),
            ids=torch.zeros((rows, steps), dtype=torch.long, device=self.device),
            logprobs=floats[0],
            entropies=floats[1],
            counts=torch.zeros(rows, dtype=torch.long, device=self.device),
        )

    def _bring_forward(self, turn: _Turn, tokens: Tensor, live: Tensor) -> tuple[_Turn, Tensor, Tensor]:
        """Move the rows that are still talking to the first places; tokens and live are cut to them."""
        finished = torch.cat((~live, live.new_ones(len(self.rows) - len(live))))
        places = torch.argsort(finished, stable=True)
        self._reorder(places.tolist())
        return _Turn(*(part[places] for part in turn)), tokens[live], live[live]

    def _append(self, tokens: Tensor, live: Tensor) -> None:
        """Append one token to each row at the first places; a finished row among them gets a filler."""
        active = len(live)
        self.hidden[:active] = self.model.model.extend(
            tokens[:, None], self.lengths[:active, None], live[:, None], self.cache
        )
        self.lengths[:active] += live

    def _collect(self, turn: _Turn) -> dict[int, Sampled]:
        """Cut each row to its reply; its last token is still to be appended to the cache."""
        ids, logprobs, entropies = (part.cpu().numpy() for part in (turn.ids, turn.logprobs, turn.entropies))
        if not np.isfinite(entropies).all():
            raise NonFiniteError("the policy's logits were not finite while it was sampled from")
        replies = {}
        for place, length in enumerate(turn.counts.tolist()):
            last = self.pending[place] = int(ids[place, length - 1])
            replies[self.rows[place]] = Sampled(
                ids[place, :length], logprobs[place, :length], entropies[place, :length],
                last == self.params.stop_token,
            )  # fmt: skip
        return replies


def draw(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the distribution function.

    logits: (B, V). uniforms: (B,) in [0, 1). Returns tokens (B,), and their log-probs and the entropies (B,) of the
    distribution at `temperature`, or at 1 where temperature is 0 and the likeliest token is taken.
    """
    logs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    probs = logs.exp()
    if temperature == 0:
        tokens = logs.argmax(-1)
    else:
        heights = probs.double().cumsum(-1)
        # Scaled by the last height: rounding must not let a draw fall beyond the distribution.
        tokens = torch.searchsorted(heights, (uniforms.double() * heights[:, -1])[:, None], right=True).squeeze(-1)
        tokens = tokens.clamp_max(logits.shape[-1] - 1)  # what is not finite is beyond every height
    entropies = -(probs * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1), entropies

"""Sampling in plain torch: each prompt prefilled once for its group, the key-value cache kept across turns."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainable.qwen2 import KVCache, Qwen2
from trainable.rollout.sampler import Conversation, Sampled, SamplingParams


class TorchSampler:
    """Samples from a Qwen2 module that it shares with the trainer: there are no weights to push."""

    def __init__(self, model: Qwen2) -> None:
        self.model = model

    def converse(
        self, prompts: Sequence[Sequence[int]], copies: int, params: SamplingParams, uniforms: np.random.Generator
    ) -> Conversation:
        """Open a conversation (see `Sampler.converse`)."""
        return TorchConversation(self.model, prompts, copies, params, uniforms)


class TorchConversation:
    """Rows in one cache, in lock-step; all write the same slots and a bias hides a row's fillers from it."""

    def __init__(
        self, model: Qwen2, prompts: Sequence[Sequence[int]], copies: int, params: SamplingParams,
        uniforms: np.random.Generator,
    ) -> None:  # fmt: skip
        self.model, self.params = model, params
        self.device = model.lm_head.weight.device
        self.uniforms = uniforms.spawn(len(prompts) * copies)
        self.rows = list(range(len(prompts) * copies))
        longest = max(len(prompt) for prompt in prompts)
        self.cache = KVCache(model.shape, len(prompts), longest + 4 * params.max_new_tokens, model.lm_head.weight)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.hidden = self._extend(prompts)
            spread = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
            self.cache.select(spread)
            self.hidden, self.lengths = self.hidden[spread], self.lengths[spread]
        self.pending: list[int | None] = [None] * len(self.rows)

    def reply(self, rows: Sequence[int], given: Sequence[Sequence[int]]) -> list[Sampled]:
        """Give `rows` new tokens and sample a reply of each (see `Conversation.reply`)."""
        with torch.inference_mode():
            self._keep(rows)
            chunks = [
                [*([] if last is None else [last]), *new] for last, new in zip(self.pending, given, strict=True)
            ]
            if any(chunks):
                self.hidden = self._extend(chunks)
            return self._sample()

    def _keep(self, rows: Sequence[int]) -> None:
        """Drop the rows that are finished."""
        if list(rows) == self.rows:
            return
        places = {row: place for place, row in enumerate(self.rows)}
        chosen = [places[row] for row in rows]
        index = torch.tensor(chosen, device=self.device)
        self.cache.select(index)
        self.hidden, self.lengths = self.hidden[index], self.lengths[index]
        self.pending = [self.pending[place] for place in chosen]
        self.rows = list(rows)

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

    def _sample(self) -> list[Sampled]:
        """Draw tokens in lock-step until every row has its stop token or its length."""
        params, count = self.params, len(self.rows)
        draws = np.stack([self.uniforms[row].random(params.max_new_tokens, dtype=np.float32) for row in self.rows])
        uniforms = torch.from_numpy(draws).to(self.device)
        live = torch.ones(count, dtype=torch.bool, device=self.device)
        ids, logprobs, entropies, lives = [], [], [], []
        for number in range(params.max_new_tokens):
            drawn = draw(self.model.lm_head(self.hidden), params.temperature, uniforms[:, number])
            for store, column in zip((ids, logprobs, entropies), drawn, strict=True):
                store.append(column)
            lives.append(live)
            live = live & (drawn[0] != params.stop_token)
            if number + 1 == params.max_new_tokens or not bool(live.any()):
                break
            self.hidden = self.model.model.extend(drawn[0][:, None], self.lengths[:, None], live[:, None], self.cache)
            self.lengths = self.lengths + live.long()
        return self._collect(*(torch.stack(store, 1).cpu().numpy() for store in (ids, logprobs, entropies, lives)))

    def _collect(
        self, ids: np.ndarray, logprobs: np.ndarray, entropies: np.ndarray, lives: np.ndarray
    ) -> list[Sampled]:
        """Cut each row (rows, steps) to its reply; its last token is still to be appended to the cache."""
        replies = []
        for row, length in enumerate(lives.sum(1)):
            reply = ids[row, :length]
            self.pending[row] = int(reply[-1])
            finished = self.pending[row] == self.params.stop_token
            replies.append(Sampled(reply, logprobs[row, :length], entropies[row, :length], finished))
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
    entropies = -(probs * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    return tokens, logs.gather(-1, tokens[:, None]).squeeze(-1), entropies

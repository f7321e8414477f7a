"""Episodes as tensors: what the update reads, and the flat view of its trained tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.algo.batching import order_by_group, order_length_stratified
from trainable.rollout.episode import Episode


class Batch(NamedTuple):
    """B episodes padded on the right to T tokens; position t of every (B, T) tensor speaks of token t.

    tokens: int64. mask: True where the token was sampled, and so is trained. logprobs: of the sampling policy, nats.
    turns: turn number. group_ids: (B,). scores: (B,) episode scores. rewards: (B, T) turn rewards at each turn's last
    sampled token. lengths: (B,) tokens before padding. engine_logprobs: what the engine gave where it has weights of
    its own, else `logprobs`.
    """

    tokens: Tensor
    mask: Tensor
    logprobs: Tensor
    turns: Tensor
    rewards: Tensor
    group_ids: Tensor
    scores: Tensor
    lengths: Tensor
    engine_logprobs: Tensor

    def select_rows(self, index: Tensor) -> "Batch":
        """The episodes at `index` (N,), cut to the longest of them."""
        longest = int(self.lengths[index].max())
        return Batch(*(part[index][:, :longest] if part.dim() == 2 else part[index] for part in self))

    def find_prediction_positions(self) -> Tensor:
        """Flat positions (N,) in B * T from which the trained tokens are predicted: each token's predecessor."""
        return self.mask.flatten().nonzero().squeeze(-1) - 1

    def count_needed_tokens(self) -> Tensor:
        """Tokens (B,) of each episode that a pass reads: all before its last trained one, 0 where none is trained."""
        return (torch.arange(self.mask.shape[1], device=self.mask.device) * self.mask).amax(1)


def collate(episodes: Sequence[Episode]) -> Batch:
    """Pad episodes into one batch, in their order."""
    longest = max(len(episode.tokens) for episode in episodes)

    def pad(arrays: Sequence[np.ndarray]) -> Tensor:
        out = np.zeros((len(arrays), longest), dtype=arrays[0].dtype)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
        return torch.from_numpy(out)

    return Batch(
        tokens=pad([episode.tokens for episode in episodes]),
        mask=pad([episode.mask for episode in episodes]),
        logprobs=pad([episode.logprobs for episode in episodes]),
        turns=pad([episode.turns for episode in episodes]),
        rewards=pad([place_turn_rewards(episode) for episode in episodes]),
        group_ids=torch.tensor([episode.group for episode in episodes]),
        scores=torch.tensor([episode.score for episode in episodes]),
        lengths=torch.tensor([len(episode.tokens) for episode in episodes]),
        engine_logprobs=pad(
            [episode.logprobs if episode.engine_logprobs is None else episode.engine_logprobs for episode in episodes]
        ),
    )


def place_turn_rewards(episode: Episode) -> np.ndarray:
    """Each turn's reward at its last sampled token, (T,) float32."""
    rewards = np.zeros(len(episode.tokens), dtype=np.float32)
    for turn, reward in enumerate(episode.turn_rewards):
        rewards[np.flatnonzero(episode.mask & (episode.turns == turn))[-1]] = reward
    return rewards


def place_episode_scores(batch: Batch) -> Tensor:
    """The episode's whole score at its last sampled token, (B, T): the published placement."""
    positions = torch.arange(batch.mask.shape[1], device=batch.mask.device).expand_as(batch.mask)
    last_positions = torch.where(batch.mask, positions, -1).max(dim=1).values
    return torch.where(positions == last_positions[:, None], batch.scores[:, None], 0.0)


def make_update_order(batch: Batch, needs_whole_groups: bool) -> Tensor:
    """Order (B,) in which episodes are cut into mini-batches: by length, groups together where a loss needs them so."""
    if needs_whole_groups:
        return order_by_group(batch.lengths, batch.group_ids)
    return order_length_stratified(batch.lengths)


def split_mini_batches(order: Tensor, size: int) -> Iterator[Tensor]:
    """Consecutive pieces of an order (B,)."""
    return iter(order.split(size))

"""Batches: episodes as padded tensors, as updates read them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.algo.batching import order_by_group, order_length_stratified
from trainable.rollout.episode import Episode, list_rollouts


class Batch(NamedTuple):
    """B episodes, padded on the right to T tokens. Position t of every (B, T) tensor belongs to token t.

    tokens: int64 ids. mask: bool, True for sampled tokens, which are trained. logprobs: float32, log-prob of each
    sampled token under the sampling policy, in nats; 0 elsewhere. turns: int64, number of the turn, from 0. rewards:
    float32, the reward of each turn at its last sampled token. group_ids: (B,) int64, equal for the rollouts of one
    level. scores: (B,) float32, score of each episode. lengths: (B,) int64, tokens without padding. tree_ids: (B,)
    int64, equal for an episode and its children. is_root: (B,) bool, False for children. engine_logprobs: like
    `logprobs`, as reported by the engine if it has its own copy of the weights, otherwise equal to `logprobs`.
    """

    tokens: Tensor
    mask: Tensor
    logprobs: Tensor
    turns: Tensor
    rewards: Tensor
    group_ids: Tensor
    scores: Tensor
    lengths: Tensor
    tree_ids: Tensor
    is_root: Tensor
    engine_logprobs: Tensor

    def select_rows(self, index: Tensor) -> "Batch":
        """Select the episodes at `index` (N,), cut to the longest of them."""
        longest = int(self.lengths[index].max())
        return Batch(*(tensor[index][:, :longest] if tensor.dim() == 2 else tensor[index] for tensor in self))

    def to(self, device: torch.device) -> "Batch":
        """Move the batch to `device`."""
        return Batch(*(tensor.to(device) for tensor in self))

    def find_prediction_positions(self) -> Tensor:
        """Find the flat positions (N,) in B * T from which trained tokens are predicted: the position before each.

        Every episode starts with a prompt, so position 0 of a row is never trained.
        """
        return self.mask.flatten().nonzero().squeeze(-1) - 1

    def count_needed_tokens(self) -> Tensor:
        """Count the tokens (B,) that a pass has to read, all before the last trained token; 0 if none is trained."""
        # The number of tokens before the last trained token is its position.
        return (torch.arange(self.mask.shape[1], device=self.mask.device) * self.mask).amax(1)


def collate(episodes: Sequence[Episode]) -> Batch:
    """Pad episodes and stack them into a batch on the CPU, in the given order and each followed by its children."""
    num_rollouts = torch.tensor([len(episode.rollouts) for episode in episodes])
    tree_ids = torch.arange(len(episodes)).repeat_interleave(num_rollouts)
    episodes = list_rollouts(episodes)
    longest = max(len(episode.tokens) for episode in episodes)

    def pad(arrays: Sequence[np.ndarray]) -> Tensor:
        # With 0, which is False in the mask, so padding is never trained.
        padded = np.zeros((len(arrays), longest), dtype=arrays[0].dtype)
        for row, array in enumerate(arrays):
            padded[row, : len(array)] = array
        return torch.from_numpy(padded)

    return Batch(
        tokens=pad([episode.tokens for episode in episodes]),
        mask=pad([episode.mask for episode in episodes]),
        logprobs=pad([episode.logprobs for episode in episodes]),
        turns=pad([episode.turns for episode in episodes]),
        rewards=pad([place_turn_rewards(episode) for episode in episodes]),
        group_ids=torch.tensor([episode.group for episode in episodes]),
        scores=torch.tensor([episode.score for episode in episodes]),
        lengths=torch.tensor([len(episode.tokens) for episode in episodes]),
        tree_ids=tree_ids,
        is_root=torch.cat([torch.ones(1, dtype=torch.bool), tree_ids[1:] != tree_ids[:-1]]),
        engine_logprobs=pad(
            [episode.logprobs if episode.engine_logprobs is None else episode.engine_logprobs for episode in episodes]
        ),
    )


def place_turn_rewards(episode: Episode) -> np.ndarray:
    """Place the reward of each turn at its last sampled token; return float32 (T,), 0 elsewhere."""
    rewards = np.zeros(len(episode.tokens), dtype=np.float32)
    for turn, reward in enumerate(episode.turn_rewards):
        rewards[np.flatnonzero(episode.mask & (episode.turns == turn))[-1]] = reward
    return rewards


def place_episode_scores(batch: Batch) -> Tensor:
    """Place the score of each episode at its last sampled token, as published; return (B, T), 0 elsewhere."""
    positions = torch.arange(batch.mask.shape[1], device=batch.mask.device).expand_as(batch.mask)
    last_positions = torch.where(batch.mask, positions, -1).max(dim=1).values
    return torch.where(positions == last_positions[:, None], batch.scores[:, None], 0.0)


def make_update_order(batch: Batch, needs_whole_groups: bool) -> Tensor:
    """Order episodes (B,) for splitting into mini-batches: by length, with groups kept together if needed."""
    if needs_whole_groups:
        return order_by_group(batch.lengths, batch.group_ids)
    return order_length_stratified(batch.lengths)

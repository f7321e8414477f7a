"""Batches: episodes as padded tensors, from which the update reads its trained tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.algo.batching import order_by_group, order_length_stratified
from trainable.rollout.episode import Episode, list_rollouts


class Batch(NamedTuple):
    """B episodes, padded on the right to T tokens; position t of every (B, T) tensor belongs to token t.

    tokens: int64 ids. mask: bool, True if the token was sampled, and is therefore trained. logprobs: float32, log-prob
    of the token under the sampling policy, in nats; 0 at other tokens. turns: int64, number of the turn, from 0.
    rewards: float32, the reward of each turn at its last sampled token. group_ids: (B,) int64, equal for the rollouts
    of one level. scores: (B,) float32, score of each episode. lengths: (B,) int64, tokens without padding. tree_ids:
    (B,) int64, equal for an episode and its children. is_root: (B,) bool, False for a child. engine_logprobs: like
    `logprobs`, the log-probs that the engine reported if it has its own copy of the weights, otherwise `logprobs`
    again.
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
        """The episodes at `index` (N,), cut to the length of the longest of them."""
        longest = int(self.lengths[index].max())
        return Batch(*(tensor[index][:, :longest] if tensor.dim() == 2 else tensor[index] for tensor in self))

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return Batch(*(tensor.to(device) for tensor in self))

    def find_prediction_positions(self) -> Tensor:
        """Flat positions (N,) in B * T from which trained tokens are predicted: the token before each of them.

        Every episode begins with its prompt, so position 0 of a row is never trained.
        """
        return self.mask.flatten().nonzero().squeeze(-1) - 1

    def count_needed_tokens(self) -> Tensor:
        """Number (B,) of tokens that a pass has to read: those before the last trained token, 0 if none is trained."""
        # The position of the last trained token is the number of tokens before it.
        return (torch.arange(self.mask.shape[1], device=self.mask.device) * self.mask).amax(1)


def collate(episodes: Sequence[Episode]) -> Batch:
    """Pad episodes to one length and stack them into a batch on the CPU, in the given order.

    The children of an episode come after it.
    """
    num_rollouts = torch.tensor([len(episode.rollouts) for episode in episodes])
    tree_ids = torch.arange(len(episodes)).repeat_interleave(num_rollouts)
    episodes = list_rollouts(episodes)
    longest = max(len(episode.tokens) for episode in episodes)

    def pad(arrays: Sequence[np.ndarray]) -> Tensor:
        # On the right with 0, which is False in the mask, so nothing is trained on padding.
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
    """Rewards (T,) float32: the reward of each turn at its last sampled token, 0 elsewhere."""
    rewards = np.zeros(len(episode.tokens), dtype=np.float32)
    for turn, reward in enumerate(episode.turn_rewards):
        rewards[np.flatnonzero(episode.mask & (episode.turns == turn))[-1]] = reward
    return rewards


def place_episode_scores(batch: Batch) -> Tensor:
    """Rewards (B, T): the score of each episode at its last sampled token, 0 elsewhere; placed as published."""
    positions = torch.arange(batch.mask.shape[1], device=batch.mask.device).expand_as(batch.mask)
    last_positions = torch.where(batch.mask, positions, -1).max(dim=1).values
    return torch.where(positions == last_positions[:, None], batch.scores[:, None], 0.0)


def make_update_order(batch: Batch, needs_whole_groups: bool) -> Tensor:
    """Order (B,) in which episodes are split into mini-batches: by length, with groups kept together if needed."""
    if needs_whole_groups:
        return order_by_group(batch.lengths, batch.group_ids)
    return order_length_stratified(batch.lengths)

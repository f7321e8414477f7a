"""Episodes: records of rollouts, their transcripts while they are played, and batches of padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainable.algo.batching import order_by_group, order_length_stratified
from trainable.rollout.sampler import SampledReply


class StopReason(StrEnum):
    """How an episode ended."""

    SUCCESS = "success"  # the level ended with success
    FAILURE = "failure"  # the level ended without success, such as in a hole
    OUT_OF_ACTIONS = "out of actions"  # the level did not end within the maximum number of actions
    OUT_OF_TURNS = "out of turns"  # the level did not end within the maximum number of turns
    MALFORMED = "malformed"  # no reply of any turn contained a valid action
    OUT_OF_CONTEXT = "out of context"  # another turn, with a reply of full length, might exceed the context


class Episode(NamedTuple):
    """One rollout of one level. T is the number of tokens in the conversation.

    level_seed: seed of the level. group: index of the level among the levels that were rolled out together.
    tokens: (T,) int64, in the order in which the model saw or sampled them.
    mask: (T,) bool, True for sampled tokens.
    logprobs, entropies: (T,) float32, of the sampling distribution at each sampled token, in nats; 0 elsewhere.
    turns: (T,) int64, number of the turn, from 0.
    turn_rewards: sum of rewards and format penalty of each turn. turn_actions: names of the executed actions of each
    turn. turn_validity: whether the answer of each turn was valid; empty answers are invalid. stop_reason: how the
    episode ended. texts: the reply of each turn.
    children: in a game of trees, the episodes of the rollouts that this one asked. parent_turn: of a child, the turn in
    which its root asked it. answer: in a game of trees, the final answer, if any. evidence: the passages that a perfect
    answer of the root quotes.
    engine_logprobs: (T,), the log-probs reported by the engine if the trainer has recomputed `logprobs`, otherwise
    None. is_truncated: whether a reply was cut at its maximum length, or the context had no room for another turn.
    masked_turns: turns that the losses leave out, although the episode counts in the advantages.
    prefix_turns: number of turns that were copied from the episode from which this one branched. prefix_tree: with
    `rollout.ts_n`, the number of its prefix tree among those of its group.
    """

    level_seed: int
    group: int
    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    turns: npt.NDArray[np.int64]
    turn_rewards: tuple[float, ...]
    turn_actions: tuple[tuple[str, ...], ...]
    turn_validity: tuple[bool, ...]
    stop_reason: StopReason
    texts: tuple[str, ...]
    engine_logprobs: npt.NDArray[np.float32] | None = None
    children: tuple["Episode", ...] = ()
    parent_turn: int = -1
    answer: str | None = None
    evidence: tuple[str, ...] = ()
    is_truncated: bool = False
    masked_turns: tuple[int, ...] = ()
    prefix_turns: int = 0
    prefix_tree: int = 0

    @property
    def rollouts(self) -> tuple["Episode", ...]:
        """The episode and its children."""
        return (self, *self.children)

    @property
    def score(self) -> float:
        """Sum of all turn rewards, including penalties."""
        return float(sum(self.turn_rewards))

    @property
    def actions(self) -> int:
        """Number of executed actions."""
        return sum(map(len, self.turn_actions))

    @property
    def invalid_turns(self) -> int:
        """Number of turns with an invalid or empty answer."""
        return self.turn_validity.count(False)

    @property
    def is_masked(self) -> bool:
        """Whether the losses leave out all of the episode."""
        return len(self.masked_turns) == len(self.turn_validity)

    @property
    def success(self) -> bool:
        """Whether the level ended with success."""
        return self.stop_reason is StopReason.SUCCESS

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())

    @property
    def suffix_mask(self) -> npt.NDArray[np.bool_]:
        """(T,) bool, True for tokens that were sampled for this episode, not copied from another one."""
        return self.mask & (self.turns >= self.prefix_turns)


def list_rollouts(episodes: Sequence[Episode]) -> list[Episode]:
    """Flatten trees: list each episode followed by its children, all as rollouts without children.

    Batches and others that take episodes have one row per rollout, in this order.
    """
    return [
        rollout
        for episode in episodes
        for rollout in ((episode._replace(children=()), *episode.children) if episode.children else (episode,))
    ]


def replace_rollouts(episodes: Sequence[Episode], rollouts: Sequence[Episode]) -> list[Episode]:
    """Rebuild the trees of `episodes` from `rollouts`, which replace them in the order of `list_rollouts`."""
    replacements = iter(rollouts)
    return [
        next(replacements)._replace(children=tuple(next(replacements) for _ in episode.children))
        for episode in episodes
    ]


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

    def has_cut_reply(self, max_reply_tokens: int) -> bool:
        """Check whether a reply was cut at its maximum length."""
        replies = [reply for reply in self.replies if reply is not None]
        # Another token than the end marker may have ended an unfinished reply.
        return any(not reply.finished and len(reply.token_ids) >= max_reply_tokens for reply in replies)

    def copy_prefix(self, turn: int) -> "Transcript":
        """Copy everything before the reply of a turn, in a game with one prompt per turn."""
        count = 2 * turn + 1
        tokens = self.tokens[:count]
        return Transcript(tokens, self.replies[:count], self.turns[:count], self.texts[:turn], sum(map(len, tokens)))

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


class Batch(NamedTuple):
    """B episodes, padded on the right to T tokens. Position t of every (B, T) tensor belongs to token t.

    tokens: int64 ids. mask: bool, True for sampled tokens, which are trained. logprobs: float32, log-prob of each
    sampled token under the sampling policy, in nats; 0 elsewhere. turns: int64, number of the turn, from 0. rewards:
    float32, the reward of each turn at its last sampled token. group_ids: (B,) int64, equal for the rollouts of one
    level. scores: (B,) float32, score of each episode. lengths: (B,) int64, tokens without padding. tree_ids: (B,)
    int64, equal for an episode and its children. is_root: (B,) bool, False for children. engine_logprobs: like
    `logprobs`, as reported by the engine if it has its own copy of the weights, otherwise equal to `logprobs`.
    entropies: float32, entropy of the sampling distribution at each sampled token, in nats; 0 elsewhere.
    is_masked: bool, True for tokens of `Episode.masked_turns`. prefix_trees: (B,) int64, see `Episode`.
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
    entropies: Tensor
    is_masked: Tensor
    prefix_trees: Tensor

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
        entropies=pad([episode.entropies for episode in episodes]),
        is_masked=pad([np.isin(episode.turns, episode.masked_turns) for episode in episodes]),
        prefix_trees=torch.tensor([episode.prefix_tree for episode in episodes]),
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


def reshape_by_group(values: Sequence[float], group_size: int) -> Tensor:
    """Arrange values of consecutive episodes in a (P, G) float32 tensor."""
    return torch.tensor(values, dtype=torch.float32).view(-1, group_size)

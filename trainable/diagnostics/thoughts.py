"""Episodes as pairs of what was read and what was thought: prompts, thoughts, and the two ways to sample them.

A turn's prompt is all of the conversation up to and including the forced `<think>`; its thought is what was sampled
before `</think>`. Both are the tokens of the episode itself, not encoded again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.models.codec import Codec
from trainable.rollout.episode import Episode

END_OF_THOUGHT = "</think>"
Tokens = npt.NDArray[np.int64]


class Turn(NamedTuple):
    """A turn's prompt (T,) and thought (N,); an invalid turn has a thought of no tokens."""

    prompt: Tokens
    thought: Tokens

    @property
    def valid(self) -> bool:
        """Whether there is a thought."""
        return len(self.thought) > 0


class Pairs(NamedTuple):
    """N thoughts (rows) to be scored after M prompts (columns).

    own: (N,) column of the prompt that each thought followed. classes: (M,) columns with the same tokens share one.
    """

    prompts: tuple[Tokens, ...]
    thoughts: tuple[Tokens, ...]
    own: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]


def read_turns(episodes: Sequence[Episode], codec: Codec) -> list[list[Turn]]:
    """The turns of each episode, in their order.

    The thought is made of the sampled tokens that lie wholly before the first `</think>`, less blank ones at both ends;
    a token that holds the end of a thought and the start of the tag (such as `.</`) is left out.

    Source: published code (RAGEN), which encodes the stripped text of the thought again.
    Degenerate: a thought that is empty, blank or not closed has no tokens.
    """
    pieces = _pieces(episodes, codec)
    return [[_turn(episode, turn, pieces) for turn in range(len(episode.texts))] for episode in episodes]


def _pieces(episodes: Sequence[Episode], codec: Codec) -> dict[int, str]:
    """Text of each token that was sampled."""
    ids = np.unique(np.concatenate([episode.tokens[episode.mask] for episode in episodes]))
    return dict(zip(ids.tolist(), codec.decode([[token] for token in ids.tolist()]), strict=True))


def _turn(episode: Episode, turn: int, pieces: dict[int, str]) -> Turn:
    where = np.flatnonzero(episode.mask & (episode.turns == turn))
    reply = episode.tokens[where]
    return Turn(episode.tokens[: where[0]], _thought(reply, [pieces[token] for token in reply.tolist()]))


def _thought(reply: Tokens, pieces: Sequence[str]) -> Tokens:
    """The tokens of the thought in a reply (N,) whose tokens read `pieces`."""
    end = "".join(pieces).find(END_OF_THOUGHT)
    inside = np.cumsum([len(piece) for piece in pieces]) <= end
    told = np.flatnonzero(inside & [bool(piece.strip()) for piece in pieces])
    return reply[told[0] : told[-1] + 1] if len(told) else reply[:0]


def thought_coverage(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """How many turns can be diagnosed, under the published names.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no episode gives zeros.
    """
    valid = sum(turn.valid for episode in turns for turn in episode)
    first = sum(episode[0].valid for episode in turns)
    return {
        "collapse/valid_thinking_rate": valid / max(1, sum(len(episode) for episode in turns)),
        "collapse/first_turn_num_total": len(turns),
        "collapse/first_turn_num_valid": first,
        "collapse/first_turn_valid_rate": first / max(1, len(turns)),
    }


def first_turn_pairs(
    turns: Sequence[Sequence[Turn]], groups: Sequence[int], num_samples: int, rng: np.random.Generator
) -> Pairs:
    """Thoughts of first turns against the opening of every group that is present among them.

    Up to `num_samples` of the episodes whose first turn is valid, without replacement; a column a group, in the order
    of the groups' numbers.

    Args:
        turns: by episode, then by turn.
        groups: group of each episode; the episodes of a group have one opening.
        num_samples: rows at most.
        rng: what draws; nothing is drawn where every valid episode fits.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid first turn gives no rows and no columns.
    """
    valid = np.array([number for number, episode in enumerate(turns) if episode[0].valid], dtype=np.int64)
    chosen = rng.choice(valid, num_samples, replace=False) if num_samples < len(valid) else valid
    _, first, own = np.unique(np.asarray(groups)[chosen], return_index=True, return_inverse=True)
    prompts = [turns[number][0].prompt for number in chosen[first]]
    return _pairs(prompts, [turns[number][0].thought for number in chosen], own)


def trajectory_pairs(turns: Sequence[Sequence[Turn]], num_samples: int, rng: np.random.Generator) -> Pairs:
    """Thoughts of all turns, every one against the prompt of every other: a row and a column a draw.

    min(num_samples, valid turns) draws, each of an episode and then of one of its valid turns, uniformly and with
    replacement; a draw of an episode without a valid turn is lost.

    Args:
        turns: by episode, then by turn.
        num_samples: draws at most.
        rng: what draws.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid turn gives no rows and no columns.
    """
    valid = [[turn for turn in episode if turn.valid] for episode in turns]
    draws = min(num_samples, sum(len(episode) for episode in valid))
    chosen = []
    for _ in range(draws):
        episode = valid[rng.integers(len(valid))]
        if episode:
            chosen.append(episode[rng.integers(len(episode))])
    return _pairs([turn.prompt for turn in chosen], [turn.thought for turn in chosen], np.arange(len(chosen)))


def _pairs(prompts: Sequence[Tokens], thoughts: Sequence[Tokens], own: npt.NDArray[np.int64]) -> Pairs:
    numbers: dict[bytes, int] = {}
    classes = [numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts]
    return Pairs(tuple(prompts), tuple(thoughts), own, np.array(classes, dtype=np.int64))

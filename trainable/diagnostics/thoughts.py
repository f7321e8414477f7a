"""Prompts and thoughts of episodes, and two ways to sample pairs of them.

A turn's prompt is the complete conversation up to and including the forced `<think>`, and its thought the text that was
sampled before `</think>`. Both are tokens of the episode; no text is tokenized again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.models.codec import Codec
from trainable.ppo.evaluation import number_classes
from trainable.rollout.episode import Episode

END_OF_THOUGHT = "</think>"
Tokens = npt.NDArray[np.int64]


class Turn(NamedTuple):
    """A turn's prompt (T,) and thought (N,), which is empty for an invalid turn."""

    prompt: Tokens
    thought: Tokens

    @property
    def is_valid(self) -> bool:
        """Whether there is a thought."""
        return len(self.thought) > 0


class ThoughtPairs(NamedTuple):
    """N thoughts (rows) to be scored after M prompts (columns).

    own_columns: (N,) column of each thought's own prompt. classes: (M,) equal for columns with equal tokens.
    """

    prompts: tuple[Tokens, ...]
    thoughts: tuple[Tokens, ...]
    own_columns: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]


def read_turns(episodes: Sequence[Episode], codec: Codec) -> list[list[Turn]]:
    """Split each episode into its turns.

    A thought consists of the sampled tokens that end before the first `</think>`, without blank tokens at both ends. A
    token that spans the end of the thought and the start of the tag (such as `.</`) is left out.

    Source: published code (RAGEN), which tokenizes the stripped text of the thought again.
    Degenerate: a thought that is empty, blank or not closed has no tokens.
    """
    # Each sampled token is decoded once, since most occur many times.
    ids = np.unique(np.concatenate([episode.tokens[episode.mask] for episode in episodes]))
    pieces = dict(zip(ids.tolist(), codec.decode([[token] for token in ids.tolist()]), strict=True))
    return [[_make_turn(episode, turn, pieces) for turn in range(len(episode.texts))] for episode in episodes]


def _make_turn(episode: Episode, turn: int, pieces: dict[int, str]) -> Turn:
    reply_positions = np.flatnonzero(episode.mask & (episode.turns == turn))
    reply = episode.tokens[reply_positions]
    texts = [pieces[token] for token in reply.tolist()]
    thought_end = "".join(texts).find(END_OF_THOUGHT)
    # `find` gives -1 for an unclosed thought. No token ends at or before -1, so the thought has no tokens.
    is_inside = np.cumsum([len(text) for text in texts]) <= thought_end
    thought_positions = np.flatnonzero(is_inside & [bool(text.strip()) for text in texts])
    thought = reply[thought_positions[0] : thought_positions[-1] + 1] if len(thought_positions) else reply[:0]
    return Turn(episode.tokens[: reply_positions[0]], thought)


def compute_thought_coverage(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Count the turns that can be diagnosed, under the published names with `_` for `/`.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no episode gives zeros.
    """
    num_valid = sum(turn.is_valid for episode in turns for turn in episode)
    num_first_valid = sum(episode[0].is_valid for episode in turns)
    return {
        "collapse_valid_thinking_rate": num_valid / max(1, sum(len(episode) for episode in turns)),
        "collapse_first_turn_num_total": len(turns),
        "collapse_first_turn_num_valid": num_first_valid,
        "collapse_first_turn_valid_rate": num_first_valid / max(1, len(turns)),
    }


def sample_first_turn_pairs(
    turns: Sequence[Sequence[Turn]], groups: Sequence[int], num_samples: int, rng: np.random.Generator
) -> ThoughtPairs:
    """Sample thoughts of first turns, with the openings of their groups as prompts.

    The rows are up to `num_samples` of the episodes with a valid first turn, drawn without replacement. There is one
    column per group among them, ordered by group.

    turns: by episode. groups: of each episode; the episodes of a group have the same opening. rng: not used if at most
    `num_samples` episodes are valid.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid first turn gives no rows and no columns.
    """
    valid_episodes = np.array([number for number, episode in enumerate(turns) if episode[0].is_valid], dtype=np.int64)
    chosen_episodes = (
        rng.choice(valid_episodes, num_samples, replace=False) if num_samples < len(valid_episodes) else valid_episodes
    )
    # first_rows: the first row of each group, which has the group's opening.
    _, first_rows, own_columns = np.unique(np.asarray(groups)[chosen_episodes], return_index=True, return_inverse=True)
    prompts = [turns[number][0].prompt for number in chosen_episodes[first_rows]]
    return _make_pairs(prompts, [turns[number][0].thought for number in chosen_episodes], own_columns)


def sample_trajectory_pairs(
    turns: Sequence[Sequence[Turn]], num_samples: int, rng: np.random.Generator
) -> ThoughtPairs:
    """Sample thoughts of all turns with their prompts: one row and one column per draw.

    There are min(num_samples, number of valid turns) draws. Each draws an episode and then one of its valid turns, both
    uniformly and with replacement. An episode without a valid turn gives no row. turns: by episode.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid turn gives no rows and no columns.
    """
    valid_turns = [[turn for turn in episode if turn.is_valid] for episode in turns]
    num_draws = min(num_samples, sum(len(episode) for episode in valid_turns))
    chosen_turns = []
    # As published, the episode is drawn first, so turns of short episodes are more likely.
    for _ in range(num_draws):
        episode = valid_turns[rng.integers(len(valid_turns))]
        if episode:
            chosen_turns.append(episode[rng.integers(len(episode))])
    return _make_pairs(
        [turn.prompt for turn in chosen_turns], [turn.thought for turn in chosen_turns], np.arange(len(chosen_turns))
    )


def _make_pairs(
    prompts: Sequence[Tokens], thoughts: Sequence[Tokens], own_columns: npt.NDArray[np.int64]
) -> ThoughtPairs:
    # Prompts can be equal, because levels repeat and turns are drawn with replacement. Retrieving an equal prompt
    # counts as correct.
    classes = number_classes([prompt.tobytes() for prompt in prompts])
    return ThoughtPairs(tuple(prompts), tuple(thoughts), own_columns, np.array(classes, dtype=np.int64))

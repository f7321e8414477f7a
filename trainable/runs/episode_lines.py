"""Recorded episodes: the texts of some episodes of a run, with one line of EPISODES_FILE each."""

import math
from typing import NamedTuple

MAX_ANSWER_CHARS = 2_000
"""Maximum characters that are recorded of an answer, and of all evidence, since code can return a whole paper."""


class RecordedTurn(NamedTuple):
    """One turn of a recorded episode.

    observation: the text that was new to the policy in this turn, starting with the system message in the first turn.
    reply: the sampled text, without an end marker if it was cut at its maximum length. Both texts include all special
    tokens. actions: names of the executed actions. reward: sum of rewards and format penalty. valid: whether the answer
    was valid. weight: in a game of trees, weight of the turn in the loss of its tree, whether trained or not; None in
    other games. advantage: mean advantage of the sampled tokens if the episode was trained on, otherwise None.
    """

    observation: str
    reply: str
    actions: tuple[str, ...]
    reward: float
    valid: bool
    weight: float | None = None
    advantage: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Convert the turn to a JSON object, without fields that are None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class RecordedChild(NamedTuple):
    """A rollout that the code of a root asked a question.

    parent_turn: the turn of the root that asked, from 0. stop_reason: how it ended. answer: its final answer, if any,
    cut to `MAX_ANSWER_CHARS`.
    """

    parent_turn: int
    turns: tuple[RecordedTurn, ...]
    stop_reason: str
    answer: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Convert the child to a JSON object, without fields that are None."""
        fields = {**self._asdict(), "turns": [turn.to_dict() for turn in self.turns]}
        return {name: value for name, value in fields.items() if value is not None}


class RecordedEpisode(NamedTuple):
    """A sampled episode of a validation or of training. Escape its texts, which may contain any characters.

    step: training steps before the validation (0 before training), or the step that trained on the episode. level: seed
    of the level. success: whether it ended with success. stop_reason: how the episode ended, a value of
    `trainable.rollout.episode.StopReason`. score: sum of the rewards of all turns. children: the rollouts that it
    asked, in order. rollout: number of a trained episode among the episodes of its level, from 0; None for a
    validation. answer, evidence: in a game of trees, the final answer, and the passages that a perfect answer quotes,
    cut to `MAX_ANSWER_CHARS` each; None in other games, and `answer` also if there is none.
    """

    step: int
    level: int
    turns: tuple[RecordedTurn, ...]
    success: bool
    stop_reason: str
    score: float
    children: tuple[RecordedChild, ...] = ()
    rollout: int | None = None
    answer: str | None = None
    evidence: str | None = None

    @property
    def is_trained(self) -> bool:
        """Whether a step trained on the episode. False for episodes of a validation."""
        return self.rollout is not None

    @property
    def advantage(self) -> float:
        """Mean advantage of the turns, without children. NaN if no turn has an advantage."""
        advantages = [turn.advantage for turn in self.turns if turn.advantage is not None]
        return sum(advantages) / len(advantages) if advantages else math.nan

    def to_line(self) -> dict[str, object]:
        """Make the record for episodes.jsonl."""
        turns = [turn.to_dict() for turn in self.turns]
        line = {**self._asdict(), "turns": turns, "children": [child.to_dict() for child in self.children] or None}
        return {name: value for name, value in line.items() if value is not None}

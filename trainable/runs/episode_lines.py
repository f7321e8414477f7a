"""Episodes as a run records them: the texts of a few, one line of EPISODES_FILE per episode."""

import math
from typing import NamedTuple

MAX_ANSWER_CHARS = 2_000
"""A record has no more characters of an answer, and no more of all evidence: code can return a whole paper."""


class RecordedTurn(NamedTuple):
    """One turn of a recorded episode.

    observation: the text that was new to the policy in this turn; in the first turn it begins with the system message.
    reply: the sampled text; it has no end marker if it was cut at its maximum length. Both texts have all special
    tokens. actions: names of the executed actions. reward: sum of rewards and format penalty. valid: whether the answer
    was valid. weight: in a game of trees, of the turn in the loss of its tree, were that trained; None in others.
    advantage: mean advantage of the sampled tokens, in an episode that was trained on; None in others.
    """

    observation: str
    reply: str
    actions: tuple[str, ...]
    reward: float
    valid: bool
    weight: float | None = None
    advantage: float | None = None

    def to_dict(self) -> dict[str, object]:
        """The turn as JSON, without the fields that are None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class RecordedChild(NamedTuple):
    """A rollout that the code of a root asked.

    parent_turn: the turn of its root, from 0. stop_reason: how it ended. answer: its final answer, at most
    `MAX_ANSWER_CHARS` of it; None without one.
    """

    parent_turn: int
    turns: tuple[RecordedTurn, ...]
    stop_reason: str
    answer: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The child as JSON, without the fields that are None."""
        fields = {**self._asdict(), "turns": [turn.to_dict() for turn in self.turns]}
        return {name: value for name, value in fields.items() if value is not None}


class RecordedEpisode(NamedTuple):
    """One sampled episode, of a validation or of training. Its texts may have any characters: escape them.

    step: training steps before the validation, 0 before training; of an episode that was trained on, the step. level:
    seed of the level. success: whether it ended with success. stop_reason: how the episode ended, a value of
    `trainable.rollout.episode.StopReason`. score: sum of the rewards of all turns. children: the rollouts that it
    asked, in order. rollout: of an episode that was trained on, its number among those of its level, from 0; None for
    an episode of a validation. answer, evidence: in a game of trees, the final answer, and the passages that a perfect
    one quotes, at most `MAX_ANSWER_CHARS` of each; None in other games, and `answer` also without an answer.
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
        """Whether a step trained on the episode; False for an episode of a validation."""
        return self.rollout is not None

    @property
    def advantage(self) -> float:
        """Mean advantage of the turns, without those of children; NaN if no turn has one."""
        advantages = [turn.advantage for turn in self.turns if turn.advantage is not None]
        return sum(advantages) / len(advantages) if advantages else math.nan

    def to_line(self) -> dict[str, object]:
        """The record for episodes.jsonl."""
        turns = [turn.to_dict() for turn in self.turns]
        line = {**self._asdict(), "turns": turns, "children": [child.to_dict() for child in self.children] or None}
        return {name: value for name, value in line.items() if value is not None}

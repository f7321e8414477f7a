"""Episodes as a run records them: the texts of a few validation episodes, one line of EPISODES_FILE per episode."""

from collections.abc import Sequence
from typing import NamedTuple


class RecordedTurn(NamedTuple):
    """One turn of a recorded episode.

    observation: the text that was new to the policy in this turn; in the first turn it begins with the system message.
    reply: the sampled text; it has no end marker if it was cut at its maximum length. Both texts have all special
    tokens. actions: names of the executed actions. reward: sum of rewards and format penalty. valid: whether the answer
    was valid. weight: in a game of trees, of the turn in the loss of its tree, were that trained; None in others.
    """

    observation: str
    reply: str
    actions: tuple[str, ...]
    reward: float
    valid: bool
    weight: float | None = None

    def to_dict(self) -> dict[str, object]:
        """The turn as JSON; without a weight it has none."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class RecordedChild(NamedTuple):
    """A rollout that the code of a root asked. parent_turn: the turn of its root, from 0. stop_reason: how it ended."""

    parent_turn: int
    turns: tuple[RecordedTurn, ...]
    stop_reason: str


class RecordedEpisode(NamedTuple):
    """One sampled validation episode. Its texts may have any characters: escape them before they are printed.

    step: training steps before the validation; 0 before training. level: seed of the level. success: whether it ended
    with success. stop_reason: how the episode ended, a value of `trainable.rollout.episode.StopReason`. score: sum of
    the rewards of all turns. children: the rollouts that it asked, in order.
    """

    step: int
    level: int
    turns: tuple[RecordedTurn, ...]
    success: bool
    stop_reason: str
    score: float
    children: tuple[RecordedChild, ...] = ()

    def to_line(self) -> dict[str, object]:
        """The record for episodes.jsonl."""
        children = [{**child._asdict(), "turns": _list_turns(child.turns)} for child in self.children]
        line = {**self._asdict(), "turns": _list_turns(self.turns), "children": children}
        return {name: value for name, value in line.items() if name != "children" or children}


def _list_turns(turns: Sequence[RecordedTurn]) -> list[dict[str, object]]:
    return [turn.to_dict() for turn in turns]

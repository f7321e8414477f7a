"""Episodes as a run records them: the texts of a few validation episodes, one line of EPISODES_FILE per episode."""

from typing import NamedTuple


class RecordedTurn(NamedTuple):
    """One turn of a recorded episode.

    observation: the text that was new to the policy in this turn; in the first turn it begins with the system message.
    reply: the sampled text; it has no end marker if it was cut at its maximum length. Both texts have all special
    tokens. actions: names of the executed actions. reward: sum of rewards and format penalty. valid: whether the answer
    was valid.
    """

    observation: str
    reply: str
    actions: tuple[str, ...]
    reward: float
    valid: bool


class RecordedEpisode(NamedTuple):
    """One sampled validation episode. Its texts may have any characters: escape them before they are printed.

    step: training steps before the validation; 0 before training. level: seed of the level. success: whether it ended
    with success. stop_reason: how the episode ended, a value of `trainable.rollout.episode.StopReason`. score: sum of
    the rewards of all turns.
    """

    step: int
    level: int
    turns: tuple[RecordedTurn, ...]
    success: bool
    stop_reason: str
    score: float

    def to_line(self) -> dict[str, object]:
        """The record for episodes.jsonl."""
        return {**self._asdict(), "turns": [turn._asdict() for turn in self.turns]}

"""Playing a fixed set of rooms with the current policy: validation and test."""

from collections.abc import Sequence
from typing import NamedTuple

from trainable.rollout.episode import Episode


class Evaluation(NamedTuple):
    """One pass over a set of rooms, and what rooms.jsonl keeps of it.

    split: val or test. mode: sampled or greedy. rooms: seed of each episode's room. clusters: number of the room's
    symmetry class, for intervals over rooms.
    """

    step: int
    split: str
    mode: str
    rooms: tuple[int, ...]
    clusters: tuple[int, ...]
    solved: tuple[bool, ...]
    score: float
    invalid_turns: float

    @property
    def success(self) -> float:
        """Share of episodes solved."""
        return sum(self.solved) / len(self.solved)

    def success_where(self, wanted: Sequence[bool]) -> float | None:
        """Share solved among the episodes marked in `wanted`; None where none is."""
        chosen = [solved for solved, keep in zip(self.solved, wanted, strict=True) if keep]
        return sum(chosen) / len(chosen) if chosen else None

    def line(self) -> dict[str, object]:
        """The record for rooms.jsonl."""
        return {
            "step": self.step,
            "split": self.split,
            "mode": self.mode,
            "rooms": self.rooms,
            "clusters": self.clusters,
            "success": "".join("1" if solved else "0" for solved in self.solved),
        }


def summarise(episodes: Sequence[Episode], step: int, split: str, mode: str, clusters: Sequence[int]) -> Evaluation:
    """The evaluation that `episodes` are; clusters has the class of each group's room."""
    turns = sum(len(episode.texts) for episode in episodes)
    return Evaluation(
        step=step,
        split=split,
        mode=mode,
        rooms=tuple(episode.room_seed for episode in episodes),
        clusters=tuple(clusters[episode.group] for episode in episodes),
        solved=tuple(episode.solved for episode in episodes),
        score=sum(episode.score for episode in episodes) / len(episodes),
        invalid_turns=sum(episode.invalid_turns for episode in episodes) / turns,
    )


def number_classes(keys: Sequence[bytes]) -> list[int]:
    """Number symmetry classes in order of first appearance."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]

"""One published number, with what it takes to hold runs of ours against it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_STD = 0.01
"""The spread that stands for a spread of 0, in shares, rewards and nats."""

PER_SEED, POOLED, NEVER_REACHED = "per seed", "pooled", "never"
"""What a cell is: mean and spread over seeds; over logged rows of all seeds; or "no seed ever reached it"."""

NOT_DISTINGUISHABLE, DIFFERS, NO_EXPECTATION = "agrees", "differs", "open"
"""What was expected of a cell before any run of ours."""


@dataclass(frozen=True)
class Conditions:
    """What the published runs of an arm were made with: settings by their dotted names, the defaults among them."""

    settings: Mapping[str, object]

    @property
    def eval_interval(self) -> int:
        """Steps between two evaluations."""
        return int(str(self.settings["trainer.test_freq"]))


@dataclass(frozen=True)
class Cell:
    """One unique cell of the published tables.

    studies: those of ours that run it, the first being the one that is tested; a cell that is printed in two tables is
    one cell. column: of `trials`; of `steps` where it is pooled. spread: the standard deviation (ddof 1). n: seeds, or
    rows where it is pooled. section: the table in the source. expected, why: stated before any run of ours.
    """

    studies: tuple[str, ...]
    arm: str
    column: str
    mean: float
    std: float
    n: int
    section: str
    kind: str = PER_SEED
    expected_verdict: str = NOT_DISTINGUISHABLE
    rationale: str = ""
    conditions: Conditions = field(default_factory=lambda: Conditions({}))

    @property
    def min_std(self) -> float:
        """What stands for a spread of 0: `FLOOR`; for a step, that of one which an evaluation every d steps rounds.

        A step within d is uniform, so that its standard deviation is d / sqrt(12).
        """
        return self.conditions.eval_interval / math.sqrt(12) if self.column.startswith("first_step") else MIN_STD

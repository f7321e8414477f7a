"""A published number, with everything needed to compare our runs with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_STD = 0.01
"""Replaces a standard deviation of 0 in a test, in the unit of the column (fraction, reward or nats).

Three equal numbers do not show that there is no variation, and Welch's test needs some. Chosen before the first run.
"""

MARGIN = 0.05
"""Difference within which our mean and a published one are equal, in the unit of the column."""

PER_SEED, POOLED, NEVER_REACHED, MEAN_ALONE = "per seed", "pooled", "never", "mean alone"
"""Kinds of cells: mean and std over seeds; mean and std over the logged rows of all seeds; "never reached" as text; a
mean over seeds without a std."""

EQUAL, DIFFERS, OPEN = "equal", "differs", "open"
"""Verdicts on a cell: shown to be equal within the margin, resolved to differ, or neither."""
NOT_DISTINGUISHABLE, NO_EXPECTATION = "not distinguishable", "open"
"""What was expected of a cell before any of our runs, if not `DIFFERS`: that no difference would be resolved (a verdict
of `EQUAL` or `OPEN`), or nothing."""


@dataclass(frozen=True)
class Conditions:
    """Settings of the published runs of an arm, by dotted name, defaults included."""

    settings: Mapping[str, object]

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations."""
        return int(str(self.settings["trainer.test_freq"]))


@dataclass(frozen=True)
class Cell:
    """One unique cell of the published tables.

    A number that is printed in two tables is one cell.

    Attributes:
        studies: our studies that run the cell. The test uses the first one that is present.
        column: a column of `trials`, or of `steps` if the cell is pooled.
        mean: published mean; NaN for NEVER_REACHED.
        std: published standard deviation (ddof 1); NaN for NEVER_REACHED and MEAN_ALONE.
        n: number of seeds, or of rows if the cell is pooled.
        section: the table in the source.
        kind: PER_SEED, POOLED, NEVER_REACHED or MEAN_ALONE.
        expected_verdict, rationale: stated before any of our runs.
        conditions: the settings of the published runs. A cell is tested only if our runs have the same.
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
        """Standard deviation that replaces 0: `MIN_STD`, or for a step the rounding error of the evaluation interval.

        With an evaluation every d steps, the true step is uniform within d, with standard deviation d / sqrt(12).
        """
        return self.conditions.eval_interval / math.sqrt(12) if self.column.startswith("first_step") else MIN_STD

    @property
    def margin(self) -> float:
        """Difference within which the means are equal: `MARGIN`, or one evaluation interval for a step."""
        return self.conditions.eval_interval if self.column.startswith("first_step") else MARGIN

"""A published number, with everything needed to compare our runs with it."""

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_STD = 0.01
"""Replaces a standard deviation of 0 in a test, in the unit of the column (fraction, reward or nats).

Three equal numbers do not prove that there is no variation, and Welch's test needs some. Chosen before the first run.
"""
MARGIN = 0.05
"""Difference within which our mean counts as equal to the published one, in the unit of the column."""

PER_SEED, POOLED, NEVER_REACHED, MEAN_ALONE = "per seed", "pooled", "never", "mean alone"
"""Kinds of cells: mean and std over seeds; mean and std over the logged rows of all seeds; "never reached" as text;
mean over seeds without a std."""

EQUAL, DIFFERS, OPEN = "equal", "differs", "open"
"""Verdicts on a cell: equal within the margin, significantly different, or neither."""
NOT_DISTINGUISHABLE, NO_EXPECTATION = "not distinguishable", "open"
"""Expectations stated before any of our runs, besides `DIFFERS`: that no difference would be significant (a verdict of
`EQUAL` or `OPEN`), or none."""


@dataclass(frozen=True)
class Cell:
    """One cell of the published tables. A number that is printed in two tables is a single cell."""

    studies: tuple[str, ...]
    """Our studies that run the cell. The test uses the first one that is present."""
    arm: str
    column: str
    """A column of `trials`, or of `steps` if the cell is pooled."""
    mean: float
    """Published mean; NaN for NEVER_REACHED."""
    std: float
    """Published standard deviation (ddof 1); NaN for NEVER_REACHED and MEAN_ALONE."""
    n: int
    """Number of seeds, or of rows if the cell is pooled."""
    section: str
    """The table in the source."""
    kind: str
    """PER_SEED, POOLED, NEVER_REACHED or MEAN_ALONE."""
    expected_verdict: str
    """Stated before any of our runs, as was its rationale."""
    rationale: str
    conditions: Mapping[str, object]
    """All settings of the published runs, by dotted name. A cell is tested only if our runs have the same."""

    @property
    def is_step(self) -> bool:
        """Whether the number is a step that a run reaches, known up to one interval between evaluations."""
        return self.column.startswith("first_step")

    @property
    def min_std(self) -> float:
        """Standard deviation that replaces 0: `MIN_STD`, or for a step the standard deviation within its interval."""
        return self.margin / math.sqrt(12) if self.is_step else MIN_STD

    @property
    def margin(self) -> float:
        """Difference within which the means count as equal: `MARGIN`, or one evaluation interval for a step."""
        return int(str(self.conditions["trainer.test_freq"])) if self.is_step else MARGIN


def read_cells(file_name: str, make_conditions: Callable[[str, str], Mapping[str, object]]) -> tuple[Cell, ...]:
    """Read the cells of a CSV file in this folder, one per row, whose columns are the fields of `Cell`.

    Studies are separated by spaces, an empty number is NaN, and a rationale is a name in rationales.csv.
    make_conditions: maps a study and an arm to the settings of the published runs.
    """
    rationales = {"": "", **{row["name"]: row["text"] for row in _read_rows("rationales.csv")}}
    cells = []
    for row in _read_rows(file_name):
        studies = tuple(row["studies"].split())
        values: dict[str, Any] = {
            **row,
            **{name: float(row[name] or "nan") for name in ("mean", "std")},
            "studies": studies,
            "n": int(row["n"]),
            "rationale": rationales[row["rationale"]],
        }
        cells.append(Cell(**values, conditions=make_conditions(studies[0], row["arm"])))
    return tuple(cells)


def _read_rows(file_name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / file_name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

"""The published numbers, each cell of the tables once, with everything needed to compare our runs with it.

Each row of the tables has three seeds. The number after "+/-" is the sample standard deviation, although newer
documents of the update-rule sandbox (github.com/deepakvijaykee/rl-experiments, rl_sandbox) call it a standard error:
53.3333 +/- 11.5470 comes from the steps 40, 60 and 60, whose standard error is 6.667. Pooled deviations (of ages and
entropy changes) are over 15 logged rows of each seed, so no test between seeds can use them. Expectations and their
rationales were written down before any of our runs was compared with a cell; for distillation, after single runs of the
exact loss had been seen.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from search_spaces.catalog import STUDIES
from trainable.config.run_config import apply_overrides
from trainable.config.setting_types import flatten_settings

SOURCES = {
    "update_rule_sandbox": "the documents of the update-rule sandbox",
    "distillation_sandbox": "the documents of the on-policy distillation sandbox",
}
"""The places of publication, by the name of their table in this folder."""

MIN_STD = 0.01
"""Replaces a standard deviation of 0 in a test, in the unit of the column (fraction, reward or nats).

Three equal numbers do not prove that there is no variation, and Welch's test needs some. Chosen before the first run.
"""
MARGIN = 0.05
"""Difference within which our mean counts as equal to the published one, in the unit of the column."""

MEASUREMENTS = ("diagnostics", "entropy_diagnostics", "oracle_fit")
"""Settings that only add columns to the rows of a run."""

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
    source: str
    """A key of `SOURCES`."""

    @cached_property
    def conditions(self) -> Mapping[str, object]:
        """The settings of the published runs, by dotted name. A cell is tested only if our runs have the same."""
        return list_conditions(self.studies[0], self.arm)

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


@cache
def list_conditions(study: str, arm: str) -> Mapping[str, object]:
    """List the settings that a run of an arm reads, by dotted name: our arms are declared with the published ones."""
    declared = STUDIES[study]
    settings = {**declared.fixed_settings, **declared.axis.named_settings[arm]}
    config = apply_overrides(declared.family.config_class.model_validate({}), settings)
    ignored = {*config.find_unread_settings(), *MEASUREMENTS}
    return {name: value for name, value in flatten_settings(config.dump_for_hash()).items() if name not in ignored}


def _read_cells(source: str) -> list[Cell]:
    """Read the cells of a CSV file, one per row, whose columns are the fields of `Cell`.

    Studies are separated by spaces, an empty number is NaN, and a rationale is a name in rationales.csv.
    """
    rationales = {"": "", **{row["name"]: row["text"] for row in _read_rows("rationales")}}
    cells = []
    for row in _read_rows(source):
        values: dict[str, Any] = {
            **row,
            **{name: float(row[name] or "nan") for name in ("mean", "std")},
            "studies": tuple(row["studies"].split()),
            "n": int(row["n"]),
            "rationale": rationales[row["rationale"]],
        }
        cells.append(Cell(**values, source=source))
    return cells


def _read_rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


CELLS: tuple[Cell, ...] = tuple(cell for source in SOURCES for cell in _read_cells(source))

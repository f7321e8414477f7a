"""Test that docs/metrics.md has exactly one line for every column, with its unit, meaning and published key."""

import re
from pathlib import Path

from sandboxes.distillation import records as distillation
from sandboxes.pedagogy import records as pedagogy
from sandboxes.update_rules import records as sandbox
from sandboxes.vector_rewards import records as vector_rewards
from trainable.runs.records import (
    GRADIENT_COLUMNS,
    GRADIENT_GROUP_COLUMNS,
    ROW_COLUMNS,
    STEP_COLUMNS,
    STOP_COLUMNS,
    TRIAL_COLUMNS,
    TRIAL_LAST_VALUES,
    Column,
)

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def read_documented_columns() -> list[Column]:
    """Return the columns of every table row with four cells, without the heads."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [Column(row[0].strip("`"), row[1], row[2], row[3].strip("`")) for row in cells if len(row) == 4]


def test_the_page_lists_exactly_the_columns_of_the_records() -> None:
    runs = [*ROW_COLUMNS, *STEP_COLUMNS, *STOP_COLUMNS, *TRIAL_COLUMNS]
    analyses = [*GRADIENT_COLUMNS, *GRADIENT_GROUP_COLUMNS]
    update_rules = [*sandbox.STEP_COLUMNS, *sandbox.TRIAL_COLUMNS]
    students = [*distillation.STEP_COLUMNS, *distillation.TRIAL_COLUMNS]
    sets = [*vector_rewards.STEP_COLUMNS, *vector_rewards.TRIAL_COLUMNS]
    lessons = [*pedagogy.STEP_COLUMNS, *pedagogy.TRIAL_COLUMNS]
    assert read_documented_columns() == [*runs, *analyses, *update_rules, *students, *sets, *lessons]


def test_the_page_names_the_last_values_of_a_run() -> None:
    (line,) = re.findall(r"The run's last value of these step columns: ([^.]*)\.", PAGE)
    assert re.findall(r"`([^`]*)`", line) == list(TRIAL_LAST_VALUES)

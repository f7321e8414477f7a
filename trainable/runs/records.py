"""The columns that a run may write: name, unit and meaning, from which the tables of docs/metrics.md are made.

`columns.csv` lists them by table. A row of `steps` is one training step of one run, counted from 1: what was measured
in the step (step), how much thoughts depend on prompts (quantity, extra_quantity), and the step's cost, validations and
times (step_end). A row of `trials` is one run (trial). A row of `gradients` is one component of the loss in one bucket
of one analysis batch, and a row of `gradient_groups` one group of such a batch. The study adds `row` and `stop`.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainable.config.schedules import SCHEDULABLE_SETTINGS
from trainable.files.paths import read_bytes


class Column(NamedTuple):
    """One column of a table.

    unit: empty for text and for integers such as `seed`. published_key: the key under which the published system logs
    the same number, or empty.
    """

    name: str
    unit: str
    meaning: str
    published_key: str = ""


def read_columns(module: str) -> dict[str, tuple[Column, ...]]:
    """Read `columns.csv` beside the file of a module: the columns of each table, in order."""
    tables: dict[str, tuple[Column, ...]] = {}
    text = read_bytes(Path(module).with_name("columns.csv")).decode()
    for entry in csv.DictReader(text.splitlines()):
        column = Column(entry["name"], entry["unit"], entry["meaning"], entry.get("published_key", ""))
        tables[entry["table"]] = (*tables.get(entry["table"], ()), column)
    return tables


_TABLES = read_columns(__file__)

QUANTITIES = _TABLES["quantity"]
"""Of each of the two samples, under the published names; M is the number of prompts in the sample.

Written in every row with a diagnosis: mutual information and entropies per token and per thought, and retrieval.

Retrieval means finding a thought's own prompt among all prompts. `retrieval_chance_level` is its rate by chance.
"""

EXTRA_QUANTITIES = _TABLES["extra_quantity"]
"""Written only if `collapse_detection.all_quantities` is set: other normalizations, spreads, z-scores, retrieval at k.

Reports and stop rules of this project do not use them. They allow comparisons with logs of the published system.
"""


def _make_collapse_columns(quantities: Iterable[Column]) -> tuple[Column, ...]:
    """Make the columns of these quantities for the sample of first turns, then for the sample of trajectories."""
    # The published system does not log quantities with these two suffixes.
    return tuple(
        Column(
            f"collapse_{sample}_{name.replace('@', '_at_')}",
            unit,
            meaning if sample == "first_turn" else f"as collapse_first_turn_{name.replace('@', '_at_')}",
            "" if name.endswith(("_paper", "_shuffled")) else f"collapse_{sample}_sample/{name}",
        )
        for sample in ("first_turn", "trajectory")
        for name, unit, meaning, _ in quantities
    )


DEFAULT_STEP_COLUMNS: tuple[Column, ...] = (
    *_TABLES["step"],
    *_make_collapse_columns(QUANTITIES),
    *_TABLES["step_end"],
)
EXTRA_COLLAPSE_COLUMNS = _make_collapse_columns(EXTRA_QUANTITIES)
"""Measured only if `collapse_detection.all_quantities` is set."""
SCHEDULE_COLUMNS: Mapping[str, Column] = {
    name: Column(
        f"scheduled_{name.replace('.', '_')}",
        "1",
        "the setting's value in this step; missing if it is a number" if number == 0 else "as scheduled_actor_lr",
    )
    for number, name in enumerate(SCHEDULABLE_SETTINGS)
}
"""For each setting that may have a schedule, the column of its values."""
STEP_COLUMNS: tuple[Column, ...] = (*DEFAULT_STEP_COLUMNS, *EXTRA_COLLAPSE_COLUMNS, *SCHEDULE_COLUMNS.values())

IMPORTED_COLUMNS = _TABLES["imported"]
"""Measured only by other trainers, in runs that `import` has read."""
ROW_COLUMNS = _TABLES["row"]
"""Written by the study, in addition to the columns that the trial reports."""
STOP_COLUMNS = _TABLES["stop"]
TRIAL_COLUMNS = _TABLES["trial"]
GRADIENT_COLUMNS = _TABLES["gradient"]
"""Written beside the run and the step."""
GRADIENT_GROUP_COLUMNS = _TABLES["gradient_group"]
TOY_TIME_COLUMNS = _TABLES["toy_time"]
"""Times of the rows of toy tasks."""

# Columns of `trials` with the run's last value of the step column of the same name.
TRIAL_LAST_VALUES: tuple[str, ...] = (
    "base_val_success",
    "base_val_success_unseen",
    "base_val_greedy_success",
    "test_success",
    "test_greedy_success",
    "total_optimizer_steps",
    "total_env_steps",
    "total_sampled_tokens",
    "total_trained_tokens",
    "seconds_total",
)

LAST_VALUE_COLUMNS = tuple(column for name in TRIAL_LAST_VALUES for column in STEP_COLUMNS if column.name == name)
COMMON_TRIAL_COLUMNS = tuple(
    column for column in TRIAL_COLUMNS if not column.name.endswith(("_success", "_success_unseen"))
)
"""The trial columns of all families. Only a language model has success rates over levels."""

TIME_COLUMNS: frozenset[str] = frozenset(
    {
        column.name
        for column in STEP_COLUMNS
        if "second" in column.name or column.name.startswith(("mfu_", "peak_flops_per_s"))
    }
    | {"started_at", "ended_at"}
)


STATUSES: tuple[str, ...] = ("completed", "early_stopped", "censored", "failed", "interrupted", "never_ran")


def make_empty_row(*, all_quantities: bool = False, schedules: Iterable[str] = ()) -> dict[str, float | str | None]:
    """Make a row with every step and stop column, without values.

    Tune's csv keeps only the columns of the first reported row, so this row needs all columns. all_quantities: whether
    to include the columns of the setting `collapse_detection.all_quantities`. schedules: the settings with schedules.
    """
    columns = (*DEFAULT_STEP_COLUMNS, *(EXTRA_COLLAPSE_COLUMNS if all_quantities else ()))
    columns += (*(SCHEDULE_COLUMNS[name] for name in schedules), *STOP_COLUMNS)
    row: dict[str, float | str | None] = {column.name: None for column in columns}
    # Empty text means that no rule has fired. Without this key, the study's Stoppers would apply the rules themselves.
    row["stop_rule"] = ""
    return row


CARRIED_KEY = "carried"
"""The key of a result for the names of columns with values of earlier steps, separated by spaces."""


def carry_values(row: Mapping[str, Any], last_values: dict[str, Any]) -> dict[str, Any]:
    """Make a result for Tune: fill columns of `row` that were not measured with earlier values, and list their names.

    The values are from `last_values`, which `row` updates. Before its first measurement, a column has the value of
    `base_<column>`, or else NaN.

    Example:
        >>> carry_values({"step": 1, "base_val_success": 0.25, "val_success": None}, {})
        {'step': 1, 'base_val_success': 0.25, 'val_success': 0.25, 'carried': 'val_success'}
    """
    last_values |= {name: value for name, value in row.items() if value is not None}
    unmeasured = [name for name, value in row.items() if value is None]
    earlier_values = {name: last_values.get(name, last_values.get(f"base_{name}", math.nan)) for name in unmeasured}
    return {**row, **earlier_values, CARRIED_KEY: " ".join(unmeasured)}


def drop_carried(result: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `carry_values`: set columns that were not measured to None. Return other results unchanged."""
    unmeasured = str(result.get(CARRIED_KEY, "")).split()
    return {**result, **dict.fromkeys(unmeasured)}

"""Families of studies: which columns their runs write, and what a run comes to. study.json names the family of a study.

The columns that name a run and say how it ended are those of every family; a family adds what its trainer measures. A
new one is a value in `FAMILIES` and, where its report differs, an entry in `analysis.report.pages.PAGES`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import trainable.sandbox.measure.records as sandbox
from analysis.stats.estimates import area_under_curve
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

Row = dict[str, Any]
Schema = dict[str, str]

TEXT, FLOAT, INT, NULLABLE_INT, BOOL = "str", "float64", "int64", "Int64", "bool"
TIME = "datetime64[us, UTC]"
LOW_ENTROPY = 0.1
_DTYPE_OVERRIDES = {
    "seed": INT,
    "step": INT,
    "steps_done": INT,
    "steps_total": NULLABLE_INT,
    "stop_step": NULLABLE_INT,
    "group": INT,
    "prefilter": BOOL,
    "uses_training_batch": BOOL,
}


def _infer_dtype(column: Column) -> str:
    """The dtype of a column of records.py: no unit is text, UTC is a time, all else a number."""
    if column.name in _DTYPE_OVERRIDES:
        return _DTYPE_OVERRIDES[column.name]
    return {"": TEXT, "UTC": TIME}.get(column.unit, FLOAT)


def _make_schema(*column_groups: Iterable[Column]) -> Schema:
    return {column.name: _infer_dtype(column) for group in column_groups for column in group}


_RUN_SCHEMA = _make_schema(column for column in ROW_COLUMNS if column.name != "step")
_AXIS_SCHEMA = {"axis_setting": TEXT, "axis_value": FLOAT}
_DETAIL_SCHEMAS = {
    "levels": {**_RUN_SCHEMA, "step": INT, "split": TEXT, "mode": TEXT, "level": INT, "cluster": INT, "success": BOOL},
    "gradients": _make_schema(ROW_COLUMNS, GRADIENT_COLUMNS),
    "gradient_groups": {
        **_make_schema(ROW_COLUMNS),
        "source": TEXT,
        "prefilter": BOOL,
        "bucket": TEXT,
        **_make_schema(GRADIENT_GROUP_COLUMNS),
    },
}


@dataclass(frozen=True)
class TableFamily:
    """What the runs of one kind of study write.

    first_step: the least step of a row. step_columns: what a row measures. trial_columns: what stands of a run in
    `trials`, in order, beside its names, its axis and its settings. values: from a run's rows, sorted by step, to its
    `steps_done` and the trial columns that no file states; with them the step up to which the run keeps its last
    values, None where that is its last row.
    """

    name: str
    first_step: int
    step_columns: tuple[Column, ...]
    trial_columns: tuple[Column, ...]
    summarize_rows: Callable[[Sequence[Row], int | None], Row]

    @cached_property
    def schemas(self) -> Mapping[str, Schema]:
        """Columns and types of each frame. What only other families write (levels, gradients) is an empty frame."""
        return {
            "trials": {**_RUN_SCHEMA, **_AXIS_SCHEMA, **_make_schema(self.trial_columns)},
            "steps": _make_schema(ROW_COLUMNS, self.step_columns, STOP_COLUMNS),
            **_DETAIL_SCHEMAS,
        }


def get_family(study: Mapping[str, Any]) -> TableFamily:
    """The family that study.json names; "ppo" where it names none. ValueError where there is no such family."""
    name = study.get("family", "ppo")
    if name not in FAMILIES:
        raise ValueError(
            f"study.json of `{study.get('name', '')}` is of the family {name!r}, which this version cannot read; it "
            f"reads {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def find_last_value(rows: Sequence[Row], column: str) -> Any:
    """The last value of a column that is not missing; None without one."""
    return next((row[column] for row in reversed(rows) if row.get(column) is not None), None)


def _summarize_ppo_run(rows: Sequence[Row], end_step: int | None) -> Row:
    validations = [row["val_success"] for row in rows if row.get("val_success") is not None]
    return {
        "steps_done": len(rows),
        "final_val_success": find_last_value(rows, "val_success"),
        "final_val_success_unseen": find_last_value(rows, "val_success_unseen"),
        "final_val_greedy_success": find_last_value(rows, "val_greedy_success"),
        "peak_val_success": max(validations, default=None),
        **{name: find_last_value(rows, name) for name in TRIAL_LAST_VALUES},
    }


def _summarize_update_rule_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """Rows are evaluations: the last row's values, first steps at which something holds, means."""
    last_row = rows[-1] if rows else {}
    final_columns = [column.name for column in sandbox.TRIAL_COLUMNS if column.name.startswith("final_")]
    return {
        "steps_done": last_row.get("step", 0),
        **{name: last_row.get(name.removeprefix("final_")) for name in final_columns},
        "first_step_entropy_low": _find_first_step(rows, "entropy", LOW_ENTROPY),
        "first_step_error_zero": _find_first_step(rows, "test_error", 0.0),
        "mean_entropy": _compute_mean_over_steps(
            rows, "entropy", last_row.get("step", 0) if end_step is None else end_step
        ),
        "mean_replay_age": _compute_mean_over_batches(rows, "age_mean"),
        "mean_effective_age": _compute_mean_over_batches(rows, "effective_age"),
    }


def _find_first_step(rows: Sequence[Row], column: str, threshold: float) -> Any:
    """The first step at which the column is at most `most`; None where it never is."""
    return next((row["step"] for row in rows if row.get(column) is not None and row[column] <= threshold), None)


def _compute_mean_over_batches(rows: Sequence[Row], column: str) -> float | None:
    """The mean of a column that is itself a mean over the batches since the row before; None where no row has it.

    A row with a loss was written after the batch of its step, one without before it, so rows stand for unequal numbers
    of batches: the first one of a run without delay for a single one, of age 0.
    """
    batches_done = [row["step"] + (row.get("loss") is not None) for row in rows]
    counts = [after - before for before, after in pairwise([0, *batches_done])]
    weighted_values = [
        (count, row[column]) for count, row in zip(counts, rows, strict=True) if row.get(column) is not None
    ]
    return (
        sum(count * value for count, value in weighted_values) / sum(count for count, _ in weighted_values)
        if weighted_values
        else None
    )


def _compute_mean_over_steps(rows: Sequence[Row], column: str, end_step: int) -> float:
    """Mean height of the column's curve from its first value to the step `until`; NaN without a value."""
    measured_rows = [row for row in rows if row.get(column) is not None]
    return area_under_curve([row["step"] for row in measured_rows], [row[column] for row in measured_rows], end_step)


def _is_common_column(column: Column) -> bool:
    """Whether a trial column of records.py is of every family: not a success on levels."""
    return not column.name.endswith("_success") and not column.name.endswith("_success_unseen")


_LAST_VALUE_COLUMNS = tuple(column for name in TRIAL_LAST_VALUES for column in STEP_COLUMNS if column.name == name)
_COMMON_COLUMNS = tuple(column for column in TRIAL_COLUMNS if _is_common_column(column))
RUN_FILE_SCHEMA: Schema = {**_RUN_SCHEMA, **_make_schema(_COMMON_COLUMNS, STOP_COLUMNS)}
"""Types of what stands in run.json and status.json under a column's name."""

FAMILIES: dict[str, TableFamily] = {
    "ppo": TableFamily(
        "ppo", 1, STEP_COLUMNS, (*TRIAL_COLUMNS, *STOP_COLUMNS, *_LAST_VALUE_COLUMNS), _summarize_ppo_run
    ),
    "update_rules": TableFamily(
        "update_rules",
        0,
        sandbox.STEP_COLUMNS,
        (*_COMMON_COLUMNS, *STOP_COLUMNS, *sandbox.TRIAL_COLUMNS),
        _summarize_update_rule_run,
    ),
}

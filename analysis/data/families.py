"""Study families: the columns that the runs of a family write, and the summary of a run.

study.json names the family of a study. All families share the columns that identify a run and say how it ended; each
family adds the measurements of its trainer. To add a family, add a value to `FAMILIES` and, if its report differs, an
entry to `analysis.report.pages.PAGES`.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import trainable.sandbox.distillation.records as distillation
import trainable.sandbox.measure.records as sandbox
import trainable.sandbox.pedagogy.records as pedagogy
import trainable.sandbox.vector_rewards.records as vector_rewards
from analysis.stats.estimates import area_under_curve
from trainable.runs.history import find_last_value
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
from trainable.runs.study_record import StudyRecord

Row = dict[str, Any]
Schema = dict[str, str]

TEXT, FLOAT, INT, NULLABLE_INT, BOOL = "str", "float64", "int64", "Int64", "bool"
TIME = "datetime64[us, UTC]"
CATEGORY = "category"
"""Text of which each value is stored once, in frames with many rows. Its categories are sorted."""
# nats; the threshold of `first_step_entropy_low` (docs/metrics.md).
LOW_ENTROPY = 0.1
LATE_EVALUATIONS = 4
"""How many evaluations the outcome of a run is the mean of: a single one would add its own noise to a comparison."""
# Columns whose type does not follow from their unit.
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
    """The dtype of a column of records.py: text if it has no unit, a time if its unit is UTC, otherwise a number."""
    if column.name in _DTYPE_OVERRIDES:
        return _DTYPE_OVERRIDES[column.name]
    return {"": TEXT, "UTC": TIME}.get(column.unit, FLOAT)


def _make_schema(*column_groups: Iterable[Column]) -> Schema:
    return {column.name: _infer_dtype(column) for group in column_groups for column in group}


_RUN_SCHEMA = _make_schema(column for column in ROW_COLUMNS if column.name != "step")
_AXIS_SCHEMA = {"axis_setting": TEXT, "axis_value": FLOAT}
_DETAIL_SCHEMAS = {
    "levels": {
        **{name: CATEGORY if dtype == TEXT else dtype for name, dtype in _RUN_SCHEMA.items()},
        "step": INT,
        "split": CATEGORY,
        "mode": CATEGORY,
        "level": INT,
        "cluster": INT,
        "success": BOOL,
    },
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
    """The tables that the runs of one family of studies write.

    Attributes:
        name: as in study.json.
        step_columns: measurements in each row.
        trial_columns: columns of `trials`, in order, in addition to names, axis and settings.
        summarize_rows: computes `steps_done` and the trial columns that no file contains. Its arguments are the rows
            of a run, sorted by step, and the step up to which the run keeps its last values (None: the step of its last
            row).
        primary_column: the trial column that answers a study's question.
        secondary_columns: trial columns that are compared in addition, all of them adjusted together.
        is_higher_better: whether a larger primary outcome is a better one.
        contrasted_columns: trial columns of which declared contrasts are estimated, each with the reason, which the
            report shows.
        common_columns: those that every study has. The others exist for some runs only.
        get_environment: function of the settings of study.json that returns what the policy acts in.
        is_fine_tuning: whether the runs fine-tune a language model, whose rows are training steps with symptoms, stop
            rules and gradient analyses.
        own_prefixes: how columns may begin that are no `step_columns`, the measures of a game of the user.
    """

    name: str
    step_columns: tuple[Column, ...]
    trial_columns: tuple[Column, ...]
    summarize_rows: Callable[[Sequence[Row], int | None], Row]
    primary_column: str
    secondary_columns: tuple[str, ...]
    is_higher_better: bool
    contrasted_columns: Mapping[str, str]
    common_columns: tuple[str, ...]
    get_environment: Callable[[Mapping[str, Any]], str]
    is_fine_tuning: bool = False
    own_prefixes: tuple[str, ...] = ()

    @cached_property
    def schemas(self) -> Mapping[str, Schema]:
        """Columns and types of each frame. Frames that only other families fill (levels, gradients) are empty."""
        return {
            "trials": {**_RUN_SCHEMA, **_AXIS_SCHEMA, **_make_schema(self.trial_columns)},
            "steps": _make_schema(ROW_COLUMNS, self.step_columns, STOP_COLUMNS),
            **_DETAIL_SCHEMAS,
        }


def get_family(study: StudyRecord) -> TableFamily:
    """The family named in study.json, "ppo" if it names none. ValueError for an unknown family."""
    name = study.family
    if name not in FAMILIES:
        raise ValueError(
            f"study.json of `{study.name}` names the family {name!r}, which this version cannot read. "
            f"Known families: {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def _summarize_ppo_run(rows: Sequence[Row], end_step: int | None) -> Row:
    # Most rows have no validation: only every n-th step is validated.
    points = [(row["step"], row["val_success"]) for row in rows if row.get("val_success") is not None]
    validations = [value for _, value in points]
    # Validation before training is optional. Without it the curve starts at the first validation.
    base_success = find_last_value(rows, "base_val_success")
    curve = points if base_success is None else [(0, base_success), *points]
    last_step = rows[-1]["step"] if rows else 0
    return {
        "steps_done": len(rows),
        "late_val_success": compute_late_mean(curve, end_step),
        "mean_val_success": area_under_curve(
            [step for step, _ in curve], [value for _, value in curve], last_step if end_step is None else end_step
        ),
        "final_val_success": find_last_value(rows, "val_success"),
        "final_train_success": find_last_value(rows, "train_success"),
        "final_val_success_unseen": find_last_value(rows, "val_success_unseen"),
        "final_val_greedy_success": find_last_value(rows, "val_greedy_success"),
        "peak_val_success": max(validations, default=None),
        **{name: find_last_value(rows, name) for name in TRIAL_LAST_VALUES},
    }


def _summarize_update_rule_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """Values of the last evaluation, first steps at which a threshold is reached, and means.

    Each row is an evaluation, so `steps_done` is the step of the last row and not the number of rows.
    """
    last_row = rows[-1] if rows else {}
    final_columns = [column.name for column in sandbox.TRIAL_COLUMNS if column.name.startswith("final_")]
    return {
        "steps_done": last_row.get("step", 0),
        "late_test_error": compute_late_mean(
            [(row["step"], row["test_error"]) for row in rows if row.get("test_error") is not None], end_step
        ),
        **{name: last_row.get(name.removeprefix("final_")) for name in final_columns},
        "first_step_entropy_low": _find_first_step(rows, "entropy", LOW_ENTROPY),
        "first_step_error_zero": _find_first_step(rows, "test_error", threshold=0.0),
        "mean_entropy": _compute_mean_over_steps(
            rows, "entropy", last_row.get("step", 0) if end_step is None else end_step
        ),
        "mean_replay_age": _compute_mean_over_batches(rows, "age_mean"),
        "mean_effective_age": _compute_mean_over_batches(rows, "effective_age"),
    }


def _summarize_distillation_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """Values of the last evaluation, of the last row with a batch, and of the switch from a warm-up to its loss."""
    last_row = rows[-1] if rows else {}
    errors = [(row["step"], row["test_error"]) for row in rows if row.get("test_error") is not None]
    columns = [column.name for column in distillation.TRIAL_COLUMNS]
    summary = {
        "steps_done": last_row.get("step", 0),
        "late_test_error": compute_late_mean(errors, end_step),
        **{name: last_row.get(name.removeprefix("final_")) for name in columns if name.startswith("final_")},
        **{name: find_last_value(rows, name.removeprefix("last_")) for name in columns if name.startswith("last_")},
    }
    # Only a run with a warm-up has a switch: the first row after the last one of the warm-up.
    warmup_steps = [row["step"] for row in rows if row.get("is_warmup") == 1]
    switch_errors = [error for step, error in errors if warmup_steps and step > warmup_steps[-1]]
    if switch_errors:
        summary |= {"switch_test_error": switch_errors[0], "error_since_switch": errors[-1][1] - switch_errors[0]}
    projections = [row["gradient_projection"] for row in rows if row.get("gradient_projection") is not None]
    variance = statistics.variance(projections) if len(projections) > 1 else 0.0
    if variance > 0:
        norms = [row["gradient_norm"] for row in rows if row.get("gradient_norm") is not None]
        summary |= {
            "gradient_variance": variance,
            "log10_gradient_variance": math.log10(variance),
            "mean_gradient_norm": statistics.fmean(norms),
        }
    return summary


def _summarize_vector_reward_run(rows: Sequence[Row], end_step: int | None) -> Row:
    return _summarize_by_prefix(rows, end_step, vector_rewards.TRIAL_COLUMNS)


def _summarize_pedagogy_run(rows: Sequence[Row], end_step: int | None) -> Row:
    return _summarize_by_prefix(rows, end_step, pedagogy.TRIAL_COLUMNS)


def _summarize_by_prefix(rows: Sequence[Row], end_step: int | None, trial_columns: Iterable[Column]) -> Row:
    """final_...: of the last row; last_...: the last value; late_...: mean over the last evaluations."""
    last_row = rows[-1] if rows else {}
    columns = [column.name for column in trial_columns]
    return {
        "steps_done": last_row.get("step", 0),
        **{name: last_row.get(name.removeprefix("final_")) for name in columns if name.startswith("final_")},
        **{name: find_last_value(rows, name.removeprefix("last_")) for name in columns if name.startswith("last_")},
        **{
            name: compute_late_mean(
                [(row["step"], row[measure]) for row in rows if row.get(measure) is not None], end_step
            )
            for name in columns
            if (measure := name.removeprefix("late_")) != name
        },
    }


def compute_late_mean(curve: Sequence[tuple[int, float]], end_step: int | None) -> float | None:
    """Mean over the last `LATE_EVALUATIONS` evaluations of a run; None without any.

    curve: step and value of each evaluation, in order. end_step: the planned last step of a run that a rule stopped,
    which keeps its last value at the evaluations that it missed; None for a run that is measured up to its last row.
    Evaluations are planned at the multiples of the first evaluated step and at the last step. With fewer than
    `LATE_EVALUATIONS` evaluations the mean is over all of them. The one before training counts only if it is the only
    one.
    """
    points = [point for point in curve if point[0] > 0]
    if not points:
        return curve[-1][1] if curve else None
    values = [value for _, value in points]
    if end_step is not None:
        values += [values[-1]] * count_missed_evaluations(points[0][0], points[-1][0], end_step)
    late_values = values[-LATE_EVALUATIONS:]
    return sum(late_values) / len(late_values)


def count_missed_evaluations(interval: int, last_step: int, end_step: int) -> int:
    """The number of evaluations that were planned after `last_step`, but at most `LATE_EVALUATIONS`.

    They are planned at the multiples of `interval` and at `end_step`.
    """
    if end_step <= last_step:
        return 0
    # The multiples of the interval in (last_step, end_step), and end_step itself.
    return min((end_step - 1) // interval - last_step // interval + 1, LATE_EVALUATIONS)


def _find_first_step(rows: Sequence[Row], column: str, threshold: float) -> Any:
    """The first step at which the column is at most `threshold`, or None."""
    return next((row["step"] for row in rows if row.get(column) is not None and row[column] <= threshold), None)


def _compute_mean_over_batches(rows: Sequence[Row], column: str) -> float | None:
    """Mean over batches of a column whose rows are means over the batches since the previous row; None without a value.

    Rows cover unequal numbers of batches, so they are weighted. A row with a loss was written after the batch of its
    step, a row without a loss before it. The first row of a run without delay covers a single batch, of age 0.
    """
    # True counts as 1: with a loss, the batch of the row's own step is already done.
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
    """Mean height of the column's curve from its first value to `end_step`; NaN without a value."""
    measured_rows = [row for row in rows if row.get(column) is not None]
    return area_under_curve([row["step"] for row in measured_rows], [row[column] for row in measured_rows], end_step)


def _is_common_column(column: Column) -> bool:
    """Whether all families have this trial column. Only PPO studies have success rates over levels."""
    return not column.name.endswith("_success") and not column.name.endswith("_success_unseen")


_LAST_VALUE_COLUMNS = tuple(column for name in TRIAL_LAST_VALUES for column in STEP_COLUMNS if column.name == name)
_COMMON_COLUMNS = tuple(column for column in TRIAL_COLUMNS if _is_common_column(column))
DEFAULT_ENVIRONMENT = "sokoban"
"""The game of studies that were recorded before there was another one."""

RUN_FILE_SCHEMA: Schema = {**_RUN_SCHEMA, **_make_schema(_COMMON_COLUMNS, STOP_COLUMNS)}
"""Types of the fields of run.json and status.json that have the name of a column."""

UNCONTRASTED_COLUMNS: Mapping[str, str] = {
    "final_test_error": "it is a single evaluation, and late_test_error is the mean over the last ones",
    "final_greedy_separator_rate": "it only identifies a collapse, whose error late_test_error has",
    "first_step_entropy_low": "runs that never reach the step have no value, so a mean over the others is biased",
    "first_step_error_zero": "runs that never reach the step have no value, so a mean over the others is biased",
    "mean_effective_age": "it equals mean_replay_age, except for FreshDG",
}
"""The trial columns of update-rule studies that are not contrasted, and why."""

_DISTILLATION = TableFamily(
    name="distillation",
    step_columns=distillation.STEP_COLUMNS,
    trial_columns=(*_COMMON_COLUMNS, *STOP_COLUMNS, *distillation.TRIAL_COLUMNS),
    summarize_rows=_summarize_distillation_run,
    primary_column="late_test_error",
    secondary_columns=("final_test_error", "final_entropy", "last_reverse_kl", "error_since_switch"),
    is_higher_better=False,
    contrasted_columns={
        "late_test_error": "it is the outcome that a student should improve",
        "final_entropy": "it shows whether the student has committed itself; a uniform student has the logarithm of "
        "the number of tokens",
        "last_reverse_kl": "it is the exact divergence that every loss here stands for",
        "error_since_switch": "it shows whether a run keeps what its warm-up taught; negative if it goes on learning",
    },
    common_columns=("late_test_error", "final_entropy", "last_reverse_kl"),
    get_environment=lambda settings: str(settings.get("task", "")),
)
FAMILIES: dict[str, TableFamily] = {
    "ppo": TableFamily(
        name="ppo",
        step_columns=STEP_COLUMNS,
        trial_columns=(*TRIAL_COLUMNS, *STOP_COLUMNS, *_LAST_VALUE_COLUMNS),
        summarize_rows=_summarize_ppo_run,
        primary_column="late_val_success",
        secondary_columns=("mean_val_success", "final_val_greedy_success", "test_success", "test_greedy_success"),
        is_higher_better=True,
        contrasted_columns={
            "late_val_success": "it is the outcome that a setting should improve",
            "mean_val_success": "it shows whether success came early or lasted",
            "final_val_greedy_success": "it shows what the policy knows, without the noise of sampling",
            "test_success": "it is success on levels that played no part in training or in any choice",
            "test_greedy_success": "it is the same without the noise of sampling",
        },
        common_columns=("late_val_success",),
        get_environment=lambda settings: str(settings.get("env", {}).get("name", DEFAULT_ENVIRONMENT)),
        is_fine_tuning=True,
        own_prefixes=("train_", "val_", "base_val_"),
    ),
    "update_rules": TableFamily(
        name="update_rules",
        step_columns=sandbox.STEP_COLUMNS,
        trial_columns=(*_COMMON_COLUMNS, *STOP_COLUMNS, *sandbox.TRIAL_COLUMNS),
        summarize_rows=_summarize_update_rule_run,
        primary_column="late_test_error",
        secondary_columns=(
            "final_entropy",
            "mean_entropy",
            "final_test_error_unscored",
            "final_chain_reward",
            "final_perplexity",
        ),
        is_higher_better=False,
        contrasted_columns={
            "late_test_error": "it is the outcome that a rule should improve",
            "final_entropy": "it shows how much exploration is left at the end; a run that collapsed is near 0",
            "mean_entropy": "it shows how long entropy lasted, and has a value whether or not entropy ever gets low",
            "final_test_error_unscored": "in masked_reversal, it shows how much was learned where nothing is scored",
            "final_chain_reward": "it is the reward that chain tasks give",
            "final_perplexity": "in lm_bandit, it shows whether the model is still a language model",
            "mean_replay_age": "it is no outcome, but checks that pairs meant to have equal ages have them",
        },
        common_columns=("late_test_error", "final_entropy", "mean_entropy"),
        get_environment=lambda settings: str(settings.get("task", "")),
    ),
    "distillation": _DISTILLATION,
    "pedagogy": TableFamily(
        name="pedagogy",
        step_columns=pedagogy.STEP_COLUMNS,
        trial_columns=(*_COMMON_COLUMNS, *STOP_COLUMNS, *pedagogy.TRIAL_COLUMNS),
        summarize_rows=_summarize_pedagogy_run,
        primary_column="late_test_error",
        secondary_columns=("late_teacher_test_error", "final_entropy"),
        is_higher_better=False,
        contrasted_columns={
            "late_test_error": "it is what the student can do without the hint",
            "late_teacher_test_error": "it shows whether the teacher uses the hint",
        },
        common_columns=("late_test_error",),
        get_environment=lambda settings: f"{settings.get('task', '')}-{settings.get('answer_len', '')}",
    ),
    "vector_rewards": TableFamily(
        name="vector_rewards",
        step_columns=vector_rewards.STEP_COLUMNS,
        trial_columns=(*_COMMON_COLUMNS, *STOP_COLUMNS, *vector_rewards.TRIAL_COLUMNS),
        summarize_rows=_summarize_vector_reward_run,
        primary_column="late_simplex_score",
        secondary_columns=(
            "late_best_at_1",
            "late_best_at_3",
            "late_best_at_9",
            "late_mean_scalar_reward",
            "late_pool_diversity_l1",
        ),
        is_higher_better=True,
        contrasted_columns={
            "late_simplex_score": "it is what a set is worth if the weights of the objectives are not known in advance",
            "late_best_at_1": "it is what a single answer is worth at deployment",
            "late_best_at_9": "it is what nine answers are worth at deployment",
            "late_pool_diversity_l1": "it shows whether the candidates of a set differ",
        },
        common_columns=("late_simplex_score",),
        get_environment=lambda settings: str(settings.get("task", "")),
    ),
    "gradient_variance": replace(
        _DISTILLATION,
        name="gradient_variance",
        primary_column="log10_gradient_variance",
        secondary_columns=("mean_gradient_norm",),
        contrasted_columns={
            "log10_gradient_variance": "it is what an estimator adds to the gradient as noise",
            "mean_gradient_norm": "it shows the scale of the gradient, which a normalization changes too",
        },
        common_columns=("log10_gradient_variance", "mean_gradient_norm"),
    ),
}

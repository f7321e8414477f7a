"""Summarize a run: compute the values of its trial that no file contains from its rows."""

from collections.abc import Iterable, Sequence

from analysis.data.schemas import Row
from analysis.stats.estimates import area_under_curve
from trainable.runs.history import find_last_value
from trainable.runs.records import TRIAL_LAST_VALUES, Column

LATE_EVALUATIONS = 4
"""Number of evaluations that a run's outcome averages: a single one would add its noise to every comparison."""


def summarize_ppo_run(rows: Sequence[Row], end_step: int | None, trial_columns: Iterable[Column]) -> Row:
    """Compute success before training, along the curve and at the end; see `Family.summarize`."""
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


def summarize_by_prefix(rows: Sequence[Row], end_step: int | None, trial_columns: Iterable[Column]) -> Row:
    """Take final_... from the last row, last_... as the last value, late_... as mean over the last evaluations."""
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
    """Compute the mean over the last `LATE_EVALUATIONS` evaluations of a run, or all if fewer; None without any.

    curve: step and value of each evaluation, in order. end_step: the planned last step of a run that a rule stopped;
    its last value stands for the evaluations that it missed. None for a run that is measured up to its last row.
    Evaluations are planned at the multiples of the first evaluated step and at the last step. The evaluation before
    training counts only if it is the only one.
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
    """Count the evaluations that were planned after `last_step`, up to `LATE_EVALUATIONS`.

    They are planned at the multiples of `interval` and at `end_step`.
    """
    if end_step <= last_step:
        return 0
    # The multiples of the interval in (last_step, end_step), and end_step itself.
    return min((end_step - 1) // interval - last_step // interval + 1, LATE_EVALUATIONS)

"""Summarize a run of an update rule."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from analysis.data.schemas import Row
from analysis.data.summaries import summarize_by_prefix
from analysis.stats.estimates import area_under_curve
from trainable.runs.records import Column

LOW_ENTROPY = 0.1
"""nats; the threshold of `first_step_entropy_low` (docs/metrics.md)."""


def summarize_run(rows: Sequence[Row], end_step: int | None, trial_columns: Iterable[Column]) -> Row:
    """Take values from the last evaluation, first steps at which a threshold is reached, and means."""
    last_step = rows[-1]["step"] if rows else 0
    entropies = [(row["step"], row["entropy"]) for row in rows if row.get("entropy") is not None]
    return {
        **summarize_by_prefix(rows, end_step, trial_columns),
        "first_step_entropy_low": _find_first_step(rows, "entropy", LOW_ENTROPY),
        "first_step_error_zero": _find_first_step(rows, "test_error", threshold=0.0),
        # Mean height of the curve from its first value; NaN without a value.
        "mean_entropy": area_under_curve(
            [step for step, _ in entropies],
            [entropy for _, entropy in entropies],
            last_step if end_step is None else end_step,
        ),
        "mean_replay_age": _compute_mean_over_batches(rows, "age_mean"),
        "mean_effective_age": _compute_mean_over_batches(rows, "effective_age"),
    }


def _find_first_step(rows: Sequence[Row], column: str, threshold: float) -> Any:
    """Find the first step at which the column is at most `threshold`, or None."""
    return next((row["step"] for row in rows if row.get(column) is not None and row[column] <= threshold), None)


def _compute_mean_over_batches(rows: Sequence[Row], column: str) -> float | None:
    """Average a column over batches, where each row is a mean over the batches since the last; None without a value.

    Rows cover unequal numbers of batches, so they are weighted. A row with a loss was written after its step's batch, a
    row without a loss before it. The first row of a run without delay covers a single batch, of age 0.
    """
    # True counts as 1: a row with a loss includes its step's batch.
    batches_done = [row["step"] + (row.get("loss") is not None) for row in rows]
    counts = [after - before for before, after in pairwise([0, *batches_done])]
    weighted_values = [
        (count, row[column]) for count, row in zip(counts, rows, strict=True) if row.get(column) is not None
    ]
    total = sum(count for count, _ in weighted_values)
    return sum(count * value for count, value in weighted_values) / total if weighted_values else None

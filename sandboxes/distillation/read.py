"""Summarize a student's run."""

import math
import statistics
from collections.abc import Iterable, Sequence

from analysis.data.schemas import Row
from analysis.data.summaries import summarize_by_prefix
from trainable.runs.records import Column


def summarize_run(rows: Sequence[Row], end_step: int | None, trial_columns: Iterable[Column]) -> Row:
    """Take values from the last evaluation, the last row with a batch, and the switch from warm-up to top-k loss."""
    summary = summarize_by_prefix(rows, end_step, trial_columns)
    errors = [(row["step"], row["test_error"]) for row in rows if row.get("test_error") is not None]
    # Only a run with a warm-up has a switch: the first row after the warm-up.
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

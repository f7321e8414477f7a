"""Read: what a run of a student came to, and the words of its report."""

import math
import statistics
from collections.abc import Sequence

from analysis.data.schemas import Row
from analysis.data.summaries import compute_late_mean
from sandboxes.distillation.records import TRIAL_COLUMNS
from sandboxes.toys.report.descriptions import ERROR_PANEL, Description, Panel
from trainable.runs.history import find_last_value


def summarize_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """Values of the last evaluation, of the last row with a batch, and of the switch from a warm-up to its loss."""
    last_row = rows[-1] if rows else {}
    errors = [(row["step"], row["test_error"]) for row in rows if row.get("test_error") is not None]
    columns = [column.name for column in TRIAL_COLUMNS]
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


DESCRIPTION = Description(
    label="on-policy distillation",
    outcome="test error at the end",
    number="test error",
    panels=(ERROR_PANEL, Panel("reverse_kl", "KL(student || teacher) (nats)")),
    run_columns={"final_test_error": "test error", "final_entropy": "entropy", "last_reverse_kl": "reverse KL"},
)

GRADIENT_VARIANCE_DESCRIPTION = Description(
    label="on-policy distillation",
    outcome="the logarithm of the gradient's variance",
    number="log10 of the variance",
    panels=(Panel("gradient_projection", "projection of the gradient"), Panel("gradient_norm", "gradient norm")),
    run_columns={
        "log10_gradient_variance": "log10 of the variance",
        "mean_gradient_norm": "mean gradient norm",
    },
)

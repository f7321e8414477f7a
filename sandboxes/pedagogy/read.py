"""Read: what a run of student and teacher came to, and the words of its report."""

from collections.abc import Sequence

from analysis.data.schemas import Row
from analysis.data.summaries import summarize_by_prefix
from sandboxes.pedagogy.records import TRIAL_COLUMNS
from sandboxes.toys.report.descriptions import ERROR_PANEL, Description, Panel


def summarize_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """See `trainable.families.Family.summarize`."""
    return summarize_by_prefix(rows, end_step, TRIAL_COLUMNS)


DESCRIPTION = Description(
    label="pedagogical reinforcement learning",
    outcome="test error of the student at the end",
    number="test error",
    panels=(ERROR_PANEL, Panel("teacher_test_error", "test error of the teacher (fraction)")),
    run_columns={
        "late_test_error": "test error",
        "late_teacher_test_error": "of the teacher",
        "final_entropy": "entropy",
    },
)

"""Summarize a run of student and teacher, and describe its family for reports."""

from functools import partial

from analysis.data.summaries import summarize_by_prefix
from sandboxes.pedagogy.study import TRIAL_COLUMNS
from sandboxes.toys.study import ERROR_PANEL, Description, Panel

summarize_run = partial(summarize_by_prefix, trial_columns=TRIAL_COLUMNS)
"""See `trainable.families.Family.summarize`."""

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

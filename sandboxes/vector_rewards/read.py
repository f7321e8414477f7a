"""Summarize a run with vector rewards, and describe its family for reports."""

from functools import partial

from analysis.data.summaries import summarize_by_prefix
from sandboxes.toys.study import Description, Panel
from sandboxes.vector_rewards.study import TRIAL_COLUMNS

summarize_run = partial(summarize_by_prefix, trial_columns=TRIAL_COLUMNS)
"""See `trainable.families.Family.summarize`."""

DESCRIPTION = Description(
    label="vector rewards",
    outcome="the score of a set over all weights",
    number="simplex score",
    panels=(Panel("simplex_score", "score over all weights (reward)"), Panel("best_at_9", "best of 9 (reward)")),
    run_columns={"late_simplex_score": "simplex score", "late_best_at_9": "best@9", "final_entropy": "entropy"},
)

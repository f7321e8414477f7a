"""Read: what a run with vector rewards came to, and the words of its report."""

from collections.abc import Sequence

from analysis.data.schemas import Row
from analysis.data.summaries import summarize_by_prefix
from sandboxes.toys.report.descriptions import Description, Panel
from sandboxes.vector_rewards.records import TRIAL_COLUMNS


def summarize_run(rows: Sequence[Row], end_step: int | None) -> Row:
    """See `trainable.families.Family.summarize`."""
    return summarize_by_prefix(rows, end_step, TRIAL_COLUMNS)


DESCRIPTION = Description(
    label="vector rewards",
    outcome="the score of a set over all weights",
    number="simplex score",
    panels=(Panel("simplex_score", "score over all weights (reward)"), Panel("best_at_9", "best of 9 (reward)")),
    run_columns={"late_simplex_score": "simplex score", "late_best_at_9": "best@9", "final_entropy": "entropy"},
)

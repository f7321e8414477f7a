"""How a run ended, told by its rows: the source of every status, and the judge of a recorded one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CENSORED = "censored"
"""The status of a run that a search stopped, or did not start, because others did better. Its rows end like those of an
interrupted one, and say nothing of what it would have reached."""

ENDED_STATUSES = ("completed", "early_stopped", CENSORED)
"""Statuses of runs that are never run again."""
OPEN_STATUSES = ("waiting", "running")
"""Statuses of runs that have not ended, while a driver runs their study. No other run has one of them."""


class RunEnd(NamedTuple):
    """The status of a run by its rows, one of `records.STATUSES`, and the reason as a sentence."""

    status: str
    reason: str


def describe_end(rows: Sequence[Mapping[str, Any]], total_steps: int | None) -> RunEnd:
    """How a run ended whose rows are `rows`. total_steps: planned training steps; None if they are not known.

    A row of step 0 is the validation before training and means that the run has started.
    """
    if not rows:
        return RunEnd("never_ran", "interrupted before its first row")
    last_row = rows[-1]
    if last_row.get("failure"):  # one of several seeds could not continue, while the others did
        return RunEnd("failed", str(last_row["failure"]))
    # Before the comparison of steps: a run in which a rule fires at the last step is early_stopped, not completed.
    if last_row.get("stop_rule"):
        return RunEnd("early_stopped", format_stop_reason(last_row))
    if last_row["step"] == total_steps:
        return RunEnd("completed", f"trained {total_steps} of {total_steps} steps")
    total_text = "" if total_steps is None else f" of {total_steps}"
    return RunEnd("interrupted", f"interrupted after step {last_row['step']}{total_text}")


def get_status_before_waiting(failure_class: str, has_rows: bool) -> str:
    """The status that a waiting run had before its study was started again.

    A waiting run keeps every other field of its earlier status, from which this one follows. failure_class: that field
    of its status.json.
    """
    if failure_class:
        return "failed"
    return "interrupted" if has_rows else "never_ran"


def find_contradiction(
    status: str, rows: Sequence[Mapping[str, Any]], total_steps: int | None, damage: Sequence[str]
) -> str:
    """Why a run that is recorded with `status` has not ended in this way; empty if its rows agree.

    Only a run that is recorded as ended can contradict its rows: it would be shown as whole and never be trained again.
    damage: from `RunLines.find_damage`.
    """
    if status not in ENDED_STATUSES:
        return ""
    if damage:
        return f"recorded as {status}, but {'; '.join(damage)}"
    end = describe_end(rows, total_steps)
    if end.status == status or (status == CENSORED and end.status in ("interrupted", "never_ran")):
        return ""
    # Without the planned number of steps, the last row of a completed run looks like any other.
    if total_steps is None and status == "completed" and rows:
        return ""
    return f"recorded as {status}, but {end.reason if rows else 'it has no row'}"


def format_stop_reason(row: Mapping[str, Any]) -> str:
    """The decision of a stop rule in words, from the stop columns of a row."""
    value, threshold, step = (row.get(name) for name in ("stop_value", "stop_threshold", "stop_step"))
    # A file of unknown origin may have anything there.
    if not (isinstance(value, int | float) and isinstance(threshold, int | float)):
        return f"{row['stop_rule']} at step {step}"
    # Two of the rules stop below their threshold, and the one that counts steps stops when it reaches it.
    comparison = "is below" if value < threshold else "reached"
    return f"{row['stop_rule']} at step {step}: {value:.4g} {comparison} the threshold {threshold:.4g}"

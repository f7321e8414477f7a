"""The history of a run on disk: its rows after rollbacks, its damage, and how and why it ended.

Rows are the source of every status, and correct the status.json that a driver wrote. Also finds runs that could not
learn, and runs that collapsed: every table, figure and sentence about collapse uses this definition.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainable.files.json_values import DamagedFileError, parse_finite
from trainable.runs.failures import NON_FINITE
from trainable.runs.run_files import LEVELS_FILE, Row, RunLines, is_locked, select_lines
from trainable.runs.study_record import CENSORED, ENDED_STATUSES, StatusRecord, read_record

MASTERED_SUCCESS = 0.9
"""A stopped run has mastered its task if its last validation and the episodes of its last step have this success.

Rules that watch the spread of rewards fire when all rollouts of a level fail, but also when all succeed."""

COLLAPSE_DEFINITION = (
    "A run collapses when a rule stops it at a success below 0.9, or when its success is below half of its running "
    "maximum at two validations in a row."
)
MIN_DIFFERENCES = 10
"""Differences of neighboring validations from which their noise is estimated where no number of episodes is known."""
NOT_STARTED = "has not started"
GONE = "the process that ran the study is gone"
"""The reason for the status of runs whose driver was killed."""


class RunHistory(NamedTuple):
    """The history of a run, read from its files."""

    rows: list[Row]
    """The rows in the order of their steps, without rows that a rollback dropped."""
    lines: RunLines
    """The lines of all files."""
    notes: list[str]
    """Sentences that say why an existing status.json could not be read."""
    status: StatusRecord
    """The status of the run and its reason, as recorded unless the rows contradict it."""

    @classmethod
    def read(cls, run_dir: Path, total_steps: int | None, *, is_live: bool = False) -> "RunHistory":
        """Read the files of the run in `run_dir`, whose name is its id.

        total_steps: planned training steps; None if unknown. is_live: whether a driver is running the study. If not, no
        run is waiting or running, whatever its status.json says, but for a run without a trial of Ray Tune, whose own
        process holds its lock.

        Without a recorded status, the rows alone say how the run ended. If a run is recorded as ended, but rows are
        damaged or missing, it counts as interrupted, so that it is not shown as whole and `resume` trains it again.
        """
        lines, notes = RunLines.read(run_dir), list[str]()
        rows, damage = lines.list_rows(), lines.find_damage()
        status: StatusRecord | None = None
        try:
            status = read_record(StatusRecord, run_dir)
        except (FileNotFoundError, NotADirectoryError):  # the run has not started
            pass
        except (DamagedFileError, OSError) as error:  # everything in it follows from the rows
            notes.append(f"{error}.")
        if status is None:
            status = StatusRecord(run_dir.name, "never_ran", NOT_STARTED)
            if rows or damage:
                status = make_final_status(status, rows, total_steps)
        if contradiction := find_contradiction(status.status, rows, total_steps, damage):
            status = StatusRecord(
                run_dir.name, "interrupted", contradiction, trial_id=status.trial_id, started_at=status.started_at
            )
        elif not (is_live or (status.status == "running" and not status.trial_id and is_locked(run_dir))):
            status = settle_status(status, GONE, rows)
        if status.status == "never_ran" and not status.reason:
            status = replace(status, reason=NOT_STARTED)
        return cls(rows, lines, notes, status)

    def find_collapse(self, fork_step: int = 0) -> float:
        """Find the step at which the run collapsed (see `find_collapse`); infinity if it has not."""
        rows, status = self.rows, self.status
        if describe_missing_signal(rows):
            return math.inf
        lines = select_lines(self.lines.files[LEVELS_FILE].records, _get_validation_step)
        episodes = {line["step"]: len(line["success"]) for line in lines}
        success = {0: find_last_value(rows, "base_val_success")} | {row["step"]: row.get("val_success") for row in rows}
        # Rows are read from disk and may hold anything.
        values = {step: parse_finite(value) for step, value in success.items()}
        is_failed_stop = status.status == "early_stopped" and not has_mastered(rows)
        stop_step = (status.stop_step or rows[-1]["step"]) if is_failed_stop else math.inf
        validations = (
            (step, value, episodes.get(step) or math.nan) for step, value in values.items() if value is not None
        )
        return find_collapse(validations, stop_step, fork_step)


def _get_validation_step(line: Row) -> int | None:
    """Return the step of a line of levels.jsonl about sampled validation; None for other lines."""
    is_sampled = (line.get("split"), line.get("mode")) == ("val", "sampled")
    return line["step"] if is_sampled and isinstance(line.get("success"), str) else None


def find_collapse(
    validations: Iterable[tuple[float, float, float]], stop_step: float = math.inf, fork_step: float = 0
) -> float:
    """Find the step at which a run collapsed; infinity if it has not.

    validations: step, success and number of episodes of each, in order; NaN episodes are unknown, as in imported logs.
    stop_step: where a rule stopped the run as a failure, which is a collapse unless there was one before. fork_step: up
    to which step the rows of a fork are those of another run. If that had collapsed by then, only what this run reaches
    from there can collapse.

    Collapse: the success is below half of its running maximum m at two validations in a row; the second is returned. It
    must also be more than 2 standard errors of a difference, sqrt(2 m (1 - m) / episodes), below m: a policy that
    rarely succeeds does not collapse by chance. A missing validation (NaN) is skipped.

    A success over an unknown number of episodes is often that of one training batch, and the maximum of many of them
    says little. If all are unknown, each is replaced by its mean with those before it, over a tenth of the run, and the
    standard error of a difference is that of neighbors before: 1.4826 times their median absolute difference, as of
    normal noise (0 with fewer than `MIN_DIFFERENCES`), divided by the root of the number of values per mean.
    """
    known_validations = [validation for validation in validations if not math.isnan(validation[1])]
    differences = [abs(after[1] - before[1]) for before, after in pairwise(known_validations)]
    median_noise = 1.4826 * statistics.median(differences) if len(differences) >= MIN_DIFFERENCES else 0.0
    if all(math.isnan(episodes) for _, _, episodes in known_validations) and (size := len(known_validations) // 10) > 1:
        windows = [known_validations[end - size : end] for end in range(size, len(known_validations) + 1)]
        known_validations = [
            (window[-1][0], statistics.fmean(success for _, success, _ in window), math.nan) for window in windows
        ]
        median_noise /= math.sqrt(size)
    maximum, was_below = -math.inf, False
    for step, success, episodes in known_validations:
        maximum = max(maximum, success)
        noise = median_noise
        if not math.isnan(episodes):
            noise = math.sqrt(max(0.0, 2 * maximum * (1 - maximum) / episodes))
        # A maximum of 0 or less, as of a loss with its sign changed, has no half.
        is_below = maximum > 0 and success < maximum / 2 and maximum - success > 2 * noise
        if is_below and was_below and step <= fork_step:
            later_validations = [validation for validation in known_validations if validation[0] >= fork_step]
            return find_collapse(later_validations, stop_step)
        if is_below and was_below:
            return min(float(step), stop_step)
        was_below = is_below
    return stop_step


def settle_status(status: StatusRecord, reason: str, rows: Sequence[Row]) -> StatusRecord:
    """Settle the status of a run whose study has ended, so that it is neither waiting nor running.

    reason: why a running run was interrupted, as the start of a sentence to which the step is added.
    """
    if status.status == "running":
        end = f"{reason}, after step {rows[-1]['step']}" if rows else f"{reason} before its first step"
        return replace(status, status="interrupted" if rows else "never_ran", reason=end)
    if status.status == "waiting":
        # A waiting run keeps all other fields of its earlier status.
        name = "failed" if status.failure_class else "interrupted" if rows else "never_ran"
        return replace(status, status=name)
    if status.status == "interrupted" and not rows:  # its rows were lost
        return replace(status, status="never_ran")
    return status


def make_final_status(status: StatusRecord, rows: Sequence[Row], total_steps: int | None) -> StatusRecord:
    """Set the final status, its reason and the details of a run from its rows."""
    end = describe_end(rows, total_steps)
    end_fields: dict[str, Any] = (
        {name: rows[-1].get(name) for name in ("stop_rule", "stop_value", "stop_threshold", "stop_step")}
        if end.status == "early_stopped"
        else {}
    )
    if end.status == "failed":  # only runs with non-finite numbers write a row about their failure
        end_fields["failure_class"] = NON_FINITE
    return replace(status, status=end.status, reason=end.reason, **end_fields)


class RunEnd(NamedTuple):
    """The status of a run according to its rows, one of `records.STATUSES`, and the reason as a sentence."""

    status: str
    reason: str


def describe_end(rows: Sequence[Mapping[str, Any]], total_steps: int | None) -> RunEnd:
    """Describe how a run with these rows ended. total_steps: planned training steps; None if unknown.

    A row of step 0 is the validation before training, so the run has started.
    """
    if not rows:
        return RunEnd("never_ran", "interrupted before its first row")
    last_row = rows[-1]
    if last_row.get("failure"):  # this seed could not continue, while others could
        return RunEnd("failed", str(last_row["failure"]))
    # Before the step is compared: if a rule fires at the last step, the run is early_stopped, not completed.
    if last_row.get("stop_rule"):
        success = find_last_value(rows, "val_success")
        mastery = f"; success was {success:.3g}, so little was left to learn" if has_mastered(rows) else ""
        return RunEnd("early_stopped", format_stop_reason(last_row) + mastery)
    if last_row["step"] == total_steps:
        return RunEnd("completed", f"trained {total_steps} of {total_steps} steps")
    total_text = "" if total_steps is None else f" of {total_steps}"
    return RunEnd("interrupted", f"interrupted after step {last_row['step']}{total_text}")


def has_mastered(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Check whether a run with these rows has mastered its task (see `MASTERED_SUCCESS`)."""
    successes = [parse_finite(find_last_value(rows, name)) or 0.0 for name in ("val_success", "train_success")]
    return min(successes) >= MASTERED_SUCCESS


def find_last_value(rows: Sequence[Mapping[str, Any]], column: str) -> Any:
    """Find the last value of a column that is not missing, or None."""
    return next((row[column] for row in reversed(rows) if row.get(column) is not None), None)


def find_contradiction(
    status: str, rows: Sequence[Mapping[str, Any]], total_steps: int | None, damage: Sequence[str]
) -> str:
    """Explain how the rows of a run contradict its recorded `status`. Empty if they agree.

    Only the status of an ended run is checked, since such a run would be shown as whole and never be trained again.
    damage: from `RunLines.find_damage`.
    """
    if status not in ENDED_STATUSES:
        return ""
    if damage:
        return f"recorded as {status}, but {'; '.join(damage)}"
    end = describe_end(rows, total_steps)
    if end.status == status or (status == CENSORED and end.status in ("interrupted", "never_ran")):
        return ""
    # If the planned number of steps is unknown, the last row of a completed run looks like any other.
    if total_steps is None and status == "completed" and rows:
        return ""
    return f"recorded as {status}, but {end.reason if rows else 'it has no row'}"


def format_stop_reason(row: Mapping[str, Any]) -> str:
    """Describe the decision of a stop rule, from the stop columns of a row."""
    value, threshold, step = (row.get(name) for name in ("stop_value", "stop_threshold", "stop_step"))
    # A file of unknown origin may contain anything.
    if not (isinstance(value, int | float) and isinstance(threshold, int | float)):
        return f"{row['stop_rule']} at step {step}"
    # Two of the rules stop below their threshold, and the rule that counts steps stops when it reaches its threshold.
    comparison = "is below" if value < threshold else "reached"
    return f"{row['stop_rule']} at step {step}: {value:.4g} {comparison} the threshold {threshold:.4g}"


NO_VALID_ACTION = "no reply had a valid action: `transcripts` shows them"
EQUAL_SCORES = "every group had equal scores, so the rewards taught nothing"
ZERO_GRADIENTS = "all gradients were 0, so nothing was learned"
SIGNAL_COLUMNS = (
    "train_invalid_turns",
    "groups",
    "zero_std_groups",
    "groups_kept",
    "train_success",
    "train_pass_at_group",
    "sampled_tokens",
    "train_response_tokens",
    "actor_grad_norm",
)
"""The columns that `find_signal_problem` reads."""
_PROBLEMS = (NO_VALID_ACTION, EQUAL_SCORES, ZERO_GRADIENTS)
MAX_ARMS_LENGTH = 80
"""Maximum characters of a list of arms. Longer lists are left out."""


def find_signal_problem(row: Mapping[str, Any]) -> str:
    """Explain in a clause why nothing could be learned in the step of `row`. Empty if something could, or if unknown.

    Normal runs may have such steps. `describe_missing_signal` looks at all steps of a run.

    Example:
        >>> find_signal_problem({"train_invalid_turns": 1.0})
        'no reply had a valid action: `transcripts` shows them'
        >>> find_signal_problem({"train_invalid_turns": 0.9, "groups": 8, "zero_std_groups": 8, "groups_kept": 0})
        'every group had equal scores, so the rewards taught nothing'
        >>> find_signal_problem({"train_invalid_turns": 0.9, "groups": 8, "zero_std_groups": 7, "groups_kept": 1})
        ''
    """
    if parse_finite(row.get("train_invalid_turns")) == 1:
        return NO_VALID_ACTION
    groups = parse_finite(row.get("groups"))
    if groups and parse_finite(row.get("zero_std_groups")) == groups:
        is_empty = parse_finite(row.get("groups_kept")) == 0
        if is_empty or not _may_differ_between_groups(row, groups):
            return EQUAL_SCORES
    return ZERO_GRADIENTS if parse_finite(row.get("actor_grad_norm")) == 0 else ""


def _may_differ_between_groups(row: Mapping[str, Any], groups: float) -> bool:
    """Check whether scores may differ between groups, although not within them. A critic learns from such a step."""
    names = ("train_success", "train_pass_at_group", "sampled_tokens", "train_response_tokens")
    success, pass_rate, tokens, tokens_per_episode = (parse_finite(row.get(name)) for name in names)
    if success is None or pass_rate is None or tokens is None or tokens_per_episode is None:
        return True
    # A group of one has no spread, whatever its score. The size of groups must be inferred, since no column has it.
    is_single = tokens < 1.5 * groups * tokens_per_episode
    return is_single or 0 < success == pass_rate < 1


def describe_missing_signal(rows: Iterable[Mapping[str, Any]]) -> str:
    """Explain in a clause why a run with these rows could not learn in any step. Empty if it could, or without rows."""
    problems: list[str] = []
    for row in rows:
        problems.append(find_signal_problem(row))
        if not problems[-1]:
            return ""
    # Each problem implies all later ones, so the last is true of every step.
    return max(problems, key=_PROBLEMS.index, default="")


def format_signal_problems(problems: Iterable[tuple[str, str]]) -> list[str]:
    """Format a sentence per problem. problems: for each run, its arm and its problem, empty if it has none.

    Example:
        >>> format_signal_problems([("0", ZERO_GRADIENTS), ("0.1", ""), ("0", ZERO_GRADIENTS)])
        ['In 2 of 3 runs (arm 0), all gradients were 0, so nothing was learned.']
    """
    runs, sentences = list(problems), []
    for problem in _PROBLEMS:
        arms = [arm for arm, text in runs if text == problem]
        names = list(dict.fromkeys(arms))
        listing = f" (arm{'s' if len(names) > 1 else ''} {', '.join(names)})"
        if not arms:
            continue
        if len(runs) == 1:
            sentences.append(f"{problem[0].upper()}{problem[1:]}.")
        elif len(runs) == len(arms):
            sentences.append(f"In all {len(runs)} runs, {problem}.")
        else:
            shown_listing = listing if len(listing) <= MAX_ARMS_LENGTH else ""
            sentences.append(f"In {len(arms)} of {len(runs)} runs{shown_listing}, {problem}.")
    return sentences

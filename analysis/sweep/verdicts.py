"""Write verdicts: one sentence per arm, from its row of `tables.summarize_arms`. Also format numbers."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, SIGNIFICANCE_LEVEL, classify_difference
from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import MIN_SEEDS
from trainable.families import Family
from trainable.runs.history import MASTERED_SUCCESS

MIN_REGIME_RUNS = 6
"""Minimum number of runs, all stopped, of a failed regime: Wilson's interval then begins at 61 %, not at 44 %."""


def format_status(status: str) -> str:
    """Format a status as readable text: `early stopped`, `never ran`."""
    return status.replace("_", " ")


def name_verdict(row: Row, family: Family, *, has_sides: bool = True) -> str:
    """Name the verdict on a difference. row: has `column`, and the columns of a test.

    In the primary outcome an arm is `better` or `worse`. The other columns describe a run without judging it: there an
    arm is `lower` or `higher`. In all of them it may be `equal` within the margin, have `no effect`, or be `open`.
    has_sides: False for an interaction, which compares more than two arms, so that neither side is better.
    """
    if row["column"] != family.primary_column or not has_sides:
        return classify_difference(row, below="lower", above="higher")
    below, above = ("worse", "better") if family.is_higher_better else ("better", "worse")
    return classify_difference(row, below=below, above=above)


def format_number(value: float) -> str:
    """Format a value or threshold with three significant digits."""
    return f"{value:.3g}"


def format_fraction(value: float) -> str:
    """Format a fraction with three decimals, or as a dash if missing."""
    return "–" if np.isnan(value) else f"{value:.3f}"


def count_nouns(count: int, noun: str) -> str:
    """Format a count with its noun: `1 seed`, `3 seeds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_signed(value: float, decimals: int = 3) -> str:
    """Format a difference with its sign, or as a dash if missing."""
    return "–" if np.isnan(value) else f"{value:+.{decimals}f}".replace("-", "−")


format_signed_2 = partial(format_signed, decimals=2)
"""Formats a correlation, a cosine or a shift with two decimals."""
format_signed_4 = partial(format_signed, decimals=4)
"""Formats a difference with four decimals."""


def format_signed_number(value: float) -> str:
    """Format a difference of any size with its sign and two significant digits, or as a dash if missing."""
    return "–" if np.isnan(value) else f"{value:+.2g}".replace("-", "−")


def join_arms(arms: Iterable[str]) -> str:
    """Join the names of arms in a list, writing a common prefix only once.

    >>> join_arms(["KL 0.01", "KL 0.1"]), join_arms(["KL 0.01", "nofilter"])
    ('KL 0.01, 0.1', 'KL 0.01, nofilter')
    """
    names = list(arms)
    beginnings = {name[: name.rfind(" ") + 1] for name in names}
    beginning = beginnings.pop() if len(beginnings) == 1 else ""
    return beginning + ", ".join(name.removeprefix(beginning) for name in names)


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table has no value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def format_interval(low: Any, high: Any, format_value: Callable[[Any], str] = format_signed) -> str:
    """Format an interval as `[−0.1, +0.3]`, with a dash for an open end; empty if both bounds are missing."""
    if is_missing(low) and is_missing(high):
        return ""
    return f"[{', '.join('–' if is_missing(bound) else format_value(bound) for bound in (low, high))}]"


def format_p_value(p: float) -> str:
    """Format a p-value: `p 0.012`, `p < 0.001`, or `p –` without a test."""
    if np.isnan(p):
        return "p –"
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def format_holm(p: float) -> str:
    """Format a Holm-corrected p-value: `Holm p 0.012`, or a note that there are too few seeds for a test."""
    return f"no test below {MIN_SEEDS} seeds" if np.isnan(p) else f"Holm {format_p_value(p)}"


def describe_stops(runs: pd.DataFrame) -> str:
    """Describe how many scored runs each rule stopped, with steps, values and thresholds; empty if no rule did.

    Example: `low_validation_success stopped 1 of 3 runs (step 45: 0.002 < 0.01)`. For a run that had mastered its game,
    the success is added: `step 45: 0.002 < 0.01, at success 0.994`.
    """
    stops_by_rule: dict[str, list[str]] = {}
    for run in to_records(runs[runs["status"] == "early_stopped"]):
        step_text = "" if pd.isna(run["stop_step"]) else f"step {run['stop_step']}: "
        value, threshold = run["stop_value"], run["stop_threshold"]
        # Families without these columns do not show whether a game was mastered.
        success, train_success = (run.get(f"final_{split}_success", math.nan) for split in ("val", "train"))
        is_mastered = success >= MASTERED_SUCCESS and train_success >= MASTERED_SUCCESS
        mastery_text = f", at success {format_number(success)}" if is_mastered else ""
        # Some rules fire below their threshold (success), others at or above it (a count of empty steps).
        sign = "<" if value < threshold else "≥"
        stop_text = f"{step_text}{format_number(value)} {sign} {format_number(threshold)}{mastery_text}"
        stops_by_rule.setdefault(run["stop_rule"] or "a rule", []).append(stop_text)
    return " and ".join(
        f"{rule} stopped {len(stop_texts)} of {len(runs)} runs ({'; '.join(stop_texts)})"
        for rule, stop_texts in stops_by_rule.items()
    )


def describe_unfinished(runs: pd.DataFrame) -> str:
    """List the runs of an arm that neither completed nor were stopped by a rule, with reasons; empty if none."""
    clauses = []
    for run in to_records(runs[~runs["status"].isin(SCORED_STATUSES)]):
        ending = format_status(run["status"])
        if run["status"] not in ("never_ran", "waiting"):
            # The length of the run is missing if run.json was never written.
            total_text = "" if pd.isna(run["steps_total"]) else f" of {run['steps_total']}"
            ending += f" after {run['steps_done']}{total_text} steps"
        # Some reasons say all of it.
        is_told = run["reason"].startswith(run["status"])
        reason_text = f" ({run['reason']})" if run["reason"] else ""
        clauses.append(f"seed {run['seed']} {run['reason'] if is_told else ending + reason_text}")
    return "; ".join(clauses)


def explain_open(rows: Iterable[Row], names: str) -> str:
    """Say why some differences are open although their 95 % intervals leave out 0; empty if there are none.

    rows: have the columns of a test, and their verdict as `outcome` or `verdict`. names: what they are, such as `arms`.
    """
    is_any = any(
        row.get("outcome", row.get("verdict")) == "open"
        and row["difference_low"] * row["difference_high"] > 0
        and row["p_holm"] >= SIGNIFICANCE_LEVEL
        for row in rows
    )
    return is_any * (
        f"An open difference whose 95 % interval leaves out 0 is not resolved: the verdict follows Holm's p, which is "
        f"corrected for the number of {names}, and the interval is not."
    )


def classify_outcome(row: Mapping[str, Any]) -> str:
    """Classify the outcome of an arm by one of a fixed list of words, for sorting and colors.

    Five of them are about the setting: `better`, `worse`, `equal` (within the margin), `no effect` (the rows are equal
    to the last bit), and `open`, which is everything that the runs do not resolve. A significant difference is better
    or worse even if it is smaller than the margin. If rules stopped all scored runs of an arm as failures, it is a
    `failed regime`, whatever its last success was; with fewer than `MIN_REGIME_RUNS` runs it is called `stopped`.
    """
    num_scored = row["completed"] + row["early_stopped"]
    if not num_scored:
        return "no verdict"
    # Checked before the baseline and p-values: such an arm has failed, whatever its last value was.
    if row["failed_stops"] == num_scored:
        return "failed regime" if num_scored >= MIN_REGIME_RUNS else "stopped"
    if row["is_baseline"]:
        return "baseline"
    return classify_difference(row, below="worse", above="better")


def describe_verdict(row: Mapping[str, Any]) -> str:
    """Say what the numbers and the verdict of an arm leave out. row: of `tables.summarize_arms`, with its outcome.

    Of an open arm the text says how large a missed difference could be, or why there is no interval. Runs that failed,
    were interrupted or never ran are listed; they are not scored.
    """
    is_compared = row["outcome"] in ("better", "worse", "equal", "no effect", "open")
    clauses = [
        _explain_outcome(row),
        "the baseline was itself stopped in all runs" if row["baseline_failed"] and is_compared else "",
        row["stops"],
        f"it would be {row['other_scoring']}" if row["other_scoring"] else "",
        f"not scored: {row['unfinished']}" if row["unfinished"] else "",
    ]
    return "; ".join(filter(None, clauses))


def _explain_outcome(row: Mapping[str, Any]) -> str:
    outcome = row["outcome"]
    if outcome in ("failed regime", "stopped", "no verdict"):
        return ""
    if row["is_baseline"] and np.isnan(row["gain"]):
        return "the policy was not validated before training"
    if row["is_baseline"]:
        interval_text = format_interval(row["gain_low"], row["gain_high"]) or "(no interval)"
        return f"{format_signed(row['gain'])} {interval_text} from the policy before training"
    if not row["baseline"]:
        return "the baseline arm is not in this study"
    if outcome == "no comparison":
        return "the baseline or this arm has no scored run with a value"
    if row["equal_rows"]:
        return "every row equals the baseline's"
    if row["se"] == 0:
        return "no interval, because the differences of all seeds are equal"
    if math.isnan(row["se"]):
        is_single = row["completed"] + row["early_stopped"] <= 1
        reason = "one run says nothing about a setting" if is_single else "no arm has runs of two seeds that differ"
        return f"no interval, because {reason}"
    margin_text = format_number(row["margin"])
    if outcome in ("better", "worse"):
        is_small = row["p_equal_holm"] < SIGNIFICANCE_LEVEL
        return f"by less than {margin_text}, {format_holm(row['p_equal_holm'])}" if is_small else ""
    if outcome == "equal":
        return f"within {margin_text}, {format_holm(row['p_equal_holm'])}"
    if row["seeds"] < MIN_SEEDS:
        count = "one seed is" if row["seeds"] == 1 else f"{row['seeds']} seeds are"
        return f"{count} too few for a verdict"
    if np.isnan(row["detectable"]):
        return "more seeds may resolve it"
    # Success lies in [0, 1], so no true difference can be as large as 1.
    if row["detectable"] < 1:
        return f"differences smaller than about {format_fraction(row['detectable'])} would probably be missed"
    return "any difference would probably be missed"

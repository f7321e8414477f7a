"""Parse alarms: thresholds on a column of the rows, such as `reward_std < 0.5 x its first 10 steps`."""

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from trainable.config.setting_types import MAX_FLOAT

BASELINE_STEPS = 10
"""Relative thresholds are multiples of the mean over this many first steps. Source: the published stop rule."""
ALARM_COLUMNS = (
    "reward_std",
    "zero_std_groups",
    "entropy",
    "val_kl_to_reference",
    "pg_clipfrac",
    "actor_grad_norm",
    "critic_grad_norm",
    "explained_variance",
    "train_invalid_turns",
    "train_response_tokens",
    "collapse_trajectory_retrieval_accuracy",
    "collapse_trajectory_mi_estimate",
    "train_success",
)
"""The columns that an alarm can watch."""
MAX_WINDOW = 1000
_PATTERN = re.compile(
    r"(?P<column>\w+) ?(?P<comparison>[<>]) ?(?P<threshold>[-+]?(?:\d+\.?|\d*\.\d+)(?:e[-+]?\d+)?)"
    rf"(?P<relative> ?x(?: its first {BASELINE_STEPS} steps)?)?"
    r"(?:, ?(?P<window>\d{1,4}) times in a row)?"
)


class AlarmRule(NamedTuple):
    """A threshold on a column of the rows."""

    column: str
    """One of `ALARM_COLUMNS`."""
    threshold: float
    """In the unit of the column, or as a multiple of its mean over the first `BASELINE_STEPS` steps."""
    is_relative: bool
    """Whether the threshold is such a multiple."""
    is_upper: bool
    """Whether the rule fires above the threshold; otherwise below."""
    window: int
    """Number of consecutive measurements that must all be beyond the threshold."""

    @property
    def text(self) -> str:
        """The rule as `parse_alarm_rule` reads it: `reward_std < 0.5 x its first 10 steps, 3 times in a row`."""
        comparison = ">" if self.is_upper else "<"
        unit = f" x its first {BASELINE_STEPS} steps" if self.is_relative else ""
        repeat = "" if self.window == 1 else f", {self.window} times in a row"
        return f"{self.column} {comparison} {self.threshold:g}{unit}{repeat}"


def parse_alarm_rule(text: str) -> AlarmRule:
    """Parse the text of a rule. The words after `x` are optional. Raise ValueError if the text is no rule.

    Example:
        >>> parse_alarm_rule("reward_std < 0.5 x, 3 times in a row")
        AlarmRule(column='reward_std', threshold=0.5, is_relative=True, is_upper=False, window=3)
    """
    match = _PATTERN.fullmatch(" ".join(text.split()))
    if match is None or not abs(threshold := float(match["threshold"])) <= MAX_FLOAT:
        raise ValueError(
            'must look like "reward_std < 0.5 x its first 10 steps, 3 times in a row": a column, < or >, a number, '
            "with `x` for a multiple of the mean of the first steps, and how often in a row"
        )
    if match["column"] not in ALARM_COLUMNS:
        raise ValueError(f"no alarm watches {match['column']}: choose from {', '.join(ALARM_COLUMNS)}")
    window = int(match["window"] or 1)
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"{window} times in a row: must be 1 to {MAX_WINDOW}")
    return AlarmRule(match["column"], threshold, match["relative"] is not None, match["comparison"] == ">", window)


def _normalize(text: str) -> str:
    """Normalize the text of a rule, so that equal rules have the same hash. Empty, none and null become empty."""
    return "" if text.strip().lower() in ("", "none", "null") else parse_alarm_rule(text).text


AlarmText = Annotated[str, Field(max_length=200), AfterValidator(_normalize)]

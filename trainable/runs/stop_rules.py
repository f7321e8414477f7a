"""The published stop rules as pure functions of a run's rows. No Ray, no torch: live, replayed and tested alike."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from trainable.config.sections import EarlyStopConfig

Row = Mapping[str, Any]
"""One training step: `step` and the columns of `trainable.runs.records`."""


class StopDecision(NamedTuple):
    """Why a run stops: the rule, the number that broke it, the bound it broke, and the training step."""

    rule: str
    value: float
    threshold: float
    step: int

    def to_columns(self) -> dict[str, Any]:
        """The decision as the stop columns of the row at which it was made."""
        return {f"stop_{name}": value for name, value in self._asdict().items()}


class History(NamedTuple):
    """What the rules read of a run, one entry a training step in ascending order; None is "not measured".

    steps: training steps from 1. reward_std: mean in-group standard deviation of the reward (before the filter).
    groups_kept: groups trained on. val_success: share of solved validation levels, in steps that validated.
    """

    steps: tuple[int, ...]
    reward_std: tuple[float | None, ...]
    groups_kept: tuple[float | None, ...]
    val_success: tuple[float | None, ...]

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> "History":
        """The history that `rows` tell, in the order in which they were written.

        A row whose step was seen before (a run that went back to its last state) replaces it and drops every later
        one. A value that is missing, None, NaN, infinite or no number is None; a row without a whole step is left out.
        """
        attempt_rows: list[Row] = []
        for row in rows:
            step = parse_finite(row.get("step"))
            if step is None or step != int(step):
                continue
            while attempt_rows and attempt_rows[-1]["step"] >= step:
                attempt_rows.pop()
            attempt_rows.append(row)
        series = {name: tuple(parse_finite(row.get(name)) for row in attempt_rows) for name in HISTORY_COLUMNS}
        return cls(tuple(int(row["step"]) for row in attempt_rows), **series)


HISTORY_COLUMNS = History._fields[1:]
"""The columns that the rules read."""


def parse_finite(value: object) -> float | None:
    """`value` as a number, or None for what is no finite number (text, NaN, infinity, None, a truth value)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # A whole number of hundreds of digits.
        return None
    return number if math.isfinite(number) else None


def detect_reward_variance_collapse(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """Groups no longer differ in reward: nothing is left to learn from. The first step at which this holds, or None.

    With v_1, v_2, ... the `reward_std` of the non-empty steps (groups_kept > 0) and b = variance_baseline_steps:
        baseline = mean(v_1 .. v_b);  stop at n >= b + variance_window when
        max(v_{n - variance_window + 1} .. v_n) < variance_ratio * baseline.
    Value: that maximum. Threshold: variance_ratio * baseline. Source: published code (it says variance; the number is
    a standard deviation). A step whose reward_std or groups_kept was not measured counts as empty: it is neither in
    the baseline nor in the window. A baseline of 0 gives threshold 0, which nothing is below.
    """
    observed_stds: list[float] = []
    baseline_steps, window = settings.variance_baseline_steps, settings.variance_window
    for step, std, groups_kept in zip(history.steps, history.reward_std, history.groups_kept, strict=True):
        if std is None or groups_kept is None or groups_kept <= 0:
            continue
        observed_stds.append(std)
        if len(observed_stds) < baseline_steps + window:
            continue
        threshold = settings.variance_ratio * math.fsum(observed_stds[:baseline_steps]) / baseline_steps
        window_max = max(observed_stds[-window:])
        if window_max < threshold:
            return StopDecision("reward_variance_collapse", window_max, threshold, step)
    return None


def detect_low_validation_success(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """The policy solves next to nothing for `success_patience` validations in a row. The first such step, or None.

    Value: the largest val_success of those validations. Threshold: success_threshold (a value equal to it is not
    below). Source: published code. The validation before training has its own column and does not count; a step
    without a measured val_success is no validation: it neither counts nor breaks the row.
    """
    low_successes: list[float] = []
    for step, success in zip(history.steps, history.val_success, strict=True):
        if success is None:
            continue
        low_successes = [*low_successes, success] if success < settings.success_threshold else []
        if len(low_successes) == settings.success_patience:
            return StopDecision("low_validation_success", max(low_successes), settings.success_threshold, step)
    return None


def detect_empty_filtered_steps(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """The filter keeps no group for `empty_stop_steps` steps in a row. The first such step, or None.

    Value: the number of steps in a row. Threshold: empty_stop_steps; 0 or less switches the rule off. Source:
    published code. A step whose groups_kept was not measured is not known to be empty and breaks the row.
    """
    if settings.empty_stop_steps <= 0:
        return None
    consecutive_steps = 0
    for step, groups_kept in zip(history.steps, history.groups_kept, strict=True):
        consecutive_steps = consecutive_steps + 1 if groups_kept == 0 else 0
        if consecutive_steps == settings.empty_stop_steps:
            return StopDecision(
                "empty_filtered_steps", float(consecutive_steps), float(settings.empty_stop_steps), step
            )
    return None


StopRule = Callable[[History, EarlyStopConfig], StopDecision | None]

# In the order in which a training step meets them, which decides when two fire at one step.
RULES: dict[str, StopRule] = {
    "reward_variance_collapse": detect_reward_variance_collapse,
    "empty_filtered_steps": detect_empty_filtered_steps,
    "low_validation_success": detect_low_validation_success,
}


def evaluate_stop_rules(
    rows: Iterable[Row], settings: EarlyStopConfig, rules: tuple[str, ...] = tuple(RULES)
) -> StopDecision | None:
    """The earliest decision of any of `rules` over the rows of one run, or None while none has fired.

    rows: as they were written, the newest last; see `History.from_rows` for repeated steps and odd values. Every
    rule is evaluated. Where several fire at the same step, the order of `RULES` decides, whatever the order of
    `rules`. Over a live run the first row list that gives a decision gives it for its last row; over a recorded run
    the answer is the same. Raises ValueError for a rule that does not exist.
    """
    unknown_rules = [rule for rule in rules if rule not in RULES]
    if unknown_rules:
        raise ValueError(f"There is no stop rule `{unknown_rules[0]}`: name some of {', '.join(RULES)}.")
    history = History.from_rows(rows)
    decisions = [RULES[name](history, settings) for name in RULES if name in rules]
    return min((found for found in decisions if found is not None), key=lambda found: found.step, default=None)

"""The published stop rules, an alarm, and your own rules, as pure functions of a run's rows.

They need neither Ray nor torch, so live runs, replays of recorded runs and tests all use the same functions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainable.config.own_parts import get_part
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import BASELINE_STEPS, AlarmRule, parse_alarm_rule
from trainable.files.json_values import parse_finite
from trainable.runs.run_files import select_rows

Row = Mapping[str, Any]
"""One training step: `step` and columns of `trainable.runs.records`."""


class StopDecision(NamedTuple):
    """Why a run stops: the rule, the value that triggered it, its threshold, and the training step."""

    rule: str
    value: float
    threshold: float
    step: int

    def to_columns(self) -> dict[str, Any]:
        """Convert the decision to the stop columns of the row at which the rule fired."""
        return {f"stop_{name}": value for name, value in self._asdict().items()}


class History(NamedTuple):
    """The columns that the rules read, with one entry per training step in ascending order. None means not measured.

    steps: training steps from 1. reward_std: mean in-group standard deviation of the reward (before the filter).
    groups_kept: groups trained on. val_success: fraction of validation episodes with success, in steps that validate.
    alarm: the column that the setting early_stop.alarm watches; empty without an alarm.
    """

    steps: tuple[int, ...]
    reward_std: tuple[float | None, ...]
    groups_kept: tuple[float | None, ...]
    val_success: tuple[float | None, ...]
    alarm: tuple[float | None, ...] = ()

    @classmethod
    def from_rows(cls, rows: Iterable[Row], settings: EarlyStopConfig) -> "History":
        """Collect the columns that the rules read under these `settings`, from rows in the order of writing.

        If a run went back to an earlier checkpoint, repeated steps count once (see `run_files.select_lines`). Values
        that are missing, NaN, infinite or not numbers become None. Rows without an integer step are skipped.
        """
        rows = select_rows(rows)
        columns = {name: name for name in HISTORY_COLUMNS}
        if settings.alarm:
            columns["alarm"] = parse_alarm_rule(settings.alarm).column
        series = {name: tuple(parse_finite(row.get(column)) for row in rows) for name, column in columns.items()}
        return cls(tuple(row["step"] for row in rows), **series)


HISTORY_COLUMNS = tuple(name for name in History._fields if name not in ("steps", "alarm"))
"""The columns that the published rules read."""


def detect_reward_variance_collapse(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """Find the first step at which rewards within groups have hardly differed for a while, so little is left to learn.

    With v_1, v_2, ... the `reward_std` of the non-empty steps (groups_kept > 0) and b = variance_baseline_steps:
        baseline = mean(v_1 .. v_b);  stop at n >= b + variance_window when
        max(v_{n - variance_window + 1} .. v_n) < variance_ratio * baseline.
    Value: the maximum. Threshold: variance_ratio * baseline. Source: the published code, which calls it variance,
    although it is a standard deviation. Steps without a measured reward_std or groups_kept count as empty, and are
    neither in the baseline nor in the window. Trainers without a filter never measure groups_kept, and have no empty
    step. A baseline of 0 gives a threshold of 0, so the rule never fires.
    """
    observed_stds: list[float] = []
    baseline_steps, window = settings.variance_baseline_steps, settings.variance_window
    measures_groups = False
    for step, std, groups_kept in zip(history.steps, history.reward_std, history.groups_kept, strict=True):
        measures_groups |= groups_kept is not None
        is_empty = measures_groups if groups_kept is None else groups_kept <= 0
        if std is None or is_empty:
            continue
        observed_stds.append(std)
        if len(observed_stds) < baseline_steps + window:
            continue
        threshold = settings.variance_ratio * math.fsum(observed_stds[:baseline_steps]) / baseline_steps
        window_max = max(observed_stds[-window:])
        if window_max < threshold:  # strictly, so that a run whose spread is always 0 (threshold 0) never stops here
            return StopDecision("reward_variance_collapse", window_max, threshold, step)
    return None


def detect_low_validation_success(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """Find the first step that completes `success_patience` consecutive validations below the success threshold.

    Value: the largest val_success of these validations. Threshold: success_threshold; a val_success equal to it resets
    the count. Source: the published code. The validation before training has its own column and does not count. Steps
    without a measured val_success are no validations, so they neither count nor reset the count.
    """
    threshold, patience = settings.success_threshold, settings.success_patience
    rule = AlarmRule("val_success", threshold, is_relative=False, is_upper=False, window=patience)
    decision = find_alarm(history.steps, history.val_success, rule)
    return None if decision is None else decision._replace(rule="low_validation_success")


def detect_empty_filtered_steps(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """Find the first step that completes `empty_stop_steps` consecutive steps in which the filter kept no group.

    Value: the number of consecutive steps. Threshold: empty_stop_steps; 0 or less disables the rule. Source: the
    published code. A step without a measured groups_kept may not be empty, so it resets the count.
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


def find_alarm(steps: Iterable[float], values: Iterable[float | None], rule: AlarmRule) -> StopDecision | None:
    """Find the first step at which the last `rule.window` measurements are all beyond the threshold.

    steps (n,): ascending. values (n,): the column of the rule, None or NaN if not measured. A relative threshold needs
    a positive mean over the first `BASELINE_STEPS` steps, and applies only to later steps. Value: the measurement in
    the window that is nearest to the threshold.

    Example:
        >>> rule = parse_alarm_rule("reward_std < 0.5 x, 2 times in a row")
        >>> find_alarm(range(1, 15), [2] * 10 + [0.9, 1.2, 0.9, 0.8], rule)
        StopDecision(rule='alarm', value=0.9, threshold=1.0, step=14)
    """
    measurements = [
        (step, value) for step, value in zip(steps, values, strict=True) if value is not None and not math.isnan(value)
    ]
    threshold = rule.threshold
    if rule.is_relative:
        baseline = [value for step, value in measurements if step <= BASELINE_STEPS]
        mean = math.fsum(baseline) / len(baseline) if baseline else 0.0
        if mean <= 0:
            return None
        threshold *= mean
        measurements = [(step, value) for step, value in measurements if step > BASELINE_STEPS]
    window: list[float] = []
    for step, value in measurements:
        window = [*window, value] if (value > threshold if rule.is_upper else value < threshold) else []
        if len(window) == rule.window:
            return StopDecision(ALARM, min(window) if rule.is_upper else max(window), threshold, int(step))
    return None


def detect_alarm(history: History, settings: EarlyStopConfig) -> StopDecision | None:
    """Apply the alarm of the setting early_stop.alarm, if it is set (see `find_alarm`)."""
    return find_alarm(history.steps, history.alarm, parse_alarm_rule(settings.alarm)) if settings.alarm else None


ALARM = "alarm"
"""The rule of the setting early_stop.alarm. It applies in every study, but only fires if the setting is set."""

# If several rules fire at the same step, the first one here is reported. They have the order of events in a step:
# rewards are measured, groups are filtered, and the policy is validated. The alarm is last, so that it changes no
# decision of the published rules.
RULES: dict[str, Callable[[History, EarlyStopConfig], StopDecision | None]] = {
    "reward_variance_collapse": detect_reward_variance_collapse,
    "empty_filtered_steps": detect_empty_filtered_steps,
    "low_validation_success": detect_low_validation_success,
    ALARM: detect_alarm,
}


def list_active_rules(settings: EarlyStopConfig) -> tuple[str, ...]:
    """List the rules that can fire under these settings, in the order of `RULES`: the alarm only if it is set."""
    return tuple(rule for rule in RULES if rule != ALARM or settings.alarm)


def evaluate_own_rules(rows: Sequence[Row], names: Iterable[str]) -> StopDecision | None:
    """Apply your own stop rules to the rows of a run so far, and return the decision of the first that stops it.

    names: values of the setting trainer.own_stop_rules. Each rule is a function of the rows that returns None, or
    (value, threshold) to stop. Raises ValueError if a rule returns anything else.
    """
    for name in names:
        answer = get_part(name)(rows)
        if answer is None:
            continue
        rule = name.partition("#")[0]  # without the digest
        numbers = tuple(map(parse_finite, answer)) if isinstance(answer, tuple | list) else ()
        value, threshold = numbers if len(numbers) == 2 else (None, None)
        if value is None or threshold is None:
            raise ValueError(f"stop rule {rule} returned {answer!r}: it must return None, or (value, threshold)")
        return StopDecision(rule, value, threshold, int(rows[-1]["step"]))
    return None


def evaluate_stop_rules(
    rows: Iterable[Row], settings: EarlyStopConfig, rules: tuple[str, ...] = tuple(RULES)
) -> StopDecision | None:
    """Apply stop rules to the rows of a run, and return the earliest decision of any of `rules`, or None.

    rows: in the order of writing; see `History.from_rows` for repeated steps and invalid values. If several rules fire
    at the same step, the order of `RULES` decides, and not the order of `rules`. A live run calls this function after
    every step and stops at the first decision, which is about its last row. With all rows of the recorded run, the
    decision is the same. Raises ValueError for an unknown rule.
    """
    unknown_rules = [rule for rule in rules if rule not in RULES]
    if unknown_rules:
        raise ValueError(f"Unknown stop rule `{unknown_rules[0]}`: choose from {', '.join(RULES)}.")
    history = History.from_rows(rows, settings)
    decisions = filter(None, (rule(history, settings) for name, rule in RULES.items() if name in rules))
    return min(decisions, key=lambda decision: decision.step, default=None)  # at equal steps, `min` keeps the first

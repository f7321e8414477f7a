import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.stop_rules import LiveStopRules
from trainable.config.sections import EarlyStopConfig
from trainable.files.json_values import parse_finite
from trainable.runs.stop_rules import RULES, History, StopDecision, evaluate_stop_rules

SETTINGS = EarlyStopConfig()
SMALL = EarlyStopConfig(
    variance_baseline_steps=2, variance_window=3, variance_ratio=0.5, success_patience=2, empty_stop_steps=2
)
ODD_VALUES = (None, math.nan, math.inf, -math.inf, "2.0", "", [1.0], True, object(), np.array([1.0, 2.0]))


def make_rows(stds: list[float], groups_kept: float = 8) -> list[dict[str, Any]]:
    return [{"step": index + 1, "reward_std": std, "groups_kept": groups_kept} for index, std in enumerate(stds)]


def make_validation_rows(successes: list[float | None], every: int = 10) -> list[dict[str, Any]]:
    return [
        {"step": every * (i + 1), "reward_std": 2.0, "groups_kept": 8, "val_success": value}
        for i, value in enumerate(successes)
    ]


def collapse(value: float, threshold: float, step: int) -> StopDecision:
    return StopDecision("reward_variance_collapse", value, threshold, step)


EMPTY_ROWS = [{"step": step, "groups_kept": 0, "reward_std": 0.0} for step in range(4, 9)]
FIRST_ROW = {"step": 1, "groups_kept": 8, "reward_std": 2.0, "base_val_success": 0.0}
DECISIONS: dict[str, tuple[list[dict[str, Any]], StopDecision | None]] = {
    # Reward-variance collapse: ten baseline steps at 2.0, then ten below 0.2 (specification, section 15, check 3).
    "the twentieth step": (make_rows([2.0] * 10 + [0.19] * 10), collapse(0.19, 0.2, 20)),
    "at the threshold": (make_rows([2.0] * 10 + [0.19] * 9 + [0.2] + [0.19] * 9), None),
    "a baseline of zero": (make_rows([0.0] * 40), None),
    "a trainer without a filter": (
        [{"step": step, "reward_std": 2.0 if step <= 10 else 0.19} for step in range(1, 21)],
        collapse(0.19, 0.2, 20),
    ),
    "a missing spread": (make_rows([2.0] * 10 + [0.19] * 5 + [math.nan] + [0.19] * 5), collapse(0.19, 0.2, 21)),
    # Low validation success.
    "five low validations": (
        make_validation_rows([0.5, 0.004, 0.002, 0.0, 0.006, 0.001]),
        StopDecision("low_validation_success", 0.006, 0.01, 60),
    ),
    "a validation at the threshold": (make_validation_rows([0.0] * 4 + [0.01] + [0.0] * 4), None),
    "the validation before training": ([FIRST_ROW, *make_validation_rows([0.0] * 4)], None),
    # Empty steps.
    "five empty steps": ([*make_rows([2.0] * 3), *EMPTY_ROWS], StopDecision("empty_filtered_steps", 5.0, 5.0, 8)),
    "a step that may not have been empty": (
        [{"step": step, "groups_kept": None if step == 3 else 0} for step in range(1, 8)],
        None,
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_by_hand(name: str) -> None:
    rows, expected = DECISIONS[name]
    assert evaluate_stop_rules(rows, SETTINGS) == expected


def test_empty_steps_are_in_neither_baseline_nor_window() -> None:
    settings = SETTINGS.model_copy(update={"empty_stop_steps": 0})
    nonempty_rows = make_rows([2.0] * 10 + [0.1] * 10)
    rows = [row for step in nonempty_rows for row in ({**step, "groups_kept": 0, "reward_std": 9.0}, step)]
    rows = [{**row, "step": i + 1} for i, row in enumerate(rows)]
    assert evaluate_stop_rules(rows[:-1], settings) is None
    assert evaluate_stop_rules(rows, settings) == StopDecision("reward_variance_collapse", 0.1, 0.2, 40)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_zero_switches_the_rule_off(limit: int) -> None:
    settings = SETTINGS.model_copy(update={"empty_stop_steps": limit})
    assert evaluate_stop_rules(make_rows([0.0] * 30, groups_kept=0), settings) is None


def test_the_earliest_rule_wins_and_then_the_order_of_the_step() -> None:
    low_values = {"reward_std": 0.0, "val_success": 0.0}
    rows = [{"step": s, "groups_kept": 8, "reward_std": 2.0, "val_success": 0.5} for s in (1, 2)]
    rows += [{"step": s, "groups_kept": 8, **low_values} for s in (3, 4, 5)]
    late_success_settings = SMALL.model_copy(update={"success_patience": 3})
    early_success_settings = SMALL.model_copy(update={"success_patience": 2})
    assert evaluate_stop_rules(rows, late_success_settings) == StopDecision("reward_variance_collapse", 0.0, 1.0, 5)
    assert evaluate_stop_rules(rows, early_success_settings) == StopDecision("low_validation_success", 0.0, 0.01, 4)
    empty_rows = [{"step": s, "groups_kept": 0, "val_success": 0.0} for s in (1, 2)]
    rules = ("low_validation_success", "empty_filtered_steps")
    assert evaluate_stop_rules(empty_rows, SMALL, rules) == StopDecision("empty_filtered_steps", 2.0, 2.0, 2)


def test_only_the_named_rules_are_evaluated() -> None:
    rows = make_rows([2.0] * 10 + [0.1] * 10)
    assert evaluate_stop_rules(rows, SETTINGS, ("low_validation_success", "empty_filtered_steps")) is None
    with pytest.raises(ValueError, match="Unknown stop rule `variance`: choose from reward_variance_collapse"):
        evaluate_stop_rules([], SETTINGS, ("variance",))


def test_a_repeated_step_replaces_and_drops_what_came_after() -> None:
    rows = make_rows([2.0, 1.0, 0.5, 0.25])
    repeated_rows = [{"step": 2, "reward_std": 3.0, "groups_kept": 4, "val_success": 0.1}]
    assert History.from_rows(rows + repeated_rows, SETTINGS) == History((1, 2), (2.0, 3.0), (8, 4), (None, 0.1))


@pytest.mark.parametrize("value", ODD_VALUES, ids=[repr(value).partition(" at ")[0] for value in ODD_VALUES])
def test_odd_values_are_not_measured(value: object) -> None:
    assert parse_finite(value) is None
    rows = [{"step": value, "reward_std": 1.0}, {"step": 1, "reward_std": value, "groups_kept": value}]
    assert History.from_rows(rows, SETTINGS) == History((1,), (None,), (None,), (None,))
    assert evaluate_stop_rules([*rows, {}], SETTINGS) is None


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2.0), np.int64(2)], ids=repr)
def test_numbers_of_every_kind_are_measured(number: object) -> None:
    assert parse_finite(number) == 2.0


LEVELS = st.sampled_from([0.0, 0.1, 0.4, 0.5, 1.0, 2.0])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "reward_std": LEVELS,
            "groups_kept": st.sampled_from([0, 0, 1, 8]),
            "val_success": st.sampled_from([None, 0.0, 0.005, 0.01, 0.5]),
        }
    ),
    max_size=40,
).map(lambda rows: [{**row, "step": i + 1} for i, row in enumerate(rows)])


@given(ROWS)
def test_the_pure_rules_do_what_the_live_loop_does(rows: list[dict[str, Any]]) -> None:
    loop = LiveStopRules(SMALL)
    first_firing = next(((row["step"], rules) for row in rows if (rules := loop.feed(row))), None)
    decision = evaluate_stop_rules(rows, SMALL)
    assert (decision is None) == (first_firing is None)
    if decision is not None and first_firing is not None:
        assert decision.step == first_firing[0]
        assert decision.rule == next(rule for rule in RULES if rule in first_firing[1])


ALARMS = st.sampled_from(["", "reward_std < 0.5", "reward_std > 0.3, 3 times in a row", "val_kl_to_reference > 1"])


@given(ROWS, ALARMS)
def test_one_by_one_and_at_once_agree(rows: list[dict[str, Any]], alarm: str) -> None:
    settings = SMALL.model_copy(update={"alarm": alarm})
    live_decisions = [evaluate_stop_rules(rows[: index + 1], settings) for index in range(len(rows))]
    assert evaluate_stop_rules(rows, settings) == next(filter(None, live_decisions), None)


def test_an_alarm_stops_with_its_number_and_gives_way_to_the_published_rules() -> None:
    alarm = EarlyStopConfig(alarm="reward_std < 0.5 x its first 10 steps, 3 times in a row")
    rows = make_rows([2.0] * 10 + [0.9, 1.1, 0.8, 0.7, 0.95, 0.1])
    assert evaluate_stop_rules(rows, alarm) == StopDecision("alarm", 0.95, 1.0, 15)
    assert evaluate_stop_rules(rows[:14], alarm) is None
    assert evaluate_stop_rules(rows, EarlyStopConfig()) is None
    both = EarlyStopConfig(alarm="reward_std < 0.1 x, 10 times in a row")
    decision = evaluate_stop_rules(make_rows([2.0] * 10 + [0.1] * 10), both)
    assert decision is not None
    assert decision.rule == "reward_variance_collapse"


@given(ROWS, st.integers(0, 40), st.integers(0, 40))
def test_going_back_and_training_on_counts_nothing_twice(rows: list[dict[str, Any]], restart: int, end: int) -> None:
    first_rows = rows[:end]
    repeated_rows = [*first_rows, *rows[min(restart, len(first_rows)) :]]
    assert evaluate_stop_rules(repeated_rows, SMALL) == evaluate_stop_rules(rows, SMALL)


@given(ROWS, st.floats(1e-3, 1e3))
def test_the_collapse_rule_does_not_depend_on_the_rewards_unit(rows: list[dict[str, Any]], unit: float) -> None:
    factor = 2.0 ** round(math.log2(unit))
    scaled = [{**row, "reward_std": factor * row["reward_std"]} for row in rows]
    rule = ("reward_variance_collapse",)
    decision, scaled_decision = evaluate_stop_rules(rows, SMALL, rule), evaluate_stop_rules(scaled, SMALL, rule)
    assert (decision is None) == (scaled_decision is None)
    if decision is not None and scaled_decision is not None:
        value, threshold = factor * decision.value, factor * decision.threshold
        assert scaled_decision == decision._replace(value=value, threshold=threshold)

"""Tests of the text of an alarm: it makes the rule that it says, in one form, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.config.setting_types import ALARM_COLUMNS, MAX_ALARM_WINDOW, AlarmRule, parse_alarm_rule
from trainable.runs.records import make_empty_row

RULES = st.builds(
    AlarmRule,
    column=st.sampled_from(ALARM_COLUMNS),
    threshold=st.floats(-1e6, 1e6).map(lambda number: float(f"{number:g}")),
    is_relative=st.booleans(),
    is_upper=st.booleans(),
    window=st.integers(1, MAX_ALARM_WINDOW),
)


@given(RULES)
def test_the_text_of_a_rule_makes_the_rule(rule: AlarmRule) -> None:
    assert parse_alarm_rule(rule.text) == rule
    assert parse_alarm_rule(rule.text.replace(" x its first 10 steps", "x").replace(" < ", "<")) == rule


def test_every_column_is_one_of_the_rows() -> None:
    assert set(ALARM_COLUMNS) <= set(make_empty_row())


def test_the_setting_has_one_form_and_is_in_the_hash_only_where_it_is_set() -> None:
    config = RunConfig()
    alarm = apply_overrides(config, {"early_stop.alarm": "reward_std<.50x,  3 times in a row"})
    assert alarm.early_stop.alarm == "reward_std < 0.5 x its first 10 steps, 3 times in a row"
    assert alarm.dump_for_hash()["early_stop"]["alarm"] == alarm.early_stop.alarm
    assert "alarm" not in config.dump_for_hash()["early_stop"]
    assert apply_overrides(alarm, {"early_stop.alarm": "none"}) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reward_std", "must look like"),
        ("reward_std < low", "must look like"),
        ("reward_std < 1e999", "must look like"),
        ("reward_std < --1", "must look like"),
        ("reward_std = 0.5", "must look like"),
        ("reward_std < 0.5 times its first 10 steps", "must look like"),
        ("reward_std < 0.5; entropy > 1", "must look like"),
        ("val_success < 0.1", "no alarm watches val_success: choose from reward_std, "),
        ("reward_std < 0.5, 0 times in a row", "0 times in a row: must be 1 to 1000"),
        ("reward_std < 0.5, 1001 times in a row", "must be 1 to 1000"),
        ("explained_variance < 0.1", "watches explained_variance, and the run has no critic with"),
        ("val_kl_to_reference > 1", "set trainer.measure_val_kl=true"),
    ],
)
def test_what_is_no_rule_or_never_fires_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        apply_overrides(RunConfig(), {"algorithm.adv_estimator": "grpo", "early_stop.alarm": text})


def test_a_run_obeys_its_alarm_whichever_rules_its_study_has() -> None:
    from trainable.language_model import TRAINER as LANGUAGE_MODEL

    config = apply_overrides(RunConfig(), {"early_stop.alarm": "entropy < 0.5"})
    rows = [{"step": step, "entropy": entropy} for step, entropy in enumerate((0.9, 0.6, 0.4), start=1)]
    for rules in ((), ("low_validation_success",)):
        assert LANGUAGE_MODEL.evaluate_stop_rules(rows[:2], config, rules) is None
        decision = LANGUAGE_MODEL.evaluate_stop_rules(rows, config, rules)
        assert decision is not None
        assert decision.to_columns() == {"stop_rule": "alarm", "stop_value": 0.4, "stop_threshold": 0.5, "stop_step": 3}

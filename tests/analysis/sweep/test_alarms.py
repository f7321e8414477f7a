"""Tests of alarms: the rule against a loop, what counts as announced, and the choice on other runs than the score."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.load import load
from analysis.stats.estimates import wilson_interval
from analysis.sweep import alarms
from analysis.sweep.detectors import list_variants
from analysis.sweep.symptoms import SYMPTOMS
from tests.analysis.sweep.test_symptoms import write_collapse
from tests.fakes.run_folders import FakeRun, write_study
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import ALARM_COLUMNS, BASELINE_STEPS, AlarmRule
from trainable.files.json_lines import read_lines, write_lines
from trainable.runs.stop_rules import History, StopDecision, detect_reward_variance_collapse, find_alarm


def find_alarm_in_arrays(steps: list[int], values: list[float], rule: AlarmRule) -> StopDecision | None:
    """The definition of a rule over all windows at once."""
    x, y = np.array(steps), np.array(values)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    threshold = rule.threshold
    if rule.is_relative:
        is_baseline = x <= BASELINE_STEPS
        if not is_baseline.any() or y[is_baseline].mean() <= 0:
            return None
        threshold *= float(y[is_baseline].mean())
        x, y = x[~is_baseline], y[~is_baseline]
    if len(y) < rule.window:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(y, rule.window)
    is_alarm = (windows > threshold).all(axis=1) if rule.is_upper else (windows < threshold).all(axis=1)
    if not is_alarm.any():
        return None
    index = int(np.argmax(is_alarm))
    value = windows[index].min() if rule.is_upper else windows[index].max()
    return StopDecision("alarm", float(value), threshold, int(x[index + rule.window - 1]))


@given(
    st.lists(st.one_of(st.just(math.nan), st.integers(0, 8).map(lambda n: n / 4)), min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from([0.3, 0.5, 1.1]),
    st.booleans(),
    st.sampled_from(alarms.WINDOWS),
)
def test_an_alarm_is_the_first_streak_beyond_the_threshold(
    values: list[float], is_relative: bool, threshold: float, is_upper: bool, window: int
) -> None:
    rule = AlarmRule("reward_std", threshold, is_relative, is_upper, window)
    steps = list(range(1, len(values) + 1))
    decision, expected = find_alarm(steps, values, rule), find_alarm_in_arrays(steps, values, rule)
    assert (decision is None) == (expected is None)
    if decision and expected:
        assert decision.step == expected.step
        assert (decision.value, decision.threshold) == pytest.approx((expected.value, expected.threshold))


def test_the_rule_with_the_published_numbers_is_the_published_rule() -> None:
    rule = AlarmRule("reward_std", 0.1, True, False, 10)
    for seed in range(20):
        values = np.maximum(np.linspace(3, -0.5 + 0.05 * seed, 60) * np.random.default_rng(seed).random(60), 0)
        history = History(tuple(range(1, 61)), tuple(values), (8,) * 60, (None,) * 60)
        decision = detect_reward_variance_collapse(history, EarlyStopConfig())
        alarm = find_alarm(range(1, 61), values, rule)
        assert (alarm and alarm.step) == (decision and decision.step)


def test_every_symptom_can_be_watched_and_has_thresholds_in_its_direction() -> None:
    assert tuple(symptom.column for symptom in SYMPTOMS) == ALARM_COLUMNS
    for symptom in SYMPTOMS:
        assert bool(symptom.lows) == (symptom.direction <= 0)
        assert bool(symptom.highs) == (symptom.direction >= 0)
        if symptom.is_relative:
            assert all(threshold < 1 for threshold in symptom.lows)
            assert all(threshold > 1 for threshold in symptom.highs)
    texts = [rule.text for rule in alarms.list_rules()]
    assert len(set(texts)) == len(texts)
    assert "reward_std < 0.5 x its first 10 steps, 3 times in a row" in texts
    assert "zero_std_groups > 3.5" in texts


def make_alarms(alarm_steps: dict[int, list[float]], healthy: int = 4) -> pd.DataFrame:
    """Alarms of rules in runs that collapse at step 30, then in `healthy` runs that do not."""
    rows = []
    for number, steps in alarm_steps.items():
        rule, num_collapsed = alarms.list_rules()[number], len(steps) - healthy
        for seed, step in enumerate(steps):
            is_collapse = seed < num_collapsed
            rows.append((rule.text, rule.column, f"run{seed}", "0", seed, is_collapse, 30 if is_collapse else 60, step))
    columns = ["rule", "column", "run_id", "arm", "seed", "is_collapse", "end_step", "alarm_step"]
    return pd.DataFrame(rows, columns=columns)


def test_scores_count_early_and_false_alarms_and_the_chosen_rule_announces_most_and_is_rarely_wrong() -> None:
    nan = math.nan
    table = alarms.score_rules(make_alarms({3: [10, 20, 30, nan, 25, 12, 40, nan, nan, nan]}))
    (row,) = table.to_dict("records")
    assert row["rule"] == alarms.list_rules()[3].text
    assert (row["collapsed"], row["detected"]) == (6, 4)  # an alarm at the collapse announces nothing
    assert (row["healthy"], row["false_alarms"]) == (4, 1)
    assert row["lead"] == np.median([20, 10, 5, 18])
    interval = wilson_interval(4, 6)
    assert (row["detected_fraction_low"], row["detected_fraction_high"]) == (interval.low, interval.high)
    assert (row["false_fraction_low"], row["false_fraction_high"]) == wilson_interval(1, 4)[1:3]
    rules = alarms.list_rules()
    spread_rules = [index for index, rule in enumerate(rules) if rule.column == "reward_std"][:4]
    noisy, good, slow, rare = spread_rules
    # The first announces all and is false in one of four, the last announces one.
    steps = {noisy: [5, 5, 5, 5, 40], good: [20, 20, 20, nan, nan], slow: [28, 28, 28, nan, nan], rare: [5, *[nan] * 4]}
    table = make_alarms({rule: [*numbers, nan, nan, nan] for rule, numbers in steps.items()})
    assert alarms.choose_rules(table) == [rules[good].text]
    assert alarms.choose_rules(table[table["rule"] == rules[noisy].text]) == []


def make_detections(collapsed_seeds: set[int]) -> pd.DataFrame:
    """Alarms of two detectors' variants in runs that collapse at step 30, or not: each variant fires in other seeds."""
    rows = []
    variants = [variant for variant in list_variants() if variant.name in ("rlwatch entropy_collapse", "EvalStop")]
    for number, variant in enumerate(variants):
        for seed in range(12):
            alarm_step = 10.0 if seed % 6 <= number % 5 else math.nan
            rows.append((variant.text, variant.name, "run", "0", seed, seed in collapsed_seeds, 30.0, alarm_step))
    columns = ["rule", "column", "run_id", "arm", "seed", "is_collapse", "end_step", "alarm_step"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.long
def test_detectors_are_scored_as_published_and_tuned_without_the_test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(collapsed_seeds: set[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
        monkeypatch.setattr(alarms, "find_alarms", lambda studies, rules: make_detections(collapsed_seeds))
        table = alarms.compare_detectors([], first_test_seed=6)
        return table[table["thresholds"] == "published"], table[table["thresholds"] == "tuned"]

    published, tuned = compare({0, 1, 2, 6, 7, 8})
    # The number of declines of EvalStop is not known, so it is only tuned.
    assert list(published["rule"]) == ["entropy < 1, 25 in a row from the 20-th on"]
    assert list(tuned["detector"]) == ["rlwatch entropy_collapse", "EvalStop"]
    # The chosen variant fires in all three collapsed runs and in no other.
    assert [(row.detected, row.false_alarms, row.lead) for row in tuned.itertuples()] == [(3, 0, 20), (3, 0, 20)]
    assert (tuned[["collapsed", "healthy"]] == 3).to_numpy().all()
    _, other = compare({0, 1, 2, 9, 10, 11})  # other labels of the test seeds: the same rules, other scores
    assert list(other["rule"]) == list(tuned["rule"])
    assert list(other["detected"]) == [0, 0]
    _, other = compare({0, 6, 7, 8})  # other labels of the lower seeds: other rules
    assert set(other["rule"]).isdisjoint(tuned["rule"])
    published, _ = compare({0, 1, 2})  # collapses on one side alone: chosen and scored on all runs
    assert list(published["collapsed"] + published["healthy"]) == [12]


@pytest.mark.slow
def test_a_run_that_another_study_repeats_counts_once(tmp_path: Path) -> None:
    first, second = (load(write_collapse(tmp_path / name, (10, 12, 14, 9))) for name in ("first", "second"))
    third = load(write_collapse(tmp_path / "third", (11, 12, 14, 9)))  # seed 0 differs, in its spread alone
    ends = alarms.find_distinct_ends([first, second, third])
    assert [list(table["seed"]) for table in ends] == [[0, 1, 2, 3, 0], [], [0]]
    rules = alarms.list_rules()
    once, twice = (alarms.find_alarms(studies, rules) for studies in ([first], [first, second]))
    pd.testing.assert_frame_equal(once, twice)


def test_a_run_that_another_arm_repeats_counts_once(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed) for arm in ("0", "0.1") for seed in (0, 1)]
    folder = write_study(tmp_path, runs)
    first, repeated = (folder / "runs" / name / "metrics.jsonl" for name in ("arm0-seed0", "arm01-seed0"))
    write_lines(repeated, [row | {"run_id": "arm01-seed0", "arm": "0.1"} for row in read_lines(first).records])
    (ends,) = alarms.find_distinct_ends([load(folder)])
    assert list(ends["run_id"]) == ["arm0-seed0", "arm0-seed1", "arm01-seed1"]
    write_lines(repeated, [row | {"val_success": 0.5} for row in read_lines(repeated).records])
    (ends,) = alarms.find_distinct_ends([load(folder)])
    assert len(ends) == len(runs), "its symptoms are the same, but not its success"


@pytest.mark.long
def test_rules_are_scored_on_other_seeds_than_they_were_chosen_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = load(write_collapse(tmp_path, (10, 12, 14, 9)))
    everything = alarms.find_alarms([frames], alarms.list_rules())
    assert set(everything["run_id"]) == {"arm0-seed0", "arm0-seed1", "arm0-seed2", "arm0-seed3", "arm01-seed0"}
    monkeypatch.setattr(alarms, "find_alarms", lambda studies, rules: everything)  # found once, for all comparisons
    table, is_fresh = alarms.compare_alarms([frames], first_test_seed=2)
    assert is_fresh
    assert (table["collapsed"] == 2).all()
    spread = table[table["rule"].str.startswith("reward_std")].iloc[0]
    # The spread falls from step 9 or 14 on, within 8 steps, and the runs are stopped at step 40.
    assert spread["detected"] == 2
    assert 20 < spread["lead"] < 31
    # With collapses on one side alone, rules are chosen and scored on all runs.
    for first_test_seed in (0, 5):
        table, is_fresh = alarms.compare_alarms([frames], first_test_seed)
        assert not is_fresh
        assert (table["collapsed"] == 4).all()
        assert (table["detected"] > 0).all()

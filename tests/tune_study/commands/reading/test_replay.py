import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.strategies.examples import draw_examples
from trainable.config.run_config import ConfigError, RunConfig
from trainable.config.sections import EarlyStopConfig
from trainable.files.json_lines import write_lines
from trainable.files.json_values import read_object, write_object
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.stop_rules import RULES, evaluate_stop_rules
from tune_study.commands.reading.replay import (
    Alarm,
    Replay,
    RuleSummary,
    SkippedRun,
    print_replay,
    replay_folder,
    replay_rules,
)
from tune_study.plan.errors import PlanError

VARIANCE, EMPTY_STEPS, LOW_SUCCESS, _ = RULES
SMALL_THRESHOLDS = EarlyStopConfig(
    variance_baseline_steps=2, variance_window=2, variance_ratio=0.5, success_patience=2, empty_stop_steps=2
)
SMALL_ASSIGNMENTS = [f"early_stop.{name}={value}" for name, value in SMALL_THRESHOLDS.model_dump().items()]

Row = dict[str, Any]


def make_collapsing_rows(
    successes: dict[int, float | None], base_success: float | None = 0.3, alarm_step: int = 4
) -> list[Row]:
    """Make twelve rows whose reward std collapses, so that only the variance rule fires, at step `alarm_step`."""
    rows: list[Row] = [
        {
            "step": step,
            "reward_std": 2.0 if step <= alarm_step - 2 else 0.5,
            "groups_kept": 8,
            "val_success": successes.get(step),
        }
        for step in range(1, 13)
    ]
    rows[0]["base_val_success"] = base_success
    return rows


def find_alarm(rows: list[Row], rule: str = VARIANCE, thresholds: EarlyStopConfig = SMALL_THRESHOLDS) -> Alarm:
    return next(alarm for alarm in replay_rules(rows, thresholds) if alarm.rule == rule)


def write_replay_study(output: Path, runs: dict[str, list[Row]], study: FakeStudy | None = None, **status: Any) -> Path:
    """Write results/<run> with one run per arm, which has the given rows."""
    folder = write_study(output, [FakeRun(arm, **status) for arm in runs], study)
    for arm, rows in runs.items():
        write_lines(folder / "runs" / FakeRun(arm).run_id / METRICS_FILE, rows)
    return folder


def print_lines(replay: Replay) -> list[str]:
    screen = io.StringIO()
    print_replay(Console(file=screen, width=40), replay)
    return screen.getvalue().splitlines()


def find_table_line(lines: list[str], *words: str) -> list[str]:
    """Return the cells of the only line that starts with `words`."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    (matching_line,) = [line for line in cells if line[: len(words)] == list(words)]
    return matching_line


# The decision of each rule against the live decision on growing prefixes, and the outcome against its definition.

SUCCESSES = st.sampled_from([None, math.nan, "0.5", 0.0, 0.005, 0.01, 1 / 3, 0.35, 1.0])
ROWS = st.fixed_dictionaries(
    {
        "reward_std": st.sampled_from([None, math.nan, math.inf, 0.0, 0.1, 0.4, 1.0, 2.0]),
        "groups_kept": st.sampled_from([None, 0, 0, 3, 8]),
    },
    optional={"val_success": SUCCESSES, "base_val_success": SUCCESSES},
)
THRESHOLDS = st.builds(
    EarlyStopConfig,
    variance_baseline_steps=st.integers(1, 3),
    variance_window=st.integers(1, 3),
    variance_ratio=st.sampled_from([0.1, 0.5, 2.0]),
    success_threshold=st.sampled_from([0.01, 0.34, 1.0]),
    success_patience=st.integers(1, 3),
    empty_stop_steps=st.integers(-1, 3),
    alarm=st.sampled_from(["", "reward_std < 0.5", "reward_std > 0.2, 2 times in a row", "reward_std < 0.9 x"]),
)


def is_measured(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def compute_literal_outcome(rows: list[Row], alarm_step: int, threshold: float) -> str:
    """Compute the outcome literally from its definition, in exact arithmetic of the numbers that the floats mean."""

    def round_to_fraction(success: float) -> Fraction:
        return Fraction(success).limit_denominator(1000)

    rows_after = [row for row in rows if row["step"] > alarm_step and is_measured(row.get("val_success"))]
    if not rows_after or rows[-1]["step"] <= rows_after[0]["step"]:
        return "unknown"
    base_successes = [row["base_val_success"] for row in rows if is_measured(row.get("base_val_success"))][:1]
    successes_before = [
        row["val_success"] for row in rows if row["step"] <= alarm_step and is_measured(row.get("val_success"))
    ]
    base_successes = base_successes or sorted(successes_before)[-1:]
    if not base_successes:
        return "unknown"
    last_successes = [round_to_fraction(row["val_success"]) for row in rows_after[max(0, len(rows_after) - 3) :]]
    return (
        "right"
        if sum(last_successes) / len(last_successes)
        < max(round_to_fraction(base_successes[0]), round_to_fraction(threshold))
        else "false alarm"
    )


# The mean of the last validations is the threshold; computed with floats it is slightly below.
AT_THE_THRESHOLD: list[Row] = [
    {"reward_std": None, "groups_kept": None, "base_val_success": 0.0},
    {"reward_std": None, "groups_kept": 0},
    *({"reward_std": None, "groups_kept": None, "val_success": success} for success in (0.01, 0.01, 1.0)),
]
ONE_STEP_THRESHOLDS = EarlyStopConfig(
    variance_baseline_steps=1,
    variance_window=1,
    variance_ratio=0.1,
    success_threshold=0.34,
    success_patience=1,
    empty_stop_steps=1,
)


@draw_examples(300)
@example(drawn_rows=AT_THE_THRESHOLD, thresholds=ONE_STEP_THRESHOLDS)
@given(drawn_rows=st.lists(ROWS, max_size=25), thresholds=THRESHOLDS)
def test_each_rule_fires_where_the_live_run_would_have_stopped(
    drawn_rows: list[Row], thresholds: EarlyStopConfig
) -> None:
    rows = [{**row, "step": step} for step, row in enumerate(drawn_rows, start=1)]
    alarms = replay_rules(rows, thresholds)
    assert [alarm.rule for alarm in alarms] == (list(RULES) if thresholds.alarm else list(RULES)[:-1])
    for alarm in alarms:
        live_decisions = (evaluate_stop_rules(rows[:end], thresholds, (alarm.rule,)) for end in range(len(rows) + 1))
        first_decision = next((decision for decision in live_decisions if decision is not None), None)
        assert alarm.decision == first_decision
        if first_decision is None:
            assert (alarm.outcome, alarm.steps_saved) == (None, 0)
        else:
            assert alarm.outcome == compute_literal_outcome(rows, first_decision.step, thresholds.success_threshold)
            assert alarm.steps_saved == len(rows) - first_decision.step


@draw_examples(25)
@given(drawn_rows=st.lists(ROWS, min_size=1, max_size=20), thresholds=THRESHOLDS)
def test_a_folder_gives_what_its_rows_give(
    drawn_rows: list[Row], thresholds: EarlyStopConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [{**row, "step": step} for step, row in enumerate(drawn_rows, start=1)]
    folder = write_replay_study(tmp_path_factory.mktemp("study"), {"0.01": rows})
    (run,) = replay_folder(folder, [f"{name}={value}" for name, value in thresholds.model_dump().items()]).runs
    assert run.alarms == replay_rules(rows, thresholds)
    assert (run.steps, run.replayed_thresholds) == (len(rows), thresholds)


# Outcomes computed by hand.


@pytest.mark.parametrize(
    ("successes", "outcome"),
    [
        ({5: 0.0, 6: 0.3, 8: 0.4, 10: 0.5}, "false alarm"),  # the last three validations count, not all four
        ({6: 0.3, 8: 0.3, 10: 0.3}, "false alarm"),  # as good as before training counts as recovered
        ({6: 0.2, 8: 0.3, 10: 0.4}, "false alarm"),
        ({6: 0.9, 8: 0.1, 10: 0.1, 12: 0.1}, "right"),  # a good start that does not last
        ({6: 0.3, 8: 0.3, 10: 0.29}, "right"),
        ({6: 0.0, 8: 0.0}, "right"),
        ({6: 1.0, 8: 1.0, 10: 1.0}, "false alarm"),  # no variance, because it solves every level
        ({6: 0.31}, "false alarm"),  # one validation, after which the run continues
        ({6: 0.29}, "right"),
        ({12: 0.9}, "unknown"),  # the run ends at the first validation after the alarm
        ({2: 0.9, 4: 0.9}, "unknown"),  # no validation after the alarm; one at its own step does not count
        ({6: math.nan, 8: None, 10: 0.1}, "right"),
        ({6: math.nan, 12: 0.1}, "unknown"),
    ],
)
def test_outcomes(successes: dict[int, float | None], outcome: str) -> None:
    alarm = find_alarm(make_collapsing_rows(successes))
    assert alarm.decision == (VARIANCE, 0.5, 1.0, 4)
    assert (alarm.outcome, alarm.steps_saved) == (outcome, 8)


@pytest.mark.parametrize(("last_success", "outcome"), [(0.0, "right"), (0.009, "right"), (0.01, "false alarm")])
def test_a_run_that_began_at_nothing_and_ends_at_nothing_was_dead(last_success: float, outcome: str) -> None:
    assert (
        find_alarm(make_collapsing_rows({6: last_success, 8: last_success, 10: last_success}, base_success=0.0)).outcome
        == outcome
    )


@pytest.mark.parametrize("base_success", [None, math.nan])
@pytest.mark.parametrize(
    ("successes", "outcome"),
    [
        ({1: 0.2, 3: 0.1, 6: 0.2, 8: 0.2}, "false alarm"),  # the best validation up to the alarm, not the latest
        ({1: 0.2, 3: 0.1, 6: 0.15, 8: 0.15}, "right"),
        ({4: 0.4, 6: 0.3, 8: 0.3}, "right"),  # the validation at the step of the alarm is included
        ({5: 0.4, 6: 0.3, 8: 0.3}, "unknown"),  # no validation up to the alarm, so there is nothing to compare with
    ],
)
def test_without_a_validation_before_training_the_best_up_to_the_alarm_counts(
    base_success: float | None, successes: dict[int, float | None], outcome: str
) -> None:
    assert find_alarm(make_collapsing_rows(successes, base_success=base_success)).outcome == outcome


def test_shares_that_agree_as_counts_of_levels_agree() -> None:
    for n_solved in range(5, 116):  # 1, 6 and 11 of 120 have a mean that floats put below 6 of 120
        successes = {6: (n_solved - 5) / 120, 8: n_solved / 120, 10: (n_solved + 5) / 120}
        assert find_alarm(make_collapsing_rows(successes, base_success=n_solved / 120)).outcome == "false alarm"
        assert find_alarm(make_collapsing_rows(successes, base_success=n_solved / 120 + 1 / 360)).outcome == "right"


def test_a_run_that_was_stopped_at_its_alarm_is_unknown() -> None:
    assert find_alarm(make_collapsing_rows({2: 0.3, 4: 0.1})[:4]) == Alarm(
        VARIANCE, (VARIANCE, 0.5, 1.0, 4), "unknown", 0
    )


def test_low_success_and_recovery() -> None:
    successes = [0.0, 0.0, 0.0, 0.4, 0.5]
    rows = [
        {"step": step, "base_val_success": 0.3, "val_success": value} for step, value in enumerate(successes, start=1)
    ]
    assert find_alarm(rows, LOW_SUCCESS) == Alarm(
        LOW_SUCCESS, (LOW_SUCCESS, 0.0, 0.01, 2), "false alarm", 3
    )  # (0 + 0.4 + 0.5) / 3 = 0.3
    rows[-1]["val_success"] = 0.49
    assert find_alarm(rows, LOW_SUCCESS).outcome == "right"


# A folder: its runs, the arguments, and the output.


def test_a_study_under_its_own_thresholds(tmp_path: Path) -> None:
    late_rows = make_collapsing_rows({6: 0.4, 8: 0.4}, alarm_step=12)
    runs = {
        "0": late_rows,
        "0.01": make_collapsing_rows({6: 0.4, 8: 0.4}),
        "0.1": make_collapsing_rows({6: 0.1, 8: 0.1}),
    }
    replay = replay_folder(write_replay_study(tmp_path, runs, FakeStudy(extra={"stop_rules": []})), SMALL_ASSIGNMENTS)
    assert [run.arm for run in replay.runs] == ["0", "0.01", "0.1"]
    assert [run.alarms[0].outcome for run in replay.runs] == ["unknown", "false alarm", "right"]
    summary = replay.rules[0]
    assert (summary.rule, summary.runs, summary.fires, summary.unknown_outcomes) == (VARIANCE, 3, 3, 1)
    assert (summary.false_alarms, summary.known_outcomes) == (1, 2)
    assert (summary.ci_low, summary.ci_high) == pytest.approx(
        (0.09453, 0.90547), abs=1e-5
    )  # the Wilson interval, computed by hand
    assert (summary.steps_saved, summary.steps, summary.live_stops) == (0 + 8 + 8, 36, 0)
    assert [(rule.rule, rule.fires, rule.steps_saved) for rule in replay.rules[1:]] == [
        (EMPTY_STEPS, 0, 0),
        (LOW_SUCCESS, 0, 0),
    ]
    assert (replay.rules[1].ci_low, replay.rules[1].ci_high) == (0, 1)


def test_other_thresholds_change_the_answer(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0.01": make_collapsing_rows({})})
    assignment_lists = ([], SMALL_ASSIGNMENTS, [*SMALL_ASSIGNMENTS[:2], "early_stop.variance_ratio=0.1"])
    published_run, small_run, strict_run = (
        replay_folder(folder, assignments).runs[0] for assignments in assignment_lists
    )
    assert (
        published_run.original_thresholds
        == published_run.replayed_thresholds
        == small_run.original_thresholds
        == EarlyStopConfig()
    )
    assert small_run.replayed_thresholds == SMALL_THRESHOLDS
    assert (strict_run.replayed_thresholds.variance_window, strict_run.replayed_thresholds.variance_ratio) == (2, 0.1)
    decisions = [run.alarms[0].decision for run in (published_run, small_run, strict_run)]
    assert decisions == [None, (VARIANCE, 0.5, 1.0, 4), None]


def test_thresholds_that_are_not_replaced_are_each_runs_own(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({}), "0.01": make_collapsing_rows({})})
    path = folder / "runs" / FakeRun("0.01").run_id / "run.json"
    run_json = read_object(path)
    run_json["config"]["early_stop"] = SMALL_THRESHOLDS.model_dump()
    write_object(path, run_json)
    first_run, second_run = replay_folder(folder, []).runs
    assert (first_run.replayed_thresholds, second_run.replayed_thresholds) == (EarlyStopConfig(), SMALL_THRESHOLDS)
    assert (first_run.alarms[0].decision, second_run.alarms[0].decision) == (None, (VARIANCE, 0.5, 1.0, 4))
    replay = replay_folder(folder, ["variance_ratio=0.2"])
    assert [run.replayed_thresholds.variance_window for run in replay.runs] == [10, 2]
    words = print_lines(replay)[0].split(", ")
    assert {"variance_window=10 or 2", "variance_ratio=0.2 (in the study: 0.1 or 0.5)"} <= set(words)


def test_what_really_stopped_a_run_is_counted(tmp_path: Path) -> None:
    rows = make_collapsing_rows({2: 0.3, 4: 0.1})[:4]
    folder = write_replay_study(tmp_path, {"0": rows, "0.01": rows}, status="early_stopped", stop=(VARIANCE, 0.5, 1.0))
    replay = replay_folder(folder, SMALL_ASSIGNMENTS)
    assert [(run.live_rule, run.alarms[0].outcome) for run in replay.runs] == [(VARIANCE, "unknown")] * 2
    assert replay.rules[0] == RuleSummary(VARIANCE, 2, 2, 0, 0, 0.0, 1.0, 2, 0, 8, live_stops=2)
    assert replay_folder(folder, []).rules[0] == RuleSummary(VARIANCE, 2, 0, 0, 0, 0.0, 1.0, 0, 0, 8, live_stops=2)
    assert [rule.live_stops for rule in replay.rules[1:]] == [0, 0]


@pytest.mark.parametrize("status", ["failed", "interrupted", "running", ""])
def test_runs_that_did_not_end_well_take_part_with_the_rows_they_have(tmp_path: Path, status: str) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({6: 0.1, 8: 0.1})[:9]}, status=status)
    (run,) = replay_folder(folder, SMALL_ASSIGNMENTS).runs
    assert (run.steps, run.alarms[0].outcome, run.alarms[0].steps_saved) == (9, "right", 5)


def test_runs_without_rows_are_named(tmp_path: Path) -> None:
    runs = [
        FakeRun("0"),
        FakeRun("2"),
        FakeRun("0.1", status="", steps=0),
        FakeRun("0.01", status="never_ran", steps=0, reason="has not started"),
        FakeRun("1", status="failed", steps=0, reason="out of memory"),
    ]
    folder = write_study(tmp_path, runs)
    (folder / "runs" / "arm2-seed0" / "run.json").write_text("{}")
    replay = replay_folder(folder, [])
    assert [run.run_id for run in replay.runs] == ["arm0-seed0"]
    assert replay.skipped_runs == (
        SkippedRun("arm2-seed0", "its run.json has no valid early_stop settings"),
        SkippedRun("arm01-seed0", "no rows (never_ran)"),
        SkippedRun("arm001-seed0", "no rows (never_ran: has not started)"),
        SkippedRun("arm1-seed0", "no rows (failed: out of memory)"),
    )
    lines = print_lines(replay)
    assert all(f"not replayed: {skipped.run_id}: {skipped.reason}" in lines for skipped in replay.skipped_runs)


@pytest.mark.parametrize("line", ["[]", "3", "null", '"text"', "{}"])
def test_a_line_that_is_no_row_is_no_traceback(tmp_path: Path, line: str) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({})})
    with (folder / "runs" / "arm0-seed0" / METRICS_FILE).open("a") as file:
        file.write(line + "\n")
    replay = replay_folder(folder, [])
    assert [run.run_id for run in (*replay.runs, *replay.skipped_runs)] == ["arm0-seed0"]


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({6: 0.1, 8: 0.1})})
    path = folder / "runs" / "arm0-seed0" / METRICS_FILE
    expected_runs, content = replay_folder(folder, SMALL_ASSIGNMENTS).runs, path.read_bytes()
    for length in range(1, 60, 10):
        path.write_bytes(content + b'{"step": 13, "reward_std": 0.5, "groups_kept": 8, "val_success": 0.9}'[:length])
        assert replay_folder(folder, SMALL_ASSIGNMENTS).runs == expected_runs


def test_an_empty_study(tmp_path: Path) -> None:
    replay = replay_folder(write_study(tmp_path, []), ["variance_ratio=0.2"])
    assert (replay.runs, replay.skipped_runs) == ((), ())
    assert replay.replayed_thresholds[0].variance_ratio == 0.2
    assert [rule[1:5] for rule in replay.rules] == [(0, 0, 0, 0)] * 3
    lines = print_lines(replay)
    assert lines[0].startswith("thresholds (1 changed): ")
    assert "No run of this study has rows yet: there is nothing to replay." in lines


def test_nothing_is_written(tmp_path: Path) -> None:
    folder = write_replay_study(
        tmp_path, {"0": make_collapsing_rows({}), "0.1": make_collapsing_rows({6: 0.1, 8: 0.1})}
    )
    times_before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    print_lines(replay_folder(folder, SMALL_ASSIGNMENTS))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times_before


@pytest.mark.parametrize(
    "key",
    [
        "early_stop.empty_stop_steps",
        "empty_stop_steps",
        "rollout_filter_empty_stop_steps",
        "actor_rollout_ref.rollout.rollout_filter_empty_stop_steps",
        " early_stop.empty_stop_steps ",
    ],
)
def test_every_spelling_of_a_threshold(tmp_path: Path, key: str) -> None:
    rows = [{"step": step, "reward_std": 1.0, "groups_kept": 0} for step in range(1, 5)]
    (run,) = replay_folder(write_replay_study(tmp_path, {"0": rows}), [f"{key}=3"]).runs
    assert run.alarms[1].decision == (EMPTY_STEPS, 3.0, 3.0, 3)


@pytest.mark.parametrize(
    "assignment", ["actor.lr=1", "lr=1", "seed=1", "early_stop.window=3", "early_stop=3", "=3", "x.y.z=", "ä=1"]
)
def test_other_settings_are_refused_with_the_list(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(
        PlanError, match=f"`{assignment.partition('=')[0]}` is not a threshold of a stop rule"
    ) as error_info:
        replay_folder(write_replay_study(tmp_path, {}), [assignment])
    assert all(f"early_stop.{name}" in str(error_info.value) for name in EarlyStopConfig.model_fields)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["empty_stop_steps=3", "rollout_filter_empty_stop_steps=3"], r"`early_stop\.empty_stop_steps` is given twice"),
        (["early_stop.variance_ratio"], "has no value: type --set key=value"),
    ],
)
def test_a_key_has_one_value(tmp_path: Path, assignments: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replay_folder(write_replay_study(tmp_path, {}), assignments)


@pytest.mark.parametrize(
    "assignment",
    ["variance_ratio=-1", "variance_ratio=nan", "variance_ratio=[1]", "variance_window=0", "success_patience="],
)
@pytest.mark.parametrize("arms", [[], ["0"]])
def test_bad_values_are_refused_also_where_no_run_uses_them(tmp_path: Path, assignment: str, arms: list[str]) -> None:
    folder = write_replay_study(tmp_path, {arm: make_collapsing_rows({}) for arm in arms})
    with pytest.raises(ConfigError, match=rf"early_stop\.{assignment.partition('=')[0]}=.*: must be "):
        replay_folder(folder, [assignment])


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="contains no study"):
        replay_folder(tmp_path, [])


@pytest.mark.parametrize("section", [None, 3, {"variance_window": 0}, {"empty": 0}])
def test_a_study_that_this_version_does_not_read_is_refused(tmp_path: Path, section: object) -> None:
    config = RunConfig().model_dump(mode="json")
    with pytest.raises(PlanError, match="is damaged, or from another version"):
        replay_folder(
            write_replay_study(tmp_path, {}, FakeStudy(extra={"settings": {**config, "early_stop": section}})), []
        )


def test_the_first_line_says_which_thresholds_are_the_studys_own(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({})})
    assignment_lists = ([], ["variance_ratio=0.2"], ["variance_ratio=0.2", "success_patience=3", "variance_window=10"])
    unchanged_line, one_change_line, two_changes_line = (
        print_lines(replay_folder(folder, assignments))[0] for assignments in assignment_lists
    )
    assert unchanged_line == (
        "thresholds (those of the study): variance_baseline_steps=10, variance_window=10, variance_ratio=0.1, "
        "success_threshold=0.01, success_patience=5, empty_stop_steps=5"
    )
    assert one_change_line == unchanged_line.replace("(those of the study)", "(1 changed)").replace(
        "ratio=0.1", "ratio=0.2 (in the study: 0.1)"
    )
    assert two_changes_line.startswith("thresholds (2 changed): ")
    assert {"success_patience=3 (in the study: 5)", "variance_window=10"} <= set(two_changes_line.split(", "))


def test_one_line_for_each_run_and_rule_then_one_for_each_rule(tmp_path: Path) -> None:
    runs = {"0": make_collapsing_rows({6: 0.4, 8: 0.4}), "0.01": make_collapsing_rows({6: 0.1, 8: 0.1})}
    lines = print_lines(replay_folder(write_replay_study(tmp_path, runs), SMALL_ASSIGNMENTS))
    assert find_table_line(lines, "run") == [
        "run",
        "arm",
        "seed",
        "rule",
        "fires at step",
        "value",
        "threshold",
        "outcome",
        "steps saved",
    ]
    first_run_id, second_run_id = "arm0-seed0", "arm001-seed0"
    assert find_table_line(lines, first_run_id, "0", "0", VARIANCE)[4:] == ["4", "0.5", "1", "false alarm", "8"]
    assert find_table_line(lines, second_run_id, "0.01", "0", VARIANCE)[4:] == ["4", "0.5", "1", "right", "8"]
    assert find_table_line(lines, first_run_id, "0", "0", LOW_SUCCESS)[4:] == ["not in 12 steps", "-", "-", "-", "-"]
    assert find_table_line(lines, VARIANCE) == [
        VARIANCE,
        "2",
        "2",
        "1 of 2 known",
        "0.09 to 0.91",
        "0",
        "16",
        "66.7 %",
        "0",
    ]
    assert find_table_line(lines, EMPTY_STEPS) == [EMPTY_STEPS, "2", "0", "0 of 0 known", "-", "0", "0", "0.0 %", "0"]
    line_numbers = [
        lines.index(line)
        for line in lines
        if line.startswith((first_run_id, second_run_id, VARIANCE, EMPTY_STEPS, LOW_SUCCESS))
    ]
    assert line_numbers == [2, 3, 4, 5, 6, 7, 10, 11, 12]
    assert any("at least the val_success before training" in line for line in lines)


def test_an_alarm_is_replayed_beside_the_published_rules(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": make_collapsing_rows({6: 0.1, 8: 0.1})})
    lines = print_lines(
        replay_folder(folder, [*SMALL_ASSIGNMENTS[:-1], "early_stop.alarm=reward_std < 1, 3 times in a row"])
    )
    assert lines[0].endswith("alarm=reward_std < 1, 3 times in a row (in the study: none)")
    assert find_table_line(lines, "arm0-seed0", "0", "0", "alarm")[4:] == ["5", "0.5", "1", "right", "7"]
    assert not any("alarm " in line for line in print_lines(replay_folder(folder, SMALL_ASSIGNMENTS))[:5])

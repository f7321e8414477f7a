"""Tests of `replay-stoppers`: decisions are the live ones, an alarm is right where the report counts a collapse."""

import io
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from analysis.data.load import load
from analysis.sweep.alarms import has_recovered
from analysis.sweep.collapse import find_run_ends
from tests.fakes.lines import change_records
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.strategies.examples import draw_examples
from trainable.config.run_config import ConfigError
from trainable.config.sections import EarlyStopConfig
from trainable.files.json_values import DamageWarning, read_object, write_object
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.stop_rules import RULES, History, evaluate_stop_rules
from tune_study.commands.reading.alarms import print_replay, replay_folder
from tune_study.plan.errors import PlanError

VARIANCE, EMPTY_STEPS, LOW_SUCCESS, _ = RULES
SMALL_THRESHOLDS = EarlyStopConfig(
    variance_baseline_steps=2, variance_window=2, variance_ratio=0.5, success_patience=2, empty_stop_steps=2
)
SMALL_ASSIGNMENTS = [f"early_stop.{name}={value}" for name, value in SMALL_THRESHOLDS.model_dump().items()]

Row = dict[str, Any]


def make_collapsing_rows(successes: dict[int, float | None], alarm_step: int = 4) -> list[Row]:
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
    rows[0]["base_val_success"] = 0.3
    return rows


FALLEN = make_collapsing_rows({2: 0.8, 6: 0.1, 8: 0.1})
STEADY = make_collapsing_rows({2: 0.5, 6: 0.5, 8: 0.5})


def write_replay_study(output: Path, runs: dict[str, list[Row]], total_steps: int = 12, **status: Any) -> Path:
    """Write results/<run> with one run per arm, which has the given columns in its rows."""
    fake_runs = [FakeRun(arm, steps=len(rows), **status) for arm, rows in runs.items()]
    folder = write_study(output, fake_runs, FakeStudy(total_steps=total_steps))
    for run in fake_runs:

        def change(records: list[Row], rows: list[Row] = runs[run.arm]) -> None:
            for record, row in zip(records, rows, strict=True):
                record.update({"val_success": None, "base_val_success": None, **row})

        change_records(folder / "runs" / run.run_id / METRICS_FILE, change)
    return folder


def replay(folder: Path, *assignments: str, rule: str = VARIANCE) -> pd.DataFrame:
    """Replay a study, and return the rows of one rule by arm."""
    alarms, _ = replay_folder(folder, assignments)
    return alarms[alarms["rule"] == rule].set_index("arm")


def print_lines(folder: Path, *assignments: str) -> list[str]:
    screen = io.StringIO()
    print_replay(Console(file=screen, width=40), folder, assignments)
    return screen.getvalue().splitlines()


def find_table_line(lines: list[str], *words: str) -> list[str]:
    """Return the cells of the only line that starts with `words`."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    (matching_line,) = [line for line in cells if line[: len(words)] == list(words)]
    return matching_line


SUCCESSES = st.sampled_from([None, 0.0, 0.005, 0.01, 1 / 3, 0.35, 1.0])
ROWS = st.fixed_dictionaries(
    {
        "reward_std": st.sampled_from([None, 0.0, 0.1, 0.4, 1.0, 2.0]),
        "groups_kept": st.sampled_from([None, 0, 0, 3, 8]),
    },
    optional={"val_success": SUCCESSES},
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


@draw_examples(40)
@given(drawn_rows=st.lists(ROWS, min_size=1, max_size=20), thresholds=THRESHOLDS)
def test_each_rule_fires_where_the_live_run_would_have_stopped(
    drawn_rows: list[Row], thresholds: EarlyStopConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [{**row, "step": step} for step, row in enumerate(drawn_rows, start=1)]
    folder = write_replay_study(tmp_path_factory.mktemp("study"), {"0.01": rows}, len(rows))
    alarms, _ = replay_folder(folder, [f"{name}={value}" for name, value in thresholds.model_dump().items()])
    (end,) = find_run_ends(load(folder)).to_dict("records")
    assert list(alarms["rule"]) == (list(RULES) if thresholds.alarm else list(RULES)[:-1])
    for alarm in alarms.to_dict("records"):
        live_decisions = (evaluate_stop_rules(rows[:n], thresholds, (alarm["rule"],)) for n in range(len(rows) + 1))
        first_decision = next((decision for decision in live_decisions if decision is not None), None)
        if first_decision is None:
            assert (alarm["outcome"], alarm["steps_saved"]) == ("", 0)
            assert math.isnan(alarm["alarm_step"])
        else:
            assert (alarm["value"], alarm["threshold"], alarm["alarm_step"]) == first_decision[1:]
            assert alarm["steps_saved"] == len(rows) - first_decision.step
            known = "unknown" if end["signal_problem"] else "right" if end["is_collapse"] else "false alarm"
            assert alarm["outcome"] == known


@pytest.mark.parametrize(
    ("successes", "base_success", "recovered"),
    [
        ({5: 0.0, 6: 0.3, 8: 0.4, 10: 0.2, 12: 0.3}, 0.3, True),  # the last four validations count, not all five
        ({6: 0.3, 8: 0.3, 10: 0.3}, 0.3, True),  # as good as before training
        ({6: 0.9, 8: 0.1, 10: 0.1, 12: 0.05}, 0.3, False),  # a good start that does not last
        ({4: 0.9, 6: 0.3, 8: 0.3, 10: 0.29}, 0.3, False),  # the validation at the step of the alarm does not count
        ({2: 0.9, 4: 0.9}, 0.3, None),  # no validation after the alarm
        ({6: math.nan, 8: None, 10: 0.1}, 0.3, False),
        # A run that began at nothing and ends at nothing did not recover.
        *(({6: last, 10: last}, 0.0, last >= 0.01) for last in (0.0, 0.009, 0.01)),
    ],
)
def test_recovery(successes: dict[int, float | None], base_success: float, recovered: bool | None) -> None:
    history = History.from_rows(make_collapsing_rows(successes), SMALL_THRESHOLDS)
    assert has_recovered(history, 4, base_success, 0.01) is recovered
    assert has_recovered(history, 4, math.nan, 0.01) is None


def test_shares_that_agree_as_counts_of_levels_agree() -> None:
    for num_solved in range(5, 116):  # 1, 6 and 11 of 120 have a mean that floats put below 6 of 120
        successes = {6: (num_solved - 5) / 120, 8: num_solved / 120, 10: (num_solved + 5) / 120}
        history = History.from_rows(make_collapsing_rows(successes), SMALL_THRESHOLDS)
        assert has_recovered(history, 4, num_solved / 120, 0.01)
        assert not has_recovered(history, 4, num_solved / 120 + 1 / 360, 0.01)


def test_thresholds_that_are_not_replaced_are_each_runs_own(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": FALLEN, "0.01": FALLEN})
    path = folder / "runs" / FakeRun("0.01").run_id / "run.json"
    run_json = read_object(path)
    run_json["config"]["early_stop"] = SMALL_THRESHOLDS.model_dump()
    write_object(path, run_json)
    assert list(replay(folder)["outcome"]) == ["", "right"]
    assert list(replay(folder, "variance_ratio=0.2")["outcome"]) == ["", ""]


def test_a_run_that_the_report_does_not_count_has_an_unknown_outcome(tmp_path: Path) -> None:
    outcomes = {"completed": "right", "failed": "unknown", "interrupted": "unknown", "running": "unknown"}
    for status, outcome in outcomes.items():
        folder = write_replay_study(tmp_path / status, {"0": FALLEN[:9]}, total_steps=9, status=status)
        row = replay(folder, *SMALL_ASSIGNMENTS).loc["0"]
        assert (row["steps"], row["outcome"], row["steps_saved"]) == (9, outcome, 5)


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
    with pytest.warns(DamageWarning, match="does not match its checksum"):
        lines = print_lines(folder)
    assert [line for line in lines if line.startswith("not replayed")] == [
        "not replayed: arm2-seed0: its run.json has no valid early_stop settings",
        "not replayed: arm01-seed0: no rows (never_ran: has not started)",
        "not replayed: arm001-seed0: no rows (never_ran: has not started)",
        "not replayed: arm1-seed0: no rows (failed: out of memory)",
    ]
    assert find_table_line(lines, VARIANCE)[:2] == [VARIANCE, "0 of 1"]


def test_an_empty_study(tmp_path: Path) -> None:
    assert print_lines(write_study(tmp_path, []), "variance_ratio=0.2") == [
        "thresholds: those of each run, with variance_ratio=0.2",
        "No run of this study has rows yet: there is nothing to replay.",
    ]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["actor.lr=1"], r"`actor\.lr` is not a threshold of a stop rule: --set takes one of early_stop\.variance_"),
        (["=3"], "not a setting|no setting|Unknown|unknown"),
        (["empty_stop_steps=3", "rollout_filter_empty_stop_steps=3"], r"`early_stop\.empty_stop_steps` is given twice"),
        (["early_stop.variance_ratio"], "has no value: type --set key=value"),
        (["variance_ratio=-1"], r"early_stop\.variance_ratio=.*: must be "),
    ],
)
@pytest.mark.parametrize("arms", [[], ["0"]])
def test_what_is_no_threshold_is_refused_also_where_no_run_uses_it(
    tmp_path: Path, assignments: list[str], message: str, arms: list[str]
) -> None:
    folder = write_replay_study(tmp_path, dict.fromkeys(arms, FALLEN))
    with pytest.raises((PlanError, ConfigError), match=message):
        replay_folder(folder, assignments)


def test_alarms_of_the_runs_and_a_score_of_each_rule(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": STEADY, "0.01": FALLEN})
    times_before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    lines = print_lines(folder, *SMALL_ASSIGNMENTS[:-1], "early_stop.alarm=reward_std < 1, 3 times in a row")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times_before  # nothing is written
    assert lines[0].endswith("early_stop.alarm=reward_std < 1, 3 times in a row")
    first_run, second_run = ("arm0-seed0", "0", "0"), ("arm001-seed0", "0.01", "0")
    assert find_table_line(lines, *first_run, VARIANCE)[4:] == ["4", "0.5", "1", "false alarm", "yes", "8"]
    assert find_table_line(lines, *second_run, VARIANCE)[4:] == ["4", "0.5", "1", "right", "no", "8"]
    assert find_table_line(lines, *second_run, "alarm")[4:] == ["5", "0.5", "1", "right", "no", "7"]
    assert not any(LOW_SUCCESS in line for line in lines if line.startswith("arm0"))  # it does not fire
    # One collapse, announced 4 steps before it, and one false alarm; Wilson's intervals of 1 of 1.
    score = ["1 of 1", "0.21 to 1.00", "4", "1 of 1", "0.21 to 1.00"]
    assert find_table_line(lines, VARIANCE)[1:] == ["2 of 2", "1", "0", *score, "1", "16 (66.7%)", "0"]
    assert find_table_line(lines, EMPTY_STEPS)[1:4] == ["0 of 2", "0", "0"]
    assert any("A run collapses when a rule stops it" in line for line in lines)


def test_what_really_stopped_a_run_is_counted(tmp_path: Path) -> None:
    folder = write_replay_study(tmp_path, {"0": FALLEN[:4]}, status="early_stopped", stop=(VARIANCE, 0.5, 1.0))
    line = find_table_line(print_lines(folder, *SMALL_ASSIGNMENTS), VARIANCE)
    # By definition the run collapsed where the rule stopped it, so its alarm is right but announces nothing.
    assert line[1:5] == ["1 of 1", "1", "0", "0 of 1"]
    assert line[-1] == "1"

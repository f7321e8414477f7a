import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainable.config.sections import EarlyStopConfig
from trainable.runs.records import empty_row
from trainable.runs.stop_rules import RULES
from tune_study.host.interrupt import Interrupt
from tune_study.tune.stoppers import StopRules, Watched

SETTINGS = EarlyStopConfig()


def stopper(folder: Path, *runs: str) -> StopRules:
    return StopRules({run: Watched(folder / run, SETTINGS) for run in runs}, tuple(RULES))


def row(run: str, step: int, std: float = 2.0, **more: Any) -> dict[str, Any]:
    return {**empty_row(), "run_id": run, "step": step, "reward_std": std, "groups_kept": 8, **more}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(each) + "\n" for each in rows)


def test_a_run_ends_at_its_step_and_the_row_says_why(tmp_path: Path) -> None:
    rule = stopper(tmp_path, "a")
    for step in range(1, 20):
        before = row("a", step, 2.0 if step <= 10 else 0.1)
        assert not rule("trial", before)
        assert before["stop_rule"] == ""
    last = row("a", 20, 0.1)
    assert rule("trial", last)
    assert (last["stop_rule"], last["stop_value"], last["stop_step"]) == ("reward_variance_collapse", 0.1, 20)
    assert last["stop_threshold"] == pytest.approx(0.2)


def test_runs_are_watched_apart_and_the_study_goes_on(tmp_path: Path) -> None:
    rule = stopper(tmp_path, "a", "b")
    for step in range(1, 21):
        collapsing = row("a", step, 2.0 if step <= 10 else 0.1)
        assert rule("trial-a", collapsing) == (step == 20)
        assert not rule("trial-b", row("b", step))
        assert not rule.stop_all()


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    rule = stopper(tmp_path, "a")
    for step in [*range(1, 16), *range(12, 20)]:
        assert not rule("trial", row("a", step, 2.0 if step <= 10 else 0.1))
    assert rule("trial", row("a", 20, 0.1))


def test_a_fresh_driver_reads_what_was_before(tmp_path: Path) -> None:
    rows = [row("a", step, 2.0 if step <= 10 else 0.1) for step in range(1, 21)]
    write(tmp_path / "a", rows[:18])
    rule = stopper(tmp_path, "a")
    assert not rule("trial", rows[17])
    assert not rule("trial", rows[18])
    assert rule("trial", rows[19])


def test_what_a_killed_run_had_written_beyond_its_state_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "a", [row("a", step, 2.0 if step <= 10 else 0.1) for step in range(1, 20)])
    rule = stopper(tmp_path, "a")
    assert not rule("trial", row("a", 15, 0.1))
    for step in range(16, 20):
        assert not rule("trial", row("a", step, 0.1))
    assert rule("trial", row("a", 20, 0.1))


def test_a_replayed_last_row_is_given_its_rule_again(tmp_path: Path) -> None:
    rows = [row("a", step, 2.0 if step <= 10 else 0.1) for step in range(1, 21)]
    write(tmp_path / "a", rows)
    replayed = dict(rows[-1])
    assert stopper(tmp_path, "a")("trial", replayed)
    assert (replayed["stop_rule"], replayed["stop_step"]) == ("reward_variance_collapse", 20)


def test_an_interrupt_ends_a_run_at_its_next_row_with_a_state(tmp_path: Path) -> None:
    interrupt = Interrupt(tmp_path / ".interrupt")
    rule = StopRules({"a": Watched(tmp_path / "a", SETTINGS)}, tuple(RULES), interrupt)
    assert not rule("trial", row("a", 1, saved=False))
    interrupt.request()
    on_its_way = row("a", 2, saved=False)
    assert not rule("trial", on_its_way)
    saved = row("a", 3, saved=True)
    assert rule("trial", saved)
    assert saved["stop_rule"] == ""  # no rule has stopped it
    assert rule("trial", row("a", 4))  # a Trainable that says nothing of states
    (tmp_path / ".interrupt").unlink()
    assert rule("trial", row("a", 5, saved=False))  # the run cannot see the request: it would go on for ever


def test_the_rows_of_ended_runs_are_not_kept(tmp_path: Path) -> None:
    rule = stopper(tmp_path, "a", "b", "c")
    for step in range(1, 20):
        assert not rule("trial-a", row("a", step, 2.0 if step <= 10 else 0.1))
        assert not rule("trial-b", row("b", step))
    assert rule("trial-a", row("a", 20, 0.1))
    assert not rule("trial-b", row("b", 20, done=True))
    assert not rule("trial-c", row("c", 1))
    assert list(rule._rows) == ["c"]


def test_it_is_stored_without_rows_and_reads_them_where_they_are(tmp_path: Path) -> None:
    rule = stopper(tmp_path, "a")
    rows = [row("a", step, 2.0 if step <= 10 else 0.1) for step in range(1, 21)]
    for each in rows[:19]:
        assert not rule("trial", each)
    stored = pickle.dumps(rule)
    assert not pickle.loads(stored)("trial", dict(rows[19]))
    write(tmp_path / "a", rows[:19])
    assert pickle.loads(stored)("trial", dict(rows[19]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["run_id", "step", "reward_std", "groups_kept", "val_success"]),
        st.one_of(st.none(), st.text(max_size=3), st.just("a"), st.floats(), st.integers(), st.just([]), st.booleans()),
    )
)
def test_odd_rows_never_raise_and_never_stop(tmp_path: Path, odd: dict[str, Any]) -> None:
    rule = stopper(tmp_path, "a")
    assert not rule("trial", odd)
    assert not rule("trial", {"run_id": "a", **odd, "step": math.nan})


def test_a_torn_file_of_rows_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    write(tmp_path / "a", [row("a", step, 2.0 if step <= 10 else 0.1) for step in range(1, 20)])
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as log:
        log.write(b'{"run_id": "a", "st\xff')
    assert stopper(tmp_path, "a")("trial", row("a", 20, 0.1))

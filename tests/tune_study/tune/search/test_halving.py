"""Tests of successive halving: who goes on at a rung, and that a resumed search decides in the same way."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.lines import append_record
from tests.fakes.plans import plan_search
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.stop_rules import ALARM
from trainable.runs.study_record import StatusRecord
from tune_study.folder.outputs import write_study
from tune_study.folder.statuses import StudyStatuses
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.run import make_run_options
from tune_study.tune.search.halving import SIBLING_REASON, Rungs

NUM_POINTS = 8


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """A search of one seed whose runs are halved from step 5 on."""
    points = {f"point-{number}": {"actor.lr": f"{number}e-4"} for number in range(1, NUM_POINTS)}
    return plan_search(tmp_path_factory.mktemp("search"), points, num_points=NUM_POINTS, grace_steps=5)


def make_row(step: int, value: float | None) -> dict[str, float | int]:
    return {"step": step} if value is None else {"step": step, "val_success": value}


def test_rungs_are_the_grace_steps_times_powers_of_three(plan: StudyPlan) -> None:
    assert Rungs(plan, True, {}).steps == [5, 15, 45]  # of 60 steps


@given(st.lists(st.floats(0, 1), min_size=1, max_size=NUM_POINTS - 1), st.booleans())
def test_a_run_goes_on_if_it_is_among_the_best_third_so_far(
    plan: StudyPlan, values: list[float], is_higher_better: bool
) -> None:
    rungs = Rungs(plan, is_higher_better, {})
    for count, (spec, value) in enumerate(zip(plan.runs[1:], values, strict=False), 1):
        so_far = sorted(values[:count], reverse=is_higher_better)
        # In the first third of the values in order, or as good as its last one.
        is_promoted = count < 3 or value in so_far[: count // 3]
        assert (rungs.decide(spec.run_id, make_row(5, value)) == "") == is_promoted
        assert (spec.run_id in rungs.reasons) != is_promoted


def test_only_rows_with_a_measurement_at_a_new_rung_decide(plan: StudyPlan) -> None:
    rungs = Rungs(plan, True, {})
    first, second, third = plan.runs[1:4]
    for spec, value in ((first, 0.9), (second, 0.8)):
        assert not rungs.decide(spec.run_id, make_row(5, value))
    assert not rungs.decide(third.run_id, make_row(4, 0.1))
    assert not rungs.decide(third.run_id, make_row(5, None))
    assert "2 of 3 runs were better, and the best 1 continue" in rungs.decide(third.run_id, make_row(6, 0.1))
    assert not rungs.decide(second.run_id, make_row(10, 0.0))  # no rung between 5 and 15


def test_the_default_is_compared_with_and_never_stopped(plan: StudyPlan) -> None:
    rungs = Rungs(plan, True, {})
    for spec, value in zip(plan.runs[1:3], (0.9, 0.8), strict=True):
        rungs.decide(spec.run_id, make_row(5, value))
    assert not rungs.decide(plan.runs[0].run_id, make_row(5, 0.0))
    assert "3 of 4" in rungs.decide(plan.runs[3].run_id, make_row(5, -1.0))


def write_rows(plan: StudyPlan, values: dict[int, float]) -> None:
    """Write a row of step 5 for the runs with these numbers."""
    for number, value in values.items():
        run_dir = plan.get_run_dir(plan.runs[number].run_id)
        run_dir.mkdir(parents=True)
        append_record(run_dir / METRICS_FILE, make_row(5, value))


def make_statuses(plan: StudyPlan, statuses: dict[int, str]) -> dict[str, StatusRecord]:
    ids = {number: plan.runs[number].run_id for number in statuses}
    return {ids[number]: StatusRecord(ids[number], status) for number, status in statuses.items()}


def test_a_resumed_search_knows_the_rungs_of_its_rows(plan: StudyPlan, tmp_path: Path) -> None:
    moved = replace(plan, folder=tmp_path)
    write_rows(moved, {1: 0.9, 2: 0.8, 3: 0.7})
    rungs = Rungs(moved, True, make_statuses(plan, {1: "completed", 2: "early_stopped", 3: "censored"}))
    assert not rungs.reasons  # what was decided before is in the statuses
    assert rungs.is_censored(plan.runs[3].arm)
    assert not rungs.is_censored(plan.runs[2].arm)
    assert "1 of 4 runs were better" in rungs.decide(plan.runs[4].run_id, make_row(5, 0.85))


def test_a_run_that_reached_a_rung_as_the_search_was_killed_is_judged_at_its_next_row(
    plan: StudyPlan, tmp_path: Path
) -> None:
    moved = replace(plan, folder=tmp_path)
    write_rows(moved, {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.95})
    rungs = Rungs(moved, True, make_statuses(plan, {1: "completed", 2: "completed"}))
    assert "3 of 4 runs were better" in rungs.decide(plan.runs[3].run_id, make_row(6, None))
    assert not rungs.decide(plan.runs[4].run_id, make_row(6, None))


def test_no_run_of_a_censored_point_goes_on_or_starts(tmp_path: Path) -> None:
    points = {f"point-{number}": {"actor.lr": f"{number}e-4"} for number in (1, 2, 3)}
    plan = plan_search(tmp_path, points, seeds=2, num_points=4, grace_steps=5)
    first, second = ({spec.arm: spec.run_id for spec in plan.runs if spec.seed == seed} for seed in (0, 1))
    rungs = Rungs(plan, True, {})
    for arm, value in (("point-1", 0.9), ("point-2", 0.8)):
        assert not rungs.decide(first[arm], make_row(5, value))
    assert rungs.decide(first["point-3"], make_row(5, 0.1))
    assert rungs.decide(second["point-3"], make_row(1, None)) == SIBLING_REASON
    assert rungs.reasons.keys() == {first["point-3"], second["point-3"]}
    write_study(plan)
    statuses = StudyStatuses(plan)
    statuses.censor_waiting(rungs.is_censored, SIBLING_REASON)
    censored_ids = [status.run_id for status in statuses.list_all() if status.status == "censored"]
    assert censored_ids == [first["point-3"], second["point-3"]]


def test_the_stopper_follows_the_rungs_but_not_for_runs_that_have_ended(plan: StudyPlan) -> None:
    rungs = Rungs(plan, True, {})
    results = [
        {**make_row(5, value), "run_id": spec.run_id}
        for spec, value in zip(plan.runs[1:5], (0.9, 0.8, 0.1, 0.1), strict=True)
    ]
    assert [rungs.ends_trial("trial", result) for result in results[:3]] == [False, False, True]
    assert not rungs.ends_trial("trial", {**results[3], "stop_rule": "low_validation_success"})
    assert rungs._values[5][plan.runs[4].run_id] == 0.1  # others are compared with a run that a rule has stopped
    assert not rungs.ends_trial("trial", {"failure_class": "error", "failure": "before the first row", "done": True})


def test_the_rungs_have_the_rows_with_which_another_stopper_ends_a_run(plan: StudyPlan, tmp_path: Path) -> None:
    rungs, interrupt = Rungs(plan, True, {}), make_interrupt(tmp_path)
    session = SimpleNamespace(plan=plan, interrupt=interrupt, console=None)
    stoppers = make_run_options(session, SimpleNamespace(rungs=rungs))["stop"]
    ids = [spec.run_id for spec in plan.runs[1:5]]
    first, second, third, fourth = (
        {**make_row(5, value), "run_id": run_id, "saved": True}
        for run_id, value in zip(ids, (0.9, 0.8, 0.1, 0.2), strict=True)
    )
    assert not stoppers("trial", first)
    assert stoppers("trial", {**second, "stop_rule": ALARM})
    assert rungs._values[5] == {ids[0]: 0.9, ids[1]: 0.8}
    interrupt.request()
    assert stoppers("trial", third)
    assert "2 of 3 runs were better" in rungs.reasons[ids[2]]
    assert stoppers("trial", fourth)

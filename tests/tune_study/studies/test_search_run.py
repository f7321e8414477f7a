"""Searches with real Ray and real trainers: rounds, continuation, confirmation, and successive halving."""

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from rich.console import Console

from analysis.data.load import load
from analysis.search.points import CENSORED_POINT, COMPLETE, make_points
from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Study
from tests.tune_study.studies.test_sandbox_run import SMALL_SETTINGS
from trainable.runs.study_record import StatusRecord, find_record, read_record
from tune_study.commands.requests import ChosenPreset, LaunchRequest, SearchRequest, StudyRequest
from tune_study.commands.searching import plan_search, run_and_confirm
from tune_study.folder.study_file import plan_from_folder, read_study
from tune_study.plan.search import DEFAULT_POINT
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.callbacks import Recorder
from tune_study.tune.search import rounds

pytestmark = pytest.mark.usefixtures("ray_session")

LAUNCH = LaunchRequest(max_concurrent=2, wandb="off")
RATE = ("lr=1e-4:1e-1",)


@pytest.fixture(autouse=True)
def few_first_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw three points beside the default before any result is used, to have fewer runs."""
    monkeypatch.setattr(rounds, "FIRST_POINTS", 4)


def make_search(
    output: Path,
    study: Study,
    settings: dict[str, object],
    trials: int,
    vary: tuple[str, ...],
    confirm_seeds: int = 0,
    asha: int | None = None,
) -> StudyPlan:
    assignments = [f"{name}={value}" for name, value in settings.items()]
    options = SearchRequest(trials, list(vary), points_per_round=2, confirm_seeds=confirm_seeds, asha=asha)
    study_options = StudyRequest(seeds=2, assignments=assignments, output=output)
    return plan_search(study, ChosenPreset("laptop", "a test"), options, study_options, source=None)


def make_toy_search(output: Path, trials: int, confirm_seeds: int = 0) -> StudyPlan:
    return make_search(output, STUDIES["influence"], SMALL_SETTINGS, trials, RATE, confirm_seeds)


def run(plan: StudyPlan) -> tuple[int, str]:
    console = Console(record=True, width=200, force_terminal=False)
    return run_and_confirm(plan, LAUNCH, False, console), console.export_text()


def test_a_search_is_a_study_whose_arms_are_points(tmp_path: Path) -> None:
    plan = make_toy_search(tmp_path, 2)
    assert run(plan)[0] == 0
    table = make_points(load(plan.folder))
    assert (len(table), set(table["state"]), set(table["seeds"])) == (2, {COMPLETE}, {2})
    # The same command again trains nothing.
    code, text = run(make_toy_search(tmp_path, 2))
    assert (code, "0 of 4 runs remain" in text) == (0, True)


@pytest.mark.slow
def test_a_search_runs_in_rounds_and_ends_with_its_confirmation(tmp_path: Path) -> None:
    shorter = make_toy_search(tmp_path, 4)
    assert len(shorter.points) == 4  # the first ones wait for no result
    assert run(shorter)[0] == 0
    # A search that has ended is continued with more points.
    plan = make_toy_search(tmp_path, 7, confirm_seeds=2)
    code, text = run(plan)
    assert code == 0
    assert "Search: point-4 to point-5 of 6 follow; the best so far is" in text
    assert "Search: point-6 follows" in text
    table = make_points(load(plan.folder))
    assert (len(table), set(table["state"]), set(table["seeds"])) == (7, {COMPLETE}, {2})
    assert dict(list(read_study(plan.folder).points.items())[:4]) == shorter.points
    best = table.loc[table["success"].idxmin(), "arm"]  # an error
    assert (f"The best point is {best} (lr" if best != DEFAULT_POINT else "The best point is the default") in text
    if best != DEFAULT_POINT:
        confirmation = plan_from_folder(plan.folder.with_name(f"{plan.folder.name}-confirm-{best}"))
        assert (confirmation.values, confirmation.seeds) == ((DEFAULT_POINT, best), (2, 3))
        assert all(
            find_record(StatusRecord, confirmation.get_run_dir(spec.run_id)) is not None for spec in confirmation.runs
        )
    # What optuna-dashboard opens.
    storage = JournalStorage(JournalFileBackend(str(plan.folder / "optuna.journal")))
    study = optuna.load_study(study_name=plan.run, storage=storage)
    assert [trial.user_attrs["arm"] for trial in study.trials] == list(table["arm"])
    assert [trial.value for trial in study.trials] == pytest.approx(table["success"].to_list())
    # The same command again trains nothing.
    code, text = run(make_toy_search(tmp_path, 7))
    assert (code, "0 of 14 runs remain" in text) == (0, True)


TINY_SETTINGS = {
    "trainer.total_training_steps": 4,
    "trainer.test_freq": 1,
    "env.env_groups": 2,
    "env.group_size": 4,
    "env.val_env_groups": 24,
    "env.test_env_groups": 8,
}


@pytest.mark.slow
def test_halved_runs_are_censored_and_have_no_outcome(tmp_path: Path) -> None:
    vary = ("actor.lr=1e-4:3e-2",)
    plan = make_search(tmp_path, STUDIES["kl"], TINY_SETTINGS, 6, vary, asha=1)
    code, text = run(plan)
    assert code == 0
    table = make_points(load(plan.folder)).set_index("arm")
    assert set(table["state"]) == {COMPLETE, CENSORED_POINT}
    assert table.loc[DEFAULT_POINT, "state"] == COMPLETE
    assert not table.loc[table["state"] == CENSORED_POINT, "is_feasible"].any()
    for spec in plan.runs:
        status = read_record(StatusRecord, plan.get_run_dir(spec.run_id))
        if table.loc[spec.arm, "state"] == COMPLETE:
            assert status.status == "completed"
        # A run that had trained all its steps when another one of its point was stopped stays as it is.
        elif status.status != "completed":
            assert status.status == "censored"
            assert f"{spec.name} censored: " in text
            assert "a censored run, not a failed one" in status.reason
    assert "censored by successive halving, without an outcome" in text
    # A censored run is over: the same command again trains nothing.
    code, text = run(make_search(tmp_path, STUDIES["kl"], TINY_SETTINGS, 6, vary, asha=1))
    assert (code, "0 of 12 runs remain" in text) == (0, True)


def stop_at_start(plan: StudyPlan, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the study to stop as its run `run_id` ends."""
    end_run = Recorder._end_run

    def end_and_stop(recorder: Recorder, status: StatusRecord) -> None:
        end_run(recorder, status)
        if status.run_id == run_id:
            (plan.folder / ".interrupt").touch()

    monkeypatch.setattr(Recorder, "_end_run", end_and_stop)


@pytest.mark.slow
def test_a_search_that_is_stopped_at_the_end_of_a_round_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_toy_search(tmp_path, 6, confirm_seeds=2)
    with monkeypatch.context() as patched:
        stop_at_start(plan, plan.runs[-1].run_id, patched)
        code, text = run(plan)
    assert (code, "Continue with: python -m tune_study resume" in text) == (130, True)
    assert not list(plan.folder.parent.glob("*-confirm-*"))
    command = read_study(plan.folder).command
    resumed = plan_from_folder(plan.folder)
    code, text = run(resumed)
    assert (code, "Search: point-4 to point-5 of 5 follow" in text) == (0, True)
    assert read_study(plan.folder).command == command
    assert len(make_points(load(plan.folder))) == 6


@pytest.mark.slow
def test_failed_runs_are_results_and_a_round_without_any_other_ends_the_search(tmp_path: Path) -> None:
    # At these rates the numbers of most runs are no longer finite.
    plan = make_search(tmp_path, STUDIES["influence"], SMALL_SETTINGS, 6, ("lr=1e-2:1e30:log",))
    code, text = run(plan)
    statuses = {spec.run_id: find_record(StatusRecord, plan.get_run_dir(spec.run_id)) for spec in plan.runs}
    failed = {run_id for run_id, status in statuses.items() if status is not None and status.status == "failed"}
    assert failed
    assert (code, "point-4" in text) == (0, True)
    table = make_points(load(plan.folder)).set_index("arm")
    assert (table["violations"] > 0).any()
    assert table.loc[DEFAULT_POINT, "is_feasible"]
    # They are not trained again.
    before = {run_id: statuses[run_id] for run_id in failed}
    code, text = run(plan_from_folder(plan.folder))
    assert (code, "0 of 12 runs remain" in text) == (0, True)
    assert {run_id: find_record(StatusRecord, plan.get_run_dir(run_id)) for run_id in failed} == before

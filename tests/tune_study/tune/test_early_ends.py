"""How the driver concludes a study that ends before all of its runs have ended."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from tests.fakes.sessions import make_session
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.folder.outputs import write_study
from tune_study.folder.statuses import make_timestamp
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune import run
from tune_study.tune.session import StudySession


class StoredRows:
    """A storage that has a row of the first run which the local folder lacks."""

    def __init__(self, plan: StudyPlan) -> None:
        self._path = plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE

    def pull(self) -> None:
        append_record(self._path, {"step": 3})


def start_first_run(folder: Path) -> StudySession:
    """A session in which the first run is running."""
    plan = plan_study(folder, preset="paper", trainer__n_gpus_per_node=0)
    write_study(plan)
    session = make_session(plan, storage=StoredRows(plan))
    session.statuses.set(StatusRecord(plan.runs[0].run_id, "running", started_at=make_timestamp()))
    return session


def read_first_reason(session: StudySession) -> str:
    status = read_record(StatusRecord, session.plan.get_run_dir(session.plan.runs[0].run_id))
    assert status.status == "interrupted"
    return status.reason


def test_rows_in_storage_are_fetched_after_ray_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = start_first_run(tmp_path)
    # This process has children of other tests, and goes on.
    monkeypatch.setattr(run, "kill_children", lambda: None)
    exit_codes: list[int] = []
    monkeypatch.setattr(run, "os", SimpleNamespace(_exit=exit_codes.append))
    monkeypatch.setattr(run, "conclude_study", lambda session, problem: 1)
    run._end_without_ray(session, "Ray's process 7 is gone")
    assert read_first_reason(session) == "The study ended early: Ray's process 7 is gone, after step 3"
    assert exit_codes == [1]


def test_an_error_of_tune_is_the_beginning_of_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = start_first_run(tmp_path)

    def fail(*args: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(run, "_fit_tuner", fail)
    monkeypatch.setattr(run, "prepare_environment", lambda *args, **options: None)
    problem = run._train_runs(session)
    summary = problem.removesuffix(": KeyError: 'x'.")
    assert summary != problem
    assert read_first_reason(session) == f"{summary}: KeyError: 'x', after step 3"

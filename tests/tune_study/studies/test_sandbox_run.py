"""Studies of the update-rule sandbox with real Ray and the real trainer; a trial trains all seeds of an arm."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from analysis.data.load import load
from sandboxes.update_rules.family import make_sandbox_study
from search_spaces.catalog import STUDIES
from tests.fakes.plans import plan_study
from tests.fakes.sessions import run_here
from trainable.files.json_values import read_object
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, find_record, write_record
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.study_plan import StudyPlan, set_max_seeds

pytestmark = pytest.mark.usefixtures("ray_session")

SMALL_SETTINGS = {
    "task": "token_reversal",
    "seq_len": 4,
    "d_model": 8,
    "batch_size": 16,
    "trainer.total_training_steps": 12,
    "trainer.test_freq": 5,
    "trainer.resume_every": 5,
}
ARMS = {
    "DG": {"method": "DG"},
    # No sequence of 10 tokens is correct by chance, so all rewards of a group are equal.
    "uniform": {"method": "GRPO", "binary_reward": True, "seq_len": 10, "group_size": 2, "fallback_patience": 3},
    "wrong": {"task": "mnist", "mnist_folder": "no-such-folder"},
}
STUDY = make_sandbox_study("influence", "Does it run?", ARMS, "DG", fixed_settings=SMALL_SETTINGS)


def run_study(plan: StudyPlan) -> tuple[int, str, dict[str, StatusRecord]]:
    code, text = run_here(plan)
    run_statuses = {spec.run_id: find_record(StatusRecord, plan.get_run_dir(spec.run_id)) for spec in plan.runs}
    known_statuses = {run_id: status for run_id, status in run_statuses.items() if status is not None}
    return code, text, known_statuses


def make_plan_in(folder: Path, seeds: int, arms: tuple[str, ...] = tuple(ARMS)) -> StudyPlan:
    return plan_study(folder, arms, seeds, study=STUDY)


def read_rows_without_times(folder: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in read_rows(folder / METRICS_FILE)
    ]


@pytest.fixture(scope="module")
def folder(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mock.patch.dict(STUDIES, influence=STUDY):  # a study that continues is looked up there
        yield tmp_path_factory.mktemp("sandbox")


Start = tuple[StudyPlan, int, str, dict[str, StatusRecord]]


@pytest.fixture(scope="module")
def first_start(folder: Path) -> Start:
    """The study's plan, and what its first start came to. Tests of one tier alone find its folder, too."""
    plan = make_plan_in(folder, 2)
    return plan, *run_study(plan)


def test_every_seed_is_a_run_with_its_own_end(first_start: Start) -> None:
    plan, code, text, statuses = first_start
    assert [[spec.run_id for spec in trial] for trial in plan.trials] == [
        [f"influence-{arm}", f"influence-{arm}-seed1"] for arm in ARMS
    ]
    assert code == 1
    assert "could not be written" not in text
    assert {run_id: status.status for run_id, status in statuses.items()} == {
        "influence-DG": "completed",
        "influence-DG-seed1": "completed",
        "influence-uniform": "early_stopped",
        "influence-uniform-seed1": "early_stopped",
        "influence-wrong": "failed",
        "influence-wrong-seed1": "failed",
    }
    assert "no-such-folder" in statuses["influence-wrong-seed1"].reason
    stopped_status = statuses["influence-uniform"]
    assert stopped_status.stop_rule == "uniform_groups"
    assert (stopped_status.stop_threshold, stopped_status.stop_step) == (3, 2)
    assert stopped_status.reason == "uniform_groups at step 2: 3 reached the threshold 3"
    assert [row["step"] for row in read_rows(plan.get_run_dir("influence-DG-seed1") / METRICS_FILE)] == [0, 5, 10, 12]
    assert "Total: 6 | Success: 4 | Failed: 2 | Early stopped: 2 | Not ended: 0" in plan.summary_log.read_text()


@pytest.mark.usefixtures("first_start")
def test_tables_have_a_row_a_run_and_the_settings_of_its_arm(folder: Path) -> None:
    trials = pd.read_parquet(folder / "results/influence/trials.parquet").set_index("run_id")
    assert len(trials) == 6
    assert (
        trials.loc["influence-DG", "final_test_error"]
        == read_rows(folder / "results/influence/runs/influence-DG" / METRICS_FILE)[-1]["test_error"]
    )
    assert trials.loc["influence-uniform-seed1", "config/method"] == "GRPO"
    assert trials.loc["influence-DG", "steps_done"] == 12


@pytest.mark.slow
@pytest.mark.usefixtures("first_start")
def test_a_second_start_trains_only_what_failed(folder: Path) -> None:
    times_before = {path: path.stat().st_mtime_ns for path in folder.glob("results/influence/runs/*/metrics.jsonl")}
    code, text, _ = run_study(plan_from_folder(folder / "results/influence"))
    assert code == 1
    assert text.count(" and is not run again") == 4
    assert "2 of 6 runs remain" in text
    assert {path: path.stat().st_mtime_ns for path in times_before} == times_before


@pytest.mark.slow
@pytest.mark.usefixtures("first_start")
def test_more_seeds_are_trials_of_their_own(folder: Path, tmp_path: Path) -> None:
    plan = merge_with_folder(make_plan_in(folder, 3, ("DG",)), extend=True)
    code, _, statuses = run_study(
        replace(plan, values=("DG",), runs=tuple(spec for spec in plan.runs if spec.arm == "DG"))
    )
    assert code == 0
    assert statuses["influence-DG-seed2"].status == "completed"
    separate_plan = make_plan_in(tmp_path, 3, ("DG",))
    assert run_study(separate_plan)[0] == 0
    rows, separate_rows = (
        read_rows_without_times(study_plan.get_run_dir("influence-DG-seed2")) for study_plan in (plan, separate_plan)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in separate_rows]
    assert rows[0]["test_error"] == separate_rows[0]["test_error"]
    assert rows[0]["loss"] == pytest.approx(separate_rows[0]["loss"], rel=1e-5)


@pytest.mark.slow
def test_open_arms_get_more_seeds_up_to_the_maximum(ray_session: None, tmp_path: Path) -> None:
    # Networks of two sizes differ by chance alone after a few steps, and nothing is equal within this margin.
    arms = {"small": {"d_model": 8}, "large": {"d_model": 12}}
    study = make_sandbox_study("influence", "Does it look?", arms, "small", fixed_settings=SMALL_SETTINGS)
    study = replace(study, margins={"late_test_error": 1e-6})
    plan = set_max_seeds(plan_study(tmp_path, tuple(arms), 2, study=study), 6)
    with mock.patch.dict(STUDIES, influence=study):
        code, text, _ = run_study(plan)
        last_plan = plan_from_folder(plan.folder)
        # A study that ended at its maximum has nothing to add.
        _, text_again, _ = run_study(last_plan)
    assert code == 0
    # One comparison needs five seeds for any verdict, and two runs at once are one more seed for both arms.
    looks = read_object(plan.folder / "study.json")["looks"]
    assert [(look["runs"], look["seeds"]) for look in looks] == [(4, 2), (10, 5), (12, 6)]
    assert "Open: large. This arm and the baseline get the seeds 0 to 4." in text
    end = "Open: large, after 6 seeds per arm, the maximum (--max-seeds)."
    assert end in text
    assert end in text_again
    assert last_plan.extra_seeds == {"small": (2, 3, 4, 5), "large": (2, 3, 4, 5)}
    assert set(load(plan.folder).trials["status"]) == {"completed"}


@pytest.mark.slow
def test_a_run_that_had_ended_when_the_study_was_killed_keeps_its_end(ray_session: None, tmp_path: Path) -> None:
    """Its last row was on disk but had not been reported; the other seed of its arm had no row."""
    plan = make_plan_in(tmp_path, 2, ("uniform",))
    _, _, statuses_before = run_study(plan)
    for status in statuses_before.values():
        write_record(
            plan.get_run_dir(status.run_id), StatusRecord(status.run_id, "running", started_at=status.started_at)
        )
    shutil.rmtree(plan.get_run_dir("influence-uniform-seed1") / "state")
    (plan.get_run_dir("influence-uniform-seed1") / METRICS_FILE).unlink()
    code, _, statuses_after = run_study(plan)
    assert code == 0
    assert {run_id: (status.status, status.reason) for run_id, status in statuses_after.items()} == {
        run_id: (status.status, status.reason) for run_id, status in statuses_before.items()
    }

"""Tests of the commands `stop` and `clean`."""

from pathlib import Path

import pytest

from tests.tune_study.commands.test_cli import read_files, type_in, write_started_study
from trainable.runs.run_files import STATE_FOLDER
from trainable.runs.study_record import StatusRecord, write_record
from tune_study.folder import outputs
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan


@pytest.fixture
def study(work_dir: Path) -> StudyPlan:
    """A study of the arms 0 and 0.1 that was started."""
    return write_started_study(work_dir)


def test_the_driver_sees_a_request_to_stop(study: StudyPlan) -> None:
    interrupt = make_interrupt(study.folder)
    interrupt.clear()
    with outputs.lock_folder(study.folder):
        code, out, _ = type_in(f"stop {study.folder}")
    assert code == 0
    assert f"To continue: python -m tune_study resume {study.folder}" in out
    assert interrupt.is_requested


def test_one_arm_is_asked_to_stop(study: StudyPlan) -> None:
    interrupt = make_interrupt(study.folder)
    interrupt.clear()
    with outputs.lock_folder(study.folder):
        code, out, _ = type_in(f"stop {study.folder} --arm 'kl 0.1'")
    assert code == 0
    assert "The runs of arm 0.1 stop after the steps under way" in out
    assert interrupt.is_arm_requested("0.1")
    assert not interrupt.is_arm_requested("0")
    assert not interrupt.is_requested


def test_a_study_that_nobody_runs_is_not_stopped(study: StudyPlan) -> None:
    before = read_files(study.folder)
    code, _, err = type_in(f"stop {study.folder}")
    assert code == 2
    assert "No process runs" in err
    assert read_files(study.folder) == before


def test_an_arm_must_exist(study: StudyPlan) -> None:
    with outputs.lock_folder(study.folder):
        code, _, err = type_in(f"stop {study.folder} --arm 0.5")
    assert code == 2
    assert "There is no arm 0.5: type --arm with one of 0, 0.1." in err


@pytest.mark.parametrize("command", ["stop", "clean"])
def test_a_storage_is_refused(work_dir: Path, command: str) -> None:
    code, _, err = type_in(f"{command} s3://shelf/study")
    assert code == 2
    assert "is in a storage" in err


@pytest.fixture
def states(study: StudyPlan) -> dict[str, Path]:
    """Rolling checkpoints of 1000 bytes by arm: the run of arm 0 is completed, that of 0.1 was interrupted."""
    paths = {}
    for spec, status in zip(study.runs, ("completed", "interrupted"), strict=True):
        run_dir = study.get_run_dir(spec.run_id)
        write_record(run_dir, StatusRecord(spec.run_id, status, "a test"))
        paths[spec.arm] = run_dir / STATE_FOLDER
        (paths[spec.arm] / "step_3").mkdir(parents=True)
        (paths[spec.arm] / "step_3" / "state.safetensors").write_bytes(b"x" * 1000)
    return paths


def test_states_of_ended_runs_are_removed(study: StudyPlan, states: dict[str, Path]) -> None:
    before = read_files(study.folder)
    code, out, _ = type_in(f"clean {study.folder} --yes")
    assert code == 0
    assert "Removed 1.0 kB." in out
    assert not states["0"].exists()
    assert states["0.1"].exists()  # the run continues from it
    after = read_files(study.folder)
    assert {name for name in before.keys() - after.keys() if STATE_FOLDER not in name} == set()
    assert all(after[name] == content for name, content in before.items() if name in after)
    assert "Nothing to remove" in type_in(f"clean {study.folder} --yes")[1]


def test_nothing_is_removed_without_consent(study: StudyPlan, states: dict[str, Path]) -> None:
    code, out, _ = type_in(f"clean {study.folder}")
    assert code == 0
    assert "take 1.0 kB" in out
    assert f"To remove it: python -m tune_study clean {study.folder} --yes" in out
    assert states["0"].exists()


def test_a_running_study_is_not_cleaned(study: StudyPlan, states: dict[str, Path]) -> None:
    with outputs.lock_folder(study.folder):
        code, _, err = type_in(f"clean {study.folder} --yes")
    assert code == 2
    assert "Another process is running the study" in err
    assert states["0"].exists()


def test_a_link_in_place_of_a_state_is_not_followed(study: StudyPlan, states: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    states["0"].rename(elsewhere)
    states["0"].symlink_to(elsewhere)
    code, _, err = type_in(f"clean {study.folder} --yes")
    assert code == 2
    assert "link" in err
    assert (elsewhere / "step_3" / "state.safetensors").exists()

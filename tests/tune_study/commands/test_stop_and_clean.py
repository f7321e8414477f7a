"""Tests of the commands `stop` and `clean`."""

from pathlib import Path

import pytest

from tests.fakes.command_line import assert_refused, get_output, read_files, type_in
from tests.fakes.plans import write_started_study
from trainable.runs.run_files import STATE_FOLDER
from trainable.runs.study_record import StatusRecord, write_record
from tune_study.folder import outputs
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan


@pytest.fixture
def study(work_dir: Path) -> StudyPlan:
    """A study of the arms 0 and 0.1 that was started."""
    return write_started_study(work_dir)


@pytest.mark.parametrize(
    ("option", "text"),
    [("", "To continue: python -m tune_study resume"), ("--arm 0.10", "The runs of arm 0.1 stop after the steps")],
)
def test_the_driver_sees_a_request_to_stop(study: StudyPlan, option: str, text: str) -> None:
    interrupt = make_interrupt(study.folder)
    interrupt.clear()
    with outputs.lock_folder(study.folder):
        assert text in get_output(f"stop {study.folder} {option}")
        assert_refused(f"stop {study.folder} --arm 0.5", "There is no arm 0.5: type --arm with one of 0, 0.1.")
    assert interrupt.is_requested == (not option)
    assert interrupt.is_any_arm_requested == bool(option)
    assert [interrupt.is_arm_requested(arm) for arm in ("0", "0.1")] == [False, bool(option)]


def test_a_study_that_nobody_runs_is_not_stopped(study: StudyPlan) -> None:
    before = read_files(study.folder)
    assert_refused(f"stop {study.folder}", "No process runs")
    assert read_files(study.folder) == before


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
    out = get_output(f"clean {study.folder} --yes")
    assert "Removed 1.0 kB." in out
    assert not states["0"].exists()
    assert states["0.1"].exists()  # the run continues from it
    after = read_files(study.folder)
    assert {name for name in before.keys() - after.keys() if STATE_FOLDER not in name} == set()
    assert all(after[name] == content for name, content in before.items() if name in after)
    assert "Nothing to remove" in type_in(f"clean {study.folder} --yes")[1]


def test_nothing_is_removed_without_consent(study: StudyPlan, states: dict[str, Path]) -> None:
    out = get_output(f"clean {study.folder}")
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
    assert_refused(f"clean {study.folder} --yes", "link")
    assert (elsewhere / "step_3" / "state.safetensors").exists()

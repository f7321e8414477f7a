"""A study whose folder was moved: every command works where it lies now, and names what was left behind."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import analysis
from tests.fakes.command_line import assert_refused, get_output, type_words
from tests.fakes.plans import SMALL_SETTINGS, plan_study, train_without_ray
from trainable.runs.study_record import StatusRecord, write_record
from tune_study.plan.study_plan import StudyPlan

SETTINGS = {
    **SMALL_SETTINGS,
    "env.val_env_groups": 2,
    "trainer.total_training_steps": 5,
    "trainer.save_freq": 2,
    "trainer.resume_every": 1,
    "trainer.gradient_analysis_env_groups": 2,
    "trainer.gradient_analysis_group_size": 2,
}
NAME = "-my $HOME 'old' résultats"
"""A folder's name that a shell, an option parser and an ASCII pattern would all misread."""
STEPS_BEFORE_MOVE = 3


@pytest.fixture(scope="module")
def whole_study(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """A study whose only run is interrupted after three of five steps, and has saved a checkpoint at step 2."""
    output = tmp_path_factory.mktemp("old place")
    plan = train_without_ray(plan_study(output, values=("0.1",), **SETTINGS), STEPS_BEFORE_MOVE)
    run_id = plan.runs[0].run_id
    write_record(plan.get_run_dir(run_id), StatusRecord(run_id, "interrupted", "interrupted after step 3 of 5"))
    return plan


@pytest.fixture
def moved_folder(whole_study: StudyPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """results/<run> alone, under another name, in the current folder; its old place does not exist."""
    shutil.copytree(whole_study.folder, tmp_path / "here" / NAME)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    old_output = whole_study.output
    old_output.rename(tmp_path / "hidden")
    try:
        yield tmp_path / "here" / NAME
        assert not old_output.exists()  # nothing is written to the old place
        assert os.listdir(tmp_path / "here") == [NAME]  # nor beside the folder
    finally:
        shutil.rmtree(old_output, ignore_errors=True)
        (tmp_path / "hidden").rename(old_output)


@pytest.mark.long
def test_every_command_reads_a_moved_folder(moved_folder: Path) -> None:
    status = get_output(type_words("status", f"./{NAME}"))
    assert "kl (laptop): unfinished; runs: 1 interrupted" in status
    plan_text = get_output(type_words("resume", str(moved_folder), "--dry-run"))
    assert f"Results: {moved_folder}\n" in plan_text
    assert f"Summary log: {moved_folder}/logs/kl_sweep_sokoban-tiny.log" in plan_text
    assert f"Report: {moved_folder}/report.html" in get_output(type_words("report", f"./{NAME}"))
    assert "reward_variance_collapse" in get_output(type_words("replay-stoppers", str(moved_folder)))
    assert "interrupted at step 3" in get_output(type_words("explain", str(moved_folder)))
    assert analysis.load(moved_folder).steps["step"].tolist() == [1, 2, 3]


@pytest.mark.long
def test_a_probe_names_the_checkpoints_that_were_left_behind(moved_folder: Path, whole_study: StudyPlan) -> None:
    checkpoint_dir = moved_folder / whole_study.runs[0].checkpoint_dir
    error = assert_refused(type_words("probe", moved_folder, "--checkpoint-step", 1))
    assert "has no checkpoint of step 1. Available steps: 2, 3." in error
    assert f"It saves one every 2 steps, in {checkpoint_dir}." in error
    # A rolling checkpoint came along, and a saved one can be named where it is.
    assert "after step 3; nothing is trained" in get_output(type_words("probe", str(moved_folder)))
    assert (moved_folder / "logs").is_dir()
    hidden_path = moved_folder.parent.parent / "hidden" / whole_study.runs[0].checkpoint_dir / "global_step_2"
    assert "after step 2; nothing is trained" in get_output(
        type_words("probe", moved_folder, "--resume-from-path", hidden_path)
    )

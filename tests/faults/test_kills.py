"""Some signals of the table of `make attack`, which tries all of them, to the real command on the real Trainable."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.damaged_files import find_pattern
from tests.attack.kills import Kill, KilledStudy, find_differences, finish, signal_study
from tests.attack.sample_study import list_files
from tests.fakes.ray_frames import check_trials
from tests.fakes.wandb_files import read_wandb_files
from tests.faults.conftest import StudyRegistration
from tests.faults.kills import ONE_PROCESS, STEPS, InterruptedStudy, compare, read_status_output
from trainable.runs.run_files import METRICS_FILE, read_rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

MAIN_KILLS = (Kill("everything", "KILL", "checkpoint"),)
WORKER_KILLS = (
    Kill("worker", "KILL", "resuming"),
    Kill("worker", "SEGV", "between-steps"),
    Kill("worker", "KILL", "checkpoint"),
    Kill("worker", "TERM", "between-steps"),
    Kill("worker", "STOP-CONT", "between-steps"),
    Kill("worker", "KILL", "between-steps"),
)

BACKGROUND_KILLS = (
    Kill("worker", "KILL", "checkpoint"),
    Kill("everything", "KILL", "checkpoint"),
    Kill("worker", "KILL", "checkpoint"),
)


def test_a_killed_driver_loses_nothing(
    tmp_path: Path,
    uninterrupted_study: InterruptedStudy,
    expect_agents_to_end: StudyRegistration,
) -> None:
    killed = KilledStudy(InterruptedStudy(tmp_path, STEPS, ["--wandb=offline", ONE_PROCESS]), random.Random(20))
    expect_agents_to_end(killed.study)
    assert signal_study(killed, MAIN_KILLS) == []
    status_output = read_status_output(killed.study.folder)
    assert "kl (laptop): unfinished" in status_output
    assert " interrupted " in status_output
    assert finish(killed, uninterrupted_study) == ""
    assert killed.sent
    # `resume` continued in the mode of the start, and W&B has every step once.
    files = read_wandb_files(tmp_path)
    assert sorted(files) == sorted(path.name for path in killed.study.find_run_dirs())
    for name, file in files.items():
        assert file.steps == [row["step"] for row in read_rows(killed.study.folder / "runs" / name / METRICS_FILE)]


@pytest.mark.slow
def test_a_killed_trial_goes_on_and_disturbs_no_other(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    killed = KilledStudy(InterruptedStudy(tmp_path, STEPS), random.Random(21))
    assert signal_study(killed, WORKER_KILLS) == []
    assert killed.wait() == ""  # without a resume: the study itself retried the trials
    assert find_differences(killed.study, uninterrupted_study) == ""
    assert len(killed.sent) >= len(WORKER_KILLS) - 1


@pytest.mark.slow
def test_a_kill_during_a_checkpoint_in_the_background_loses_nothing(
    tmp_path: Path, uninterrupted_study: InterruptedStudy
) -> None:
    study = InterruptedStudy(tmp_path, STEPS, ["--set=trainer.async_checkpoints=true"])
    killed = KilledStudy(study, random.Random(22))
    assert signal_study(killed, BACKGROUND_KILLS) == []
    assert finish(killed, uninterrupted_study) == ""
    assert len(killed.sent) >= len(BACKGROUND_KILLS) - 1


def test_every_file_of_a_study_is_in_the_table_of_the_attack(uninterrupted_study: InterruptedStudy) -> None:
    files = [name for name in list_files(uninterrupted_study.output) if name != "command.log"]
    assert [name for name in files if find_pattern(name) is None] == []


def test_trials_agree_with_rays_own_frame(uninterrupted_study: InterruptedStudy) -> None:
    check_trials(uninterrupted_study.folder)


def lose_a_row(study: InterruptedStudy) -> None:
    path = study.find_run_dirs()[0] / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def change_a_row(study: InterruptedStudy) -> None:
    path = study.find_run_dirs()[1] / "metrics.jsonl"
    path.write_text(path.read_text().replace('"groups": 2', '"groups": 3', 1))


def change_a_weight(study: InterruptedStudy) -> None:
    path = next((study.find_run_dirs()[0] / "state").glob("step_*")) / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 64
    path.write_bytes(content)


@pytest.mark.parametrize("damage_study", [lose_a_row, change_a_row, change_a_weight])
def test_the_comparison_sees_harm(
    tmp_path: Path, uninterrupted_study: InterruptedStudy, damage_study: Callable[[InterruptedStudy], None]
) -> None:
    shutil.copytree(uninterrupted_study.output, tmp_path / "copy")
    copy = InterruptedStudy(tmp_path / "copy", STEPS)
    assert compare(copy, uninterrupted_study) == []
    damage_study(copy)
    assert compare(copy, uninterrupted_study)

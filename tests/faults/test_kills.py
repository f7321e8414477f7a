"""Some signals of the table of `make attack`, which tries all of them, to the real command on the real Trainable."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.attack.cells import Cell
from tests.attack.damaged_files import find_pattern
from tests.attack.kills import Kill, KilledStudy, finish, list_batches, signal_study
from tests.attack.sample_study import list_files
from tests.fakes.ray_frames import check_trials
from tests.fakes.wandb_files import read_wandb_files
from tests.faults.conftest import StudyRegistration
from tests.faults.kills import STEPS, InterruptedStudy, Tally, compare, read_status_output
from trainable.runs.run_files import METRICS_FILE, read_rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

MAIN_KILLS = (Kill("everything", "KILL", "checkpoint"),)
START_KILLS = (
    Kill("driver", "KILL", "before-study.json"),
    Kill("driver", "KILL", "ray-starting"),
    Kill("gcs_server", "KILL", "ray-starting"),
    Kill("driver", "KILL", "between-steps"),
)
TRAINING_KILLS = (
    Kill("everything", "KILL", "checkpoint"),
    Kill("everything", "TERM", "between-steps"),
    Kill("driver", "KILL", "resuming"),
)
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


def find_cells(kills: Sequence[Kill]) -> list[Cell]:
    """Find the cells of these signals in the table of the attack."""
    cells = {cell.name: cell for batch in list_batches() for cell in batch}
    return [cells[kill.name] for kill in kills]


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(MAIN_KILLS, id="main"),
        pytest.param(START_KILLS, id="start", marks=pytest.mark.slow),
        pytest.param(TRAINING_KILLS, id="training", marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_loses_nothing(
    tmp_path: Path,
    uninterrupted_study: InterruptedStudy,
    expect_agents_to_end: StudyRegistration,
    kills: Sequence[Kill],
) -> None:
    killed = KilledStudy(InterruptedStudy(tmp_path, STEPS, ["--wandb=offline"]), random.Random(20))
    expect_agents_to_end(killed.study)
    outcomes = signal_study(killed, find_cells(kills))
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    status_output = read_status_output(killed.study.folder)
    assert "kl (laptop): unfinished" in status_output
    assert " interrupted " in status_output
    assert finish(killed, uninterrupted_study) == ""
    assert killed.tally.kills.total() >= max(len(kills) - 1, 1)
    # `resume` continued in the mode of the start, and W&B has every step once.
    files = read_wandb_files(tmp_path)
    assert sorted(files) == sorted(path.name for path in killed.study.find_run_dirs())
    for name, file in files.items():
        assert file.steps == [row["step"] for row in read_rows(killed.study.folder / "runs" / name / METRICS_FILE)]


@pytest.mark.slow
def test_a_killed_trial_goes_on_and_disturbs_no_other(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    killed = KilledStudy(InterruptedStudy(tmp_path, STEPS), random.Random(21))
    outcomes = signal_study(killed, find_cells(WORKER_KILLS))
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    assert killed.wait() == ""  # without a resume: the study itself retried the trials
    assert compare(killed.study, uninterrupted_study, killed.tally) == []
    assert killed.tally.count_errors() == 0
    assert killed.tally.most_recomputed_by_a_kill <= 1  # trainer.resume_every
    assert killed.tally.kills.total() >= len(WORKER_KILLS) - 1


@pytest.mark.slow
def test_a_kill_during_a_checkpoint_in_the_background_loses_nothing(
    tmp_path: Path, uninterrupted_study: InterruptedStudy
) -> None:
    study = InterruptedStudy(tmp_path, STEPS, ["--set=trainer.async_checkpoints=true"])
    killed = KilledStudy(study, random.Random(22))
    outcomes = signal_study(killed, find_cells(BACKGROUND_KILLS))
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    assert finish(killed, uninterrupted_study) == ""
    assert killed.tally.count_errors() == 0
    assert killed.tally.kills.total() >= len(BACKGROUND_KILLS) - 1


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
    copy, tally = InterruptedStudy(tmp_path / "copy", STEPS), Tally()
    assert compare(copy, uninterrupted_study, tally) == []
    damage_study(copy)
    assert compare(copy, uninterrupted_study, tally)
    assert tally.count_errors() > 0

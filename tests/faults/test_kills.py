"""About twenty kills of the real command on the real Trainable; the long form is `make test-faults-long`."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import StudyRegistration
from tests.faults.kills import (
    DRIVER_KILLS,
    STEPS,
    InterruptedStudy,
    Tally,
    compare,
    finish,
    kill_driver,
    kill_trials,
    read_status_output,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TRIAL_KILLS = 8


def test_a_killed_driver_loses_nothing(
    tmp_path: Path, uninterrupted_study: InterruptedStudy, expect_agents_to_end: StudyRegistration
) -> None:
    rng, tally, study = random.Random(20), Tally(), InterruptedStudy(tmp_path, STEPS)
    expect_agents_to_end(study)
    for kill_method in DRIVER_KILLS:
        kill_driver(study, kill_method, rng, tally)
    status_output = read_status_output(study.folder)
    assert "kl (laptop): unfinished" in status_output
    assert " interrupted " in status_output
    finish(study)
    assert compare(study, uninterrupted_study, tally) == []
    assert tally.count_errors() == 0
    assert tally.most_recomputed_by_a_kill <= 1  # trainer.resume_every of the laptop preset
    assert tally.kills.total() >= 7


def test_a_killed_trial_goes_on_and_disturbs_no_other(tmp_path: Path, uninterrupted_study: InterruptedStudy) -> None:
    rng, tally, study = random.Random(21), Tally(), InterruptedStudy(tmp_path, STEPS)
    kill_trials(study, TRIAL_KILLS, rng, tally)
    assert compare(study, uninterrupted_study, tally) == []  # without a resume: the study itself retried the trials
    assert tally.count_errors() == 0
    assert tally.most_recomputed_by_a_kill <= 1
    assert tally.kills.total() == TRIAL_KILLS


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
    import shutil

    shutil.copytree(uninterrupted_study.output, tmp_path / "copy")
    copy, tally = InterruptedStudy(tmp_path / "copy", STEPS), Tally()
    assert compare(copy, uninterrupted_study, tally) == []
    damage_study(copy)
    assert compare(copy, uninterrupted_study, tally)
    assert tally.count_errors() > 0

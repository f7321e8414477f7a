"""About twenty kills of the real command on the real Trainable; the long form is `make test-faults-long`."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Watch
from tests.faults.kills import (
    DRIVER_KILLS,
    STEPS,
    Tally,
    Tormented,
    compare,
    finish,
    kill_driver,
    kill_trials,
    status_of,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TRIAL_KILLS = 8


def test_a_killed_driver_loses_nothing(tmp_path: Path, straight: Tormented, must_lose_its_agents: Watch) -> None:
    dice, tally, study = random.Random(20), Tally(), Tormented(tmp_path, STEPS)
    must_lose_its_agents(study)
    for kind in DRIVER_KILLS:
        kill_driver(study, kind, dice, tally)
    shown = status_of(study.folder)
    assert "kl (laptop): unfinished" in shown
    assert " interrupted " in shown
    finish(study)
    assert compare(study, straight, tally) == []
    assert tally.harm() == 0
    assert tally.most_recomputed_by_a_kill <= 1  # trainer.resume_every of the laptop preset
    assert tally.kills.total() >= 7


def test_a_killed_trial_goes_on_and_disturbs_no_other(tmp_path: Path, straight: Tormented) -> None:
    dice, tally, study = random.Random(21), Tally(), Tormented(tmp_path, STEPS)
    kill_trials(study, TRIAL_KILLS, dice, tally)
    assert compare(study, straight, tally) == []  # with no resume: the study itself tried them again
    assert tally.harm() == 0
    assert tally.most_recomputed_by_a_kill <= 1
    assert tally.kills.total() == TRIAL_KILLS


def lose_a_row(study: Tormented) -> None:
    path = study.run_dirs()[0] / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def change_a_row(study: Tormented) -> None:
    path = study.run_dirs()[1] / "metrics.jsonl"
    path.write_text(path.read_text().replace('"groups": 2', '"groups": 3', 1))


def change_a_weight(study: Tormented) -> None:
    path = next((study.run_dirs()[0] / "state").glob("step_*")) / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [lose_a_row, change_a_row, change_a_weight])
def test_the_comparison_sees_harm(tmp_path: Path, straight: Tormented, harm: Callable[[Tormented], None]) -> None:
    import shutil

    shutil.copytree(straight.output, tmp_path / "copy")
    copy, tally = Tormented(tmp_path / "copy", STEPS), Tally()
    assert compare(copy, straight, tally) == []
    harm(copy)
    assert compare(copy, straight, tally)
    assert tally.harm() > 0

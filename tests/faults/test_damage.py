import random
from pathlib import Path

import pytest

from tests.fakes.trainers import make_quiet_trainer
from tests.faults.damage import (
    DAMAGE_KINDS,
    check_damage,
    is_refused,
    iter_bit_flips,
    iter_cuts,
    write_small_checkpoint,
)
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture
def small_checkpoint(tmp_path: Path) -> Path:
    write_small_checkpoint(tmp_path / "state")
    return tmp_path / "state"


def test_a_checkpoint_cut_at_any_byte_is_refused(small_checkpoint: Path) -> None:
    damages = [
        damage
        for damage in iter_cuts(small_checkpoint)
        if is_refused(small_checkpoint) or pytest.fail(f"{damage} was not seen")
    ]
    assert len(damages) == sum(path.stat().st_size for path in small_checkpoint.iterdir())
    assert read_checkpoint(small_checkpoint)[1]["step"] == 3


def test_a_checkpoint_with_a_flipped_bit_is_refused(small_checkpoint: Path) -> None:
    damages = [
        damage
        for damage in iter_bit_flips(small_checkpoint, random.Random(0))
        if is_refused(small_checkpoint) or pytest.fail(f"{damage} was not seen")
    ]
    assert len(damages) == sum(path.stat().st_size for path in small_checkpoint.iterdir())
    assert read_checkpoint(small_checkpoint)[1]["step"] == 3


def test_a_real_state_damaged_at_random_is_refused(tmp_path: Path) -> None:
    trainer = make_quiet_trainer()
    trainer.step()
    write_checkpoint(tmp_path / "state", *trainer.get_state())
    damage_counts, accepted = check_damage(tmp_path / "state", 200, seed=1, scratch=tmp_path / "scratch")
    assert accepted == []
    assert set(damage_counts) == set(DAMAGE_KINDS)

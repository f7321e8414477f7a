import random
from pathlib import Path

import pytest

from tests.fakes.trainers import make_quiet_trainer
from tests.faults.damage import KINDS, check_damage, every_cut, every_flip, is_refused, write_small
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_small(tmp_path / "state")
    return tmp_path / "state"


def test_cut_at_any_byte_it_is_refused(small: Path) -> None:
    done = [what for what in every_cut(small) if is_refused(small) or pytest.fail(f"{what} was not seen")]
    assert len(done) == sum(path.stat().st_size for path in small.iterdir())
    assert read_checkpoint(small)[1]["step"] == 3


def test_with_a_bit_turned_in_any_byte_it_is_refused(small: Path) -> None:
    done = [
        what for what in every_flip(small, random.Random(0)) if is_refused(small) or pytest.fail(f"{what} was not seen")
    ]
    assert len(done) == sum(path.stat().st_size for path in small.iterdir())
    assert read_checkpoint(small)[1]["step"] == 3


def test_a_real_state_damaged_at_random_is_refused(tmp_path: Path) -> None:
    trainer = make_quiet_trainer()
    trainer.step()
    write_checkpoint(tmp_path / "state", *trainer.get_state())
    done, missed = check_damage(tmp_path / "state", 200, seed=1, scratch=tmp_path / "scratch")
    assert missed == []
    assert set(done) == set(KINDS)

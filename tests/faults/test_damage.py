import random
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize(
    "damages", [iter_cuts, lambda folder: iter_bit_flips(folder, random.Random(0))], ids=["cut", "bit"]
)
def test_a_checkpoint_damaged_at_any_byte_is_refused(
    small_checkpoint: Path, damages: Callable[[Path], Iterator[str]]
) -> None:
    count = 0
    for damage in damages(small_checkpoint):
        assert is_refused(small_checkpoint), damage
        count += 1
    assert count == sum(path.stat().st_size for path in small_checkpoint.iterdir())
    assert read_checkpoint(small_checkpoint)[1]["step"] == 3


def test_a_real_state_damaged_at_random_is_refused(tmp_path: Path) -> None:
    trainer = make_quiet_trainer()
    trainer.step()
    write_checkpoint(tmp_path / "state", *trainer.get_state())
    damage_counts, accepted = check_damage(tmp_path / "state", 200, seed=1, scratch=tmp_path / "scratch")
    assert accepted == []
    assert set(damage_counts) == set(DAMAGE_KINDS)

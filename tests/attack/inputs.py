"""Malformed command lines, settings and folders drawn by hypothesis, and checkpoints damaged at random."""

import random
from pathlib import Path

import pytest

from tests.attack.sample_study import SampleStudy
from tests.faults import malformed, malformed_folders
from tests.faults.damage import check_damage


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(
    ("check", "examples"),
    [
        (malformed.check_command_lines, 250),
        (malformed.check_configurations, 250),
        (malformed_folders.check_folders, 250),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_inputs(rng: random.Random, check: malformed.SeededCheck, examples: int, number: int) -> None:
    assert check(examples, seed=rng.getrandbits(32)).examples >= examples


@pytest.mark.parametrize("number", range(54))
def test_checkpoints(sample: SampleStudy, tmp_path: Path, rng: random.Random, number: int) -> None:
    source = next(sample.folder.glob("runs/*/state/step_*"))
    assert check_damage(source, 40, rng.getrandbits(32), tmp_path / "copy")[1] == []

"""The tables of `make attack`, and attacks on a product that is broken on purpose."""

import itertools
import random
from pathlib import Path

import pytest

from tests.attack.children import ChildError, call_in_child
from tests.attack.damaged_files import CHECKS, DAMAGES, FILES, damage_and_check, find_pattern
from tests.attack.hostile.folders import CHANGES
from tests.attack.kills import STUDIES
from tests.attack.sample_study import SampleStudy, list_files, write_sample_study
from trainable.files import json_lines
from trainable.runs.run_files import RunLines

# The sample study takes twenty seconds; `make test-faults` compares the tables with the files of a real study.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleStudy:
    return write_sample_study(tmp_path_factory.mktemp("attack"), with_ray=False, with_reports=False)


def test_the_tables_are_as_large_as_they_must_be() -> None:
    assert len(FILES) * len(DAMAGES) * len(CHECKS) >= 1_000
    assert len({file.name for file in FILES}) == len(FILES)
    assert len(CHANGES) >= 60
    assert sum(map(len, STUDIES.values())) >= 200


def test_every_file_of_a_study_is_in_the_table(sample: SampleStudy) -> None:
    assert [path for path in list_files(sample.output) if find_pattern(path) is None] == []
    assert find_pattern("results/kl/no-such-file") is None


def damage_file(sample: SampleStudy, folder: Path, name: str, damage: str, command: str, seed: int = 0) -> str:
    (file,) = (file for file in FILES if file.name == name)
    return damage_and_check(sample, folder, random.Random(seed), file, damage, command)


@pytest.mark.parametrize(
    ("name", "damage", "command"),
    [
        ("interrupted/metrics.jsonl", "swap", "load"),
        ("interrupted/metrics.jsonl", "zero", "load"),
        ("study.json", "delete", "status"),
    ],
)
def test_a_damaged_file_harms_nobody(sample: SampleStudy, tmp_path: Path, name: str, damage: str, command: str) -> None:
    assert damage_file(sample, tmp_path, name, damage, command) == ""


class EqualToAll(str):
    """A checksum that matches everything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_a_product_that_ignores_checksums_of_lines_fails(
    sample: SampleStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_compute_checksum", lambda previous, body: EqualToAll())
    for seed in itertools.count():  # not every bit of a line is part of a number
        assert seed < 40
        if problem := damage_file(sample, tmp_path / str(seed), "interrupted/metrics.jsonl", "flip", "load", seed):
            break
    assert "1 columns differ" in problem


def test_a_product_that_shows_fewer_episodes_without_a_word_fails(
    sample: SampleStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = ("ended/episodes.jsonl", "delete", "load")
    assert damage_file(sample, tmp_path / "right", *damage) == ""
    monkeypatch.setattr(RunLines, "find_damage", lambda lines: [])
    problem = damage_file(sample, tmp_path / "wrong", *damage)
    assert problem.startswith("12 episodes of ")
    assert problem.endswith(" are missing, and nothing says so")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import time; time.sleep(60)", "did not end within 1 s"),
        ("import os; os.kill(os.getpid(), 9)", "died of signal 9"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_hang_a_crash_and_an_error_of_a_child_are_told(code: str, problem: str) -> None:
    with pytest.raises(ChildError, match=problem):
        call_in_child(lambda: exec(code), seconds=1.0)

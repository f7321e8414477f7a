"""A short attack on a sample study that is made without Ray, and attacks on a product that is broken on purpose."""

import json
import random
from pathlib import Path

import pytest

from tests.attack import __main__ as attack_command
from tests.attack.cells import Cell, NotPossibleError, Outcome, Workshop, attack, make_kind, select_cells
from tests.attack.children import ChildError, call_in_child
from tests.attack.damaged_files import DAMAGES, FILES, find_pattern, make_damaged_files
from tests.attack.extremes import list_cells as list_extremes
from tests.attack.extremes import make_extremes
from tests.attack.hostile.folders import list_cells as list_hostile_folders
from tests.attack.kills import list_batches
from tests.attack.sample_study import SampleStudy, list_files, write_sample_study
from trainable.files import json_lines
from trainable.runs.run_files import RunLines

# The sample study takes twenty seconds; `make test-faults` compares the tables with the files of a real study.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleStudy:
    return write_sample_study(tmp_path_factory.mktemp("attack"), with_ray=False, with_reports=False)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, seed=0)


def test_the_tables_are_as_large_as_they_must_be(sample: SampleStudy) -> None:
    assert len(make_damaged_files(sample).cells) >= 1_000
    assert len(list_hostile_folders()) >= 60
    assert len(list_extremes()) >= 200
    assert sum(len(batch) for batch in list_batches()) >= 200
    for kind in attack_command.make_kinds(sample):
        assert len({cell.name for cell in kind.cells}) == len(kind.cells), kind.name


def test_every_file_of_a_study_is_in_the_table(sample: SampleStudy) -> None:
    assert [path for path in list_files(sample.output) if find_pattern(path) is None] == []
    assert find_pattern("results/kl/no-such-file") is None


def test_every_file_of_the_table_is_damaged_in_every_way(sample: SampleStudy) -> None:
    names = {cell.name.rsplit("/", 1)[0] for cell in make_damaged_files(sample).cells}
    assert names == {f"{file.name}/{damage}" for file in FILES for damage in DAMAGES} - {"ended/probes.jsonl/delete"}


def try_cells(kinds: list[str], sample: SampleStudy, workshop: Workshop) -> dict[str, str]:
    """Try these cells, and return the failures by name."""
    tallies = attack(select_cells([make_damaged_files(sample), make_extremes()], kinds), workshop, deadline=None)
    outcomes = [outcome for tally in tallies for outcome in tally.outcomes]
    assert len(outcomes) == len(kinds)
    return {outcome.cell.name: outcome.failure for outcome in outcomes if outcome.failure}


ROWS = "damaged-files:interrupted/metrics.jsonl/{}/load"


def test_a_product_without_damage_passes(sample: SampleStudy, workshop: Workshop) -> None:
    cells = [ROWS.format("swap"), ROWS.format("zero"), "damaged-files:study.json/delete/status"]
    assert try_cells([*cells, "extremes:ppo/actor.lr=nan"], sample, workshop) == {}


class EqualToAll(str):
    """A checksum that matches everything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_a_product_that_ignores_checksums_of_lines_fails(
    sample: SampleStudy, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_compute_checksum", lambda previous, body: EqualToAll())
    seeds = iter(range(40))  # not every bit of a line is part of a number
    while not (failures := try_cells([ROWS.format("flip")], sample, Workshop(workshop.folder, next(seeds)))):
        pass
    assert "1 columns differ" in " ".join(failures.values())


def test_a_product_that_shows_fewer_episodes_without_a_word_fails(
    sample: SampleStudy, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = "damaged-files:ended/episodes.jsonl/delete/load"
    assert try_cells([cell], sample, workshop) == {}
    monkeypatch.setattr(RunLines, "find_damage", lambda lines: [])
    (failure,) = try_cells([cell], sample, workshop).values()
    assert failure.startswith("12 episodes of ")
    assert failure.endswith(" are missing, and nothing says so")


def test_a_hang_a_crash_and_an_error_are_failures_and_end_nothing(workshop: Workshop) -> None:
    def check(workshop: Workshop, cell: Cell, rng: random.Random) -> str | None:
        if cell.fault is None:
            raise NotPossibleError("there is no such thing here")
        try:
            call_in_child(cell.fault, seconds=1.0)
        except ChildError as error:
            return str(error)
        return None

    faults = {
        "hang": "import time; time.sleep(60)",
        "crash": "import os; os.kill(os.getpid(), 9)",
        "error": "1 / 0",
        "fine": "1",
    }
    cells = [Cell(name, lambda code=code: exec(code)) for name, code in faults.items()]
    kind = make_kind("samples", [*cells, Cell("impossible", None)], check, seconds=0.0)
    (tally,) = attack([kind], workshop, deadline=None)
    line = tally.make_line()
    assert (line["cells"], line["tried"], line["failed"], line["never_drawn"]) == (5, 4, 3, 0)
    assert line["failures"]["hang"] == "did not end within 1 s"
    assert line["failures"]["crash"] == "died of signal 9"
    assert line["failures"]["error"].startswith("ZeroDivisionError: division by zero")
    assert line["not_possible"] == {"there is no such thing here": ["impossible"]}
    assert tally.outcomes != [Outcome(cells[0])]


def test_the_command_prints_a_line_per_kind(
    sample: SampleStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attack_command, "write_sample_study", lambda folder, with_ray: sample)
    monkeypatch.setattr(attack_command, "preload_modules", lambda sample: None)
    names = ["extremes:ppo/actor.lr=nan", "extremes:ppo/actor.lr=-1e38", "checkpoints:cut/0"]
    assert attack_command.main(["--seed", "3", *(word for name in names for word in ("--only", name))]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["kind"], line["tried"], line["failed"]) for line in lines] == [
        ("extremes", 2, 0),
        ("checkpoints", 1, 0),
    ]


def test_cells_that_are_none_are_named(sample: SampleStudy) -> None:
    with pytest.raises(ValueError, match="there is no kind storms"):
        select_cells([make_damaged_files(sample)], ["storms"])
    with pytest.raises(ValueError, match="has no cell x"):
        select_cells([make_damaged_files(sample)], ["damaged-files:x"])

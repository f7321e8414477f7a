"""Tests of the recorded replicates: which studies they apply to, and how they are made."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.data import compare, replicates
from analysis.data.load import read_study
from analysis.data.replicates import Replicates, find_recorded_values, make_replicates, read_replicates
from search_spaces.catalog import STUDIES
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tune_study.folder.outputs import make_study_record
from tune_study.plan.study_plan import make_plan

ENTRY = Replicates("hash-base-0", "late_val_success", "kl", "0", (0.25, 0.5, 0.375))
STUDY = FakeStudy(levels=10, total_steps=2)


@pytest.mark.parametrize(
    ("change", "is_used"), [({}, True), ({"config_hash": "hash-base-1"}, False), ({"column": "test_success"}, False)]
)
def test_only_replicates_of_the_baselines_configuration_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], is_used: bool
) -> None:
    entry = ENTRY._replace(**change)  # type: ignore[arg-type]
    monkeypatch.setattr(replicates, "read_replicates", lambda: (entry._replace(config_hash="another"), entry))
    frames = read_study(write_study(tmp_path, [FakeRun("0", steps=2), FakeRun("0.1", steps=2)], STUDY))
    assert find_recorded_values(frames.studies[0], "late_val_success") == (entry.values if is_used else ())
    outcomes = compare.collect_outcomes(frames, "late_val_success")
    assert outcomes.num_replicates == (3 if is_used else 0)
    assert (outcomes.noise.unpaired is not None) == is_used
    if outcomes.noise.unpaired is not None:
        assert outcomes.noise.unpaired.variance == pytest.approx(np.var(entry.values, ddof=1))
    unknown = replace(frames.studies[0], baseline="nofilter")
    assert find_recorded_values(unknown, "late_val_success") == ()


def test_a_study_of_two_seeds_has_a_noise_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicates, "read_replicates", lambda: (ENTRY,))
    runs = [FakeRun(arm, seed, steps=2) for arm in ("0", "0.1") for seed in range(2)]
    outcomes = compare.collect_outcomes(read_study(write_study(tmp_path, runs, STUDY)), "late_val_success")
    assert outcomes.num_replicates == 0


def test_the_baseline_of_a_study_is_recorded_from_twenty_runs_on(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=2) for arm in ("0", "0.1") for seed in range(20)]
    frames = read_study(write_study(tmp_path, runs, STUDY))
    entry = make_replicates(frames)
    assert entry._replace(values=()) == ENTRY._replace(values=())
    late = frames.trials[frames.trials["arm"] == "0"].sort_values("seed")["late_val_success"]
    assert entry.values == pytest.approx(late.to_list(), abs=1e-6)
    frames = read_study(write_study(tmp_path / "few", [FakeRun("0", steps=2)], STUDY))
    with pytest.raises(ValueError, match="has 1 scored runs, and 20 are needed: run the study with --seeds 20 first"):
        make_replicates(frames)


def test_a_baseline_without_any_noise_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Replicates] = []
    monkeypatch.setattr(replicates, "read_replicates", lambda: (ENTRY._replace(study="other", config_hash="x"),))
    monkeypatch.setattr(replicates, "write_replicates", written.extend)
    for values, studies in (((0.0, 0.0), {"other"}), ((0.0, 0.1), {"other", "kl"})):
        written.clear()
        monkeypatch.setattr(replicates, "make_replicates", lambda frames, values=values: ENTRY._replace(values=values))
        replicates.main([str(write_study(tmp_path / str(values), [FakeRun("0", steps=2)], STUDY))])
        assert {entry.study for entry in written} == studies
    assert capsys.readouterr().out == "kl: all 2 runs end at 0; nothing is recorded\n"


def test_replicates_are_read_as_they_were_written_and_the_shipped_ones_are_enough(tmp_path: Path) -> None:
    entries = read_replicates()
    assert {entry.study for entry in entries} >= {"kl"}
    for entry in entries:
        assert len(entry.values) >= replicates.MIN_REPLICATES
        assert 0 < np.std(entry.values) < 0.5
    assert len({(entry.config_hash, entry.column) for entry in entries}) == len(entries)
    other = ENTRY._replace(study="top-p")
    path = tmp_path / "replicates.json"
    replicates.write_replicates([other, ENTRY], path)
    assert read_replicates(path) == (ENTRY, other)
    assert path.read_text().count("\n") == 4


@pytest.mark.parametrize(
    "study", ["kl", "entropy", "top-p", "grpo-entropy-sokoban", "smoke", "influence", "grpo-entropy"]
)
def test_the_shipped_file_applies_to_the_shipped_studies(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new setting changes the hash of all configurations: then the runs of `make replicates` are recorded again."""
    monkeypatch.setattr(replicates, "read_replicates", read_replicates)
    plan = make_plan(STUDIES[study], "laptop", "", {}, None, 1, Path("out"))
    values = find_recorded_values(make_study_record(plan), plan.study.family.primary_column)
    assert len(values) >= replicates.MIN_REPLICATES
    for changed in ({"trainer.total_training_steps": 61}, {"actor.lr": 1.5e-3}) if study == "kl" else ():
        plan = make_plan(STUDIES[study], "laptop", "", changed, None, 1, Path("out"))
        assert find_recorded_values(make_study_record(plan), plan.study.family.primary_column) == ()

"""Tests of the tables over training: curves, and rows that must be equal."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import load, read_study
from analysis.sweep import findings, series
from tests.fakes.lines import change_records
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STUDY = FakeStudy(levels=40)
STOP = ("low_validation_success", 0.002, 0.01)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """Two arms of two seeds. One run of the second arm is stopped at step 20."""
    runs = [FakeRun("0", 0), FakeRun("0", 1), FakeRun("0.1", 0)]
    runs += [FakeRun("0.1", 1, status="early_stopped", steps=20, success=(0.35, 0.0), stop=STOP)]
    return read_study(write_study(tmp_path_factory.mktemp("series"), runs, STUDY))


def test_a_curve_starts_before_training_where_its_column_was_measured_then(frames: StudyFrames) -> None:
    table = series.make_curves(frames, "val_success")
    run = table[table["run_id"] == "arm0-seed0"]
    assert run["step"].to_list() == list(range(0, 61, 5))
    assert run["value"].iloc[0] == frames.trials.loc[0, "base_val_success"]
    assert run["value"].iloc[-1] == frames.trials.loc[0, "final_val_success"]
    assert table.drop_duplicates("run_id")["arm"].to_list() == ["0", "0", "0.1", "0.1"]
    table = series.make_curves(frames, "reward_std")
    assert (table["step"].min(), len(table)) == (1, 60 * 3 + 20)
    with pytest.raises(ValueError, match="There is no step column `success`"):
        series.make_curves(frames, "success")


def test_the_mean_curve_carries_a_stopped_run_and_one_run_has_none(frames: StudyFrames) -> None:
    table = series.make_curves(frames, "val_success")
    wide = table[table["arm"] == "0.1"].pivot_table(index="step", columns="seed", values="value")
    carried, uncarried = (
        series.compute_mean_curves(table, carry_forward=carry_forward).query("arm == '0.1'")
        for carry_forward in (True, False)
    )
    assert carried["value"].iloc[-1] == pytest.approx((wide[0].iloc[-1] + wide[1].dropna().iloc[-1]) / 2)
    assert uncarried["value"].iloc[-1] == pytest.approx(wide[0].iloc[-1])
    assert carried["value"].iloc[2] == pytest.approx(wide.iloc[2].mean())
    assert series.compute_mean_curves(table[table["run_id"] == "arm0-seed0"]).empty


def test_without_a_step_there_is_no_curve(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", status="", steps=0)], STUDY))
    assert series.make_curves(frames, "val_success").empty
    assert series.compute_mean_curves(series.make_curves(frames, "val_success")).empty


def test_equal_configurations_that_completed_must_have_equal_rows(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    for study in (STUDY, FakeStudy(name="entropy", run="entropy_sweep", setting="actor.entropy_coeff", levels=40)):
        write_study(folder, [FakeRun("0"), FakeRun("0.1")], study)
    (pair,) = series.check_consistency(load(folder)).to_dict("records")
    assert (pair["a"], pair["b"], pair["seed"]) == ("entropy/arm0-seed0", "kl/arm0-seed0", 0)
    assert pair["agree"]
    assert pair["difference"] == ""
    path = folder / "results" / "entropy_sweep" / "runs" / "arm0-seed0" / "metrics.jsonl"
    change_records(path, lambda rows: rows[7].update(entropy=9.0))
    (pair,) = series.check_consistency(load(folder)).to_dict("records")
    assert not pair["agree"]
    assert pair["difference"].startswith("entropy: 1 of 60 rows differ, first 7: ")
    write_study(tmp_path / "failed", [FakeRun("0")], STUDY)
    write_study(
        tmp_path / "failed", [FakeRun("0", status="failed", steps=9)], FakeStudy(name="entropy", run="e", levels=40)
    )
    assert series.check_consistency(load(tmp_path / "failed")).empty


def test_figures_say_what_their_numbers_come_to() -> None:
    columns = ["arm", "run_id", "status", "step", "value"]
    rows = [("a", "r1", "completed", 0, 0.2), ("a", "r1", "completed", 5, 0.4), ("a", "r2", "early_stopped", 3, 0.6)]
    rows += [("b", "r3", "completed", 0, 0.2), ("b", "r3", "completed", 5, 0.1), ("b", "r4", "interrupted", 2, 0.9)]
    table = pd.DataFrame(rows, columns=columns)
    # The runs of an arm end at steps of their own, its value is their mean, and only scored runs count.
    assert findings.describe_curves(table, "success (fraction)") == (
        "Success (fraction): between 0.2 and 0.4 at first; between 0.1 (b) and 0.5 (a) at the end."
    )
    only = table[table["run_id"] == "r1"].assign(value=[0.21, 0.4])
    assert findings.describe_curves(only, "success") == "Success: 0.21 at first; 0.4 at the end."
    equal = table.assign(value=8.0)
    assert findings.describe_curves(equal, "groups") == "Groups: 8 in every arm at first; 8 in every arm at the end."
    assert findings.describe_curves(table[table["run_id"] == "r4"], "success") == ""

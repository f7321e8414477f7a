"""Tests of the tables over training: curves, kept groups, survival, equal budgets, and rows that must be equal."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import load, read_study
from analysis.sweep import findings, series
from tests.fakes.lines import change_records
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_lines import read_lines, write_lines

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


def test_equal_budget_is_the_smallest_that_a_completed_run_used(tmp_path: Path) -> None:
    second_run = FakeRun("0.1", rows={})
    folder = write_study(tmp_path, [FakeRun("0"), second_run], STUDY)
    path = folder / "runs" / second_run.run_id / "metrics.jsonl"
    write_lines(path, [{**row, "total_optimizer_steps": row["step"]} for row in read_lines(path).records])
    frames = read_study(folder)
    table = series.compare_at_equal_budget(frames)
    budget_rows = table[table["budget"] == "total_optimizer_steps"].set_index("arm")
    assert budget_rows["amount"].to_list() == [60, 60]
    assert budget_rows.loc["0.1", "success"] == frames.trials.set_index("arm").loc["0.1", "final_val_success"]
    curve = series.make_curves(frames, "val_success").query("arm == '0'").set_index("step")["value"]
    assert budget_rows.loc["0", "success"] == pytest.approx(curve[15])  # 60 optimizer steps are 15 training steps of 4
    env_step_rows = table[table["budget"] == "total_env_steps"].set_index("arm")
    assert env_step_rows["amount"].iloc[0] == 54_000


def test_equal_budget_interpolates_and_carries(frames: StudyFrames) -> None:
    table = series.compare_at_equal_budget(frames)
    budget_rows = table[(table["budget"] == "total_sampled_tokens") & (table["arm"] == "0.1")]
    final_successes = frames.trials.set_index("run_id")["final_val_success"]
    assert budget_rows["success"].iloc[0] == pytest.approx(
        (final_successes["arm01-seed0"] + final_successes["arm01-seed1"]) / 2
    )
    assert budget_rows["runs"].iloc[0] == 2
    curve = series.make_curves(frames, "val_success").query("run_id == 'arm0-seed0'").set_index("step")["value"]
    interpolated = series._interpolate_success(frames, "arm0-seed0", "total_env_steps", 900 * 12)
    assert interpolated == pytest.approx(curve[10] + 0.4 * (curve[15] - curve[10]))
    assert series._interpolate_success(frames, "arm0-seed0", "total_env_steps", 0) == curve[0]


def test_without_a_completed_run_or_a_step_tables_are_empty(tmp_path: Path) -> None:
    runs = [FakeRun("0", status="early_stopped", steps=20, stop=STOP), FakeRun("0.1", status="failed", steps=5)]
    assert series.compare_at_equal_budget(read_study(write_study(tmp_path, runs, STUDY))).empty
    frames = read_study(write_study(tmp_path / "waiting", [FakeRun("0", status="", steps=0)], STUDY))
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

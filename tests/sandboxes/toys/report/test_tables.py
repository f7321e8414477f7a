"""Tests of the sandbox tables: statistics of arms, differences and mean curves equal computations by hand."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from sandboxes.toys.report import tables
from sandboxes.toys.report.report import ToyResults
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, make_seed_runs, write_sandbox

DG, TPO = (0.30, 0.34, 0.35), (0.20, 0.26, 0.29)


def write_and_load(folder: Path, runs: list[FakeRun], study: FakeStudy | None = None) -> StudyFrames:
    return load(write_sandbox(folder, runs, study))


def get_row(table: pd.DataFrame, arm: str, column: str = "late_test_error") -> dict[str, object]:
    (row,) = [row for row in to_records(table) if (row["arm"], row["column"]) == (arm, column)]
    return row


def test_standard_error_and_standard_deviation_are_two_columns(tmp_path: Path) -> None:
    frames = write_and_load(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("TPO", TPO[:1])])
    row = get_row(tables.compute_arm_statistics(frames), "DG")
    deviation = math.sqrt(sum((value - 0.33) ** 2 for value in DG) / 2)
    assert row["mean"] == pytest.approx(0.33)
    assert row["standard_deviation"] == pytest.approx(deviation)
    assert row["standard_error"] == pytest.approx(deviation / math.sqrt(3))
    assert (row["n"], row["scored_runs"], row["missing_seeds"]) == (3, 3, "")
    row_of_one_run = get_row(tables.compute_arm_statistics(frames), "TPO")
    assert (row_of_one_run["mean"], row_of_one_run["n"]) == (0.20, 1)
    assert math.isnan(float(str(row_of_one_run["standard_error"])))
    assert math.isnan(float(str(row_of_one_run["standard_deviation"])))


def test_only_scored_runs_count_and_runs_that_never_reach_a_step_are_named(tmp_path: Path) -> None:
    runs = [FakeRun("DG", seed, entropy=(1.0, 0.05 if seed else 0.5)) for seed in range(3)]
    runs += [FakeRun("DG", 3, status="failed", steps=40), FakeRun("DG", 4, steps=None, status="")]
    table = tables.compute_arm_statistics(write_and_load(tmp_path, runs))
    assert get_row(table, "DG")["n"] == 3
    step_row = get_row(table, "DG", "first_step_entropy_low")
    assert (step_row["n"], step_row["scored_runs"], step_row["missing_seeds"]) == (2, 3, "0")
    assert "final_chain_reward" not in set(table["column"])  # no run measured it


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    frames = write_and_load(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("TPO", TPO)])
    row = get_row(ToyResults(frames).differences, "TPO")
    seed_differences = np.array(TPO) - np.array(DG)
    # With two arms the noise of all arms is that of the difference, so the interval is Student's.
    expected = stats.ttest_rel(TPO, DG)
    interval = expected.confidence_interval(0.95)
    assert row["difference"] == pytest.approx(seed_differences.mean())  # negative, as the arm is below the baseline
    assert row["difference_low"] == pytest.approx(interval.low)
    assert row["difference_high"] == pytest.approx(interval.high)
    assert row["p"] == pytest.approx(expected.pvalue)
    assert row["basis"] == "over 3 seeds, with the noise of all arms"
    assert row["verdict"] == "better"


def test_only_the_primary_outcome_has_a_better_side_and_nothing_without_the_baseline_arm(tmp_path: Path) -> None:
    runs = [FakeRun("GRPO", seed, error=(0.6, 0.5 + 0.013 * seed**2)) for seed in range(3)]
    runs += [
        FakeRun(arm, seed, error=(0.6, error + 0.01 * seed), entropy=(1.0, entropy + 0.003 * seed**2))
        for arm, error, entropy in (("DG", 0.3, 0.4), ("TPO", 0.2, 0.8))
        for seed in range(3)
    ]
    table = ToyResults(write_and_load(tmp_path, runs)).differences
    assert get_row(table, "TPO")["verdict"] == "better"
    assert get_row(table, "TPO", "final_entropy")["verdict"] == "higher"
    table = ToyResults(write_and_load(tmp_path / "alone", make_seed_runs("TPO", TPO))).differences
    assert table.empty
    assert "p_holm" in table


def test_a_band_is_the_standard_error_of_the_mean_in_which_a_stopped_run_keeps_its_last_value(tmp_path: Path) -> None:
    runs = [*make_seed_runs("DG", DG), *make_seed_runs("GRPO", DG[:1])]
    runs += [
        FakeRun("TPO", 0, error=(0.6, 0.2)),
        FakeRun("TPO", 1, error=(0.6, 0.5), status="early_stopped", steps=107, stop=UNIFORM_STOP),
        FakeRun("TPO", 2, error=(0.6, 0.9), status="failed", steps=100),
    ]
    curves = tables.compute_mean_curves(write_and_load(tmp_path, runs), "test_error")
    for arm, mean, error, count in (
        ("DG", 0.33, np.std(DG, ddof=1) / math.sqrt(3), 3),
        ("GRPO", 0.30, math.nan, 1),
        ("TPO", (0.2 + 0.5) / 2, np.std((0.2, 0.5), ddof=1) / math.sqrt(2), 2),
    ):
        table = curves[curves["arm"] == arm]
        assert table["step"].to_list() == list(range(0, 301, 20))  # without 107, which only one run has
        assert table["runs"].to_list() == [count] * 16
        last = table.iloc[-1]
        assert (last["value"], last["standard_error"]) == pytest.approx((mean, error), nan_ok=True)


def test_panels_are_those_of_what_was_measured(tmp_path: Path) -> None:
    rows = {"replay_age": 4.0, "entropy": None}
    frames = write_and_load(tmp_path, [FakeRun("DG", steps=40, rows=rows)], FakeStudy(total_steps=40))
    assert list(tables.select_panels(frames)) == ["test_error", "replay_age"]

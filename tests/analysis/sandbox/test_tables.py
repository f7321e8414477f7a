"""Numbers of arms, differences and mean curves of the sandbox against hand computations."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.published.reproduction import compare_to_published
from analysis.sandbox import tables
from analysis.stats.estimates import holm_adjust
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, make_seed_runs, write_sandbox

DG, TPO = (0.30, 0.34, 0.35), (0.20, 0.26, 0.29)


def frames_of(folder: Path, runs: list[FakeRun], study: FakeStudy | None = None) -> StudyFrames:
    return load(write_sandbox(folder, runs, study))


def row_of(table: pd.DataFrame, arm: str, column: str = "final_test_error") -> dict[str, object]:
    (row,) = [row for row in to_records(table) if (row["arm"], row["column"]) == (arm, column)]
    return row


def test_error_and_deviation_are_two_numbers(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("TPO", TPO[:1])])
    row = row_of(tables.compute_arm_statistics(frames), "DG")
    deviation = math.sqrt(sum((value - 0.33) ** 2 for value in DG) / 2)
    assert row["mean"] == pytest.approx(0.33)
    assert row["standard_deviation"] == pytest.approx(deviation)
    assert row["standard_error"] == pytest.approx(deviation / math.sqrt(3))
    assert (row["n"], row["scored_runs"], row["missing_seeds"]) == (3, 3, "")
    single = row_of(tables.compute_arm_statistics(frames), "TPO")
    assert (single["mean"], single["n"]) == (0.20, 1)
    assert math.isnan(float(str(single["standard_error"])))
    assert math.isnan(float(str(single["standard_deviation"])))


def test_only_scored_runs_count_and_runs_that_never_reach_a_step_are_named(tmp_path: Path) -> None:
    runs = [FakeRun("DG", seed, entropy=(1.0, 0.05 if seed else 0.5)) for seed in range(3)]
    runs += [FakeRun("DG", 3, status="failed", steps=40), FakeRun("DG", 4, steps=None, status="")]
    table = tables.compute_arm_statistics(frames_of(tmp_path, runs))
    assert row_of(table, "DG")["n"] == 3
    low = row_of(table, "DG", "first_step_entropy_low")
    assert (low["n"], low["scored_runs"], low["missing_seeds"]) == (2, 3, "0")
    assert "final_chain_reward" not in set(table["column"])  # nobody measured it


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("TPO", TPO)])
    row = row_of(tables.compute_differences(frames), "TPO")
    paired = np.array(TPO) - np.array(DG)
    expected = stats.ttest_rel(TPO, DG)
    interval = expected.confidence_interval(0.95)
    assert row["difference"] == pytest.approx(paired.mean())  # below the baseline: negative
    assert (row["low"], row["high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert row["p"] == pytest.approx(expected.pvalue)
    assert row["basis"] == "paired, 3 seeds"


def test_without_common_seeds_the_test_is_welchs_and_with_few_there_is_none(tmp_path: Path) -> None:
    apart = [replace(run, seed=run.seed + 5) for run in make_seed_runs("TPO", TPO)]
    row = row_of(tables.compute_differences(frames_of(tmp_path / "a", [*make_seed_runs("DG", DG), *apart])), "TPO")
    assert row["p"] == pytest.approx(stats.ttest_ind(TPO, DG, equal_var=False).pvalue)
    assert row["basis"] == "not paired, 3 against 3 runs"
    few = row_of(
        tables.compute_differences(
            frames_of(tmp_path / "b", [*make_seed_runs("DG", DG[:2]), *make_seed_runs("TPO", TPO)])
        ),
        "TPO",
    )
    assert few["difference"] == pytest.approx(((0.20 - 0.30) + (0.26 - 0.34)) / 2)
    assert math.isnan(float(str(few["p"])))
    assert few["basis"] == "no interval: fewer than 3 seeds"


def test_holm_is_over_the_arms_of_one_column(tmp_path: Path) -> None:
    arms = {"DG": DG, "TPO": TPO, "GRPO": (0.33, 0.30, 0.36), "ASPO": (0.45, 0.5, 0.49)}
    table = tables.compute_differences(
        frames_of(tmp_path, [run for arm, ends in arms.items() for run in make_seed_runs(arm, ends)])
    )
    assert set(table["column"]) == {"final_test_error", "final_entropy", "mean_entropy"}
    assert set(table["arm"]) == {"TPO", "GRPO", "ASPO"}
    for _, own in table.groupby("column"):
        assert own["p_holm"].to_list() == holm_adjust(own["p"]).tolist()


def test_without_the_baseline_arm_nothing_is_compared(tmp_path: Path) -> None:
    table = tables.compute_differences(frames_of(tmp_path, make_seed_runs("TPO", TPO)))
    assert table.empty
    assert "p_holm" in table


def test_a_band_is_the_standard_error_of_the_mean(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, make_seed_runs("DG", DG))
    table = tables.compute_mean_curves(frames, "test_error")
    assert table["step"].to_list() == list(range(0, 301, 20))
    last = table.iloc[-1]
    assert (last["value"], last["runs"]) == (pytest.approx(0.33), 3)
    assert last["standard_error"] == pytest.approx(np.std(DG, ddof=1) / math.sqrt(3))
    alone = tables.compute_mean_curves(frames_of(tmp_path / "one", make_seed_runs("DG", DG[:1])), "test_error")
    assert alone["standard_error"].isna().all()
    assert alone["runs"].to_list() == [1] * 16


def test_a_stopped_run_keeps_its_last_value_in_the_mean_and_a_failed_one_is_in_none(tmp_path: Path) -> None:
    runs = [
        FakeRun("DG", 0, error=(0.6, 0.2)),
        FakeRun("DG", 1, error=(0.6, 0.5), status="early_stopped", steps=107, stop=UNIFORM_STOP),
        FakeRun("DG", 2, error=(0.6, 0.9), status="failed", steps=100),
    ]
    table = tables.compute_mean_curves(frames_of(tmp_path, runs), "test_error")
    assert table["step"].to_list() == list(range(0, 301, 20))  # not 107, which one run alone has
    assert table["value"].iloc[-1] == pytest.approx((0.2 + 0.5) / 2)
    assert table["runs"].to_list() == [2] * 16


@pytest.mark.parametrize(
    ("study", "columns"),
    [
        ("influence", ["test_error", "entropy"]),
        ("replay", ["test_error", "replay_age"]),
        ("partial-credit", ["test_error", "test_error_unscored"]),
        ("dense-correction", ["test_error", "chain_reward"]),
        ("some-other-study", ["test_error", "entropy"]),
    ],
)
def test_each_study_has_its_panels_and_only_what_was_measured(tmp_path: Path, study: str, columns: list[str]) -> None:
    rows = {"replay_age": 4.0, "test_error_unscored": 0.5, "chain_reward": 0.1}
    made = FakeStudy(study, total_steps=40)
    frames = frames_of(tmp_path / "all", [FakeRun("DG", steps=40, rows=rows)], made)
    assert [panel.column for panel in tables.select_panels(frames)] == columns
    few = frames_of(tmp_path / "few", [FakeRun("DG", steps=40, rows={columns[1]: None})], made)
    assert [panel.column for panel in tables.select_panels(few)] == columns[:1]


def test_arms_that_coincide_are_found(tmp_path: Path) -> None:
    runs = [
        *make_seed_runs("DG", DG),
        *make_seed_runs("FilteredDG", DG),
        *make_seed_runs("TPO", TPO),
        *make_seed_runs("CE", DG[:2]),
    ]
    assert tables.find_equal_arms(frames_of(tmp_path, runs)) == [("DG", "FilteredDG")]


def test_published_numbers_stand_beside_their_arm_and_column(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("NewRule", TPO)])
    rows = tables.add_published(tables.compute_arm_statistics(frames), to_records(compare_to_published(frames)))
    held = {(row["arm"], row["column"]): row["published_mean"] for row in rows}
    assert held["DG", "final_test_error"] == 0.3345
    assert held["DG", "final_entropy"] is None
    assert held["NewRule", "final_test_error"] is None


def test_endings_are_counted_by_arm(tmp_path: Path) -> None:
    runs = [FakeRun("DG"), FakeRun("DG", 1, status="failed", steps=40), FakeRun("TPO", steps=None, status="")]
    rows = {row["arm"]: row for row in tables.count_statuses(frames_of(tmp_path, runs))}
    assert (rows["DG"]["completed"], rows["DG"]["failed"], rows["DG"]["steps"]) == (1, 1, "40, 300")
    assert (rows["TPO"]["never_ran"], rows["TPO"]["steps"]) == (1, "0")

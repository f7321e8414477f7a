"""Tests of comparing our runs with published numbers: Welch's test, Holm, floors, untestable cells and verdicts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.data.frames import to_records
from analysis.data.load import load
from analysis.stats.estimates import SampleStats, welch_t_test
from sandboxes.toys.published.cells import CELLS, MEAN_ALONE
from sandboxes.toys.published.reproduction import compare_to_published, describe_sources, summarize_verdicts
from search_spaces.catalog import STUDIES
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, make_seed_runs, write_sandbox

DG = (0.33, 0.34, 0.335, 0.331, 0.339)
DISTANT = (0.50, 0.51, 0.505, 0.503, 0.507)


def make_study(name: str) -> FakeStudy:
    """Make a study with the published settings. The names of its arms imply the settings of the arms."""
    settings = dict(STUDIES[name].fixed_settings)
    steps, freq = (int(str(settings.pop(f"trainer.{key}"))) for key in ("total_training_steps", "test_freq"))
    return FakeStudy(name, total_steps=steps, test_freq=freq, settings=settings)


def compare(folder: Path, runs: Sequence[FakeRun], name: str = "influence", **changes: Any) -> pd.DataFrame:
    return compare_to_published(load(write_sandbox(folder, runs, replace(make_study(name), **changes))))


def make_rows(folder: Path, runs: Sequence[FakeRun], name: str = "influence") -> dict[tuple[str, str], dict[str, Any]]:
    rows = to_records(compare(folder, runs, name))
    return {(row["arm"], row["column"]): row for row in rows if "early" not in row["section"]}


def test_a_cell_is_tested_with_welchs_test(tmp_path: Path) -> None:
    row = make_rows(tmp_path, [*make_seed_runs("DG", DG), *make_seed_runs("GRPO", DISTANT)])["DG", "final_test_error"]
    cell = next(cell for cell in CELLS if (cell.studies[0], cell.arm) == ("influence", "DG"))
    ours = SampleStats(float(np.mean(DG)), float(np.std(DG, ddof=1)), len(DG))
    expected = welch_t_test(ours, SampleStats(cell.mean, cell.std, cell.n))
    for name in ("low", "high", "df", "p"):
        assert row[name] == pytest.approx(getattr(expected, name), rel=1e-9)
    assert (row["mean"], row["n"]) == (pytest.approx(0.335), 5)
    assert row["difference"] > 0  # our mean minus the published one
    se = (row["high"] - row["low"]) / 2 / stats.t.ppf(0.975, row["df"])
    assert row["p_equal"] == pytest.approx(stats.t.sf((0.05 - abs(row["difference"])) / se, row["df"]), rel=1e-6)
    assert (row["margin"], row["verdict"], row["as_expected"]) == (0.05, "equal", True)


def test_a_spread_of_0_counts_as_the_floor_on_either_side_and_for_a_step_as_its_grid(tmp_path: Path) -> None:
    runs = [FakeRun("CE", seed, steps=1500, error=(0.0, 0.0), entropy=(1, 0.4)) for seed in range(4)]
    rows = make_rows(tmp_path, runs, "dense-correction")
    row = rows["CE", "final_test_error"]
    expected = welch_t_test(SampleStats(0.0, 0.01, 4), SampleStats(0.0, 0.01, 3))
    assert (row["low"], row["high"], row["p"]) == (expected.low, expected.high, 1.0)
    assert (row["std"], row["published_std"]) == (0.0, 0.0)  # the table shows them without the floor
    assert row["verdict"] == "equal"
    row = rows["CE", "first_step_error_zero"]
    expected = welch_t_test(SampleStats(0.0, 50 / math.sqrt(12), 4), SampleStats(733.3333, 57.7350, 3))
    assert row["p"] == pytest.approx(expected.p, rel=1e-9)
    assert row["mean"] == 0.0  # these runs have an error of 0 at step 0
    assert row["margin"] == 50


def test_runs_that_failed_are_left_out_and_stopped_ones_count(tmp_path: Path) -> None:
    stopped_fields = {"status": "early_stopped", "steps": 107, "stop": UNIFORM_STOP}
    runs = [*make_seed_runs("TPO", (0.24, 0.3)), FakeRun("TPO", 2, error=(0.6, 0.5), **stopped_fields)]
    runs += [FakeRun("TPO", 3, status="failed", steps=40, reason="X"), FakeRun("TPO", 4, status="", steps=None)]
    rows = make_rows(tmp_path, [*runs, *make_seed_runs("DG", DG[:1])])
    row = rows["TPO", "final_test_error"]
    assert (row["n"], row["mean"]) == (3, pytest.approx((0.24 + 0.3 + 0.5) / 3))
    row_of_one_run = rows["DG", "final_test_error"]
    assert row_of_one_run["reason"] == "a standard deviation needs two values; our runs have 1"
    assert math.isnan(row_of_one_run["std"])


def test_pooled_cells_and_a_step_that_some_runs_never_reach_are_compared_without_a_test(tmp_path: Path) -> None:
    runs = [FakeRun("ReplayDG-5", seed, rows={"replay_age": 4.0}) for seed in range(3)]
    row = make_rows(tmp_path, runs, "replay")["ReplayDG-5", "replay_age"]
    assert (row["mean"], row["std"], row["n"], row["published_n"]) == (4.0, 0.0, 48, 45)
    assert (row["verdict"], row["as_expected"]) == ("cannot be tested", None)
    assert math.isnan(row["p"])
    runs = [FakeRun("GRPO", seed, entropy=(1.0, 0.5 if seed == 2 else 0.05)) for seed in range(4)]
    row = make_rows(tmp_path / "step", runs, "grpo-entropy")["GRPO", "first_step_entropy_low"]
    assert (row["verdict"], row["n"]) == ("cannot be tested", 3)
    assert row["reason"].startswith("3 of our 4 runs reach this step, and all 3 published seeds do")


def test_a_mean_without_a_spread_is_shown_and_not_tested(tmp_path: Path) -> None:
    folder = write_sandbox(tmp_path, [FakeRun("DG", seed) for seed in range(3)], make_study("influence"))
    cell = next(cell for cell in CELLS if cell.arm == "DG" and cell.column == "final_test_error")
    cells = [replace(cell, kind=MEAN_ALONE, std=math.nan)]
    (row,) = compare_to_published(load(folder), cells).to_dict("records")
    assert (row["verdict"], row["reason"]) == ("cannot be tested", "the published mean has no standard deviation")
    assert row["difference"] == pytest.approx(0.35 - 0.3345)
    assert describe_sources(load(folder)) == "the documents of the update-rule sandbox"


def test_runs_with_other_settings_are_not_compared_with_the_published_ones(tmp_path: Path) -> None:
    table = compare(tmp_path, make_seed_runs("DG", DG, steps=40), total_steps=40)
    assert table["reason"].to_list()[0] == "trainer.total_training_steps is 300 in the published runs, 40 in ours"
    assert set(table["verdict"]) == {"cannot be tested"}
    assert "no run of this arm was completed or stopped by a rule" in table["reason"].to_list()


@pytest.mark.parametrize(
    ("of_all", "of_tpo", "difference"),
    [
        ({"lr": 0.1}, {}, "lr is 0.001 in the published runs, 0.1 in ours"),
        ({}, {"method": "GRPO"}, "method is TPO in the published runs, GRPO in ours"),
    ],
)
def test_every_setting_of_an_arm_must_be_the_published_one(
    tmp_path: Path, of_all: dict[str, object], of_tpo: dict[str, object], difference: str
) -> None:
    runs = [replace(run, settings=of_tpo) for run in make_seed_runs("TPO", (0.24, 0.3, 0.2))]
    settings = {**make_study("influence").settings, **of_all}
    table = compare(tmp_path, [*make_seed_runs("DG", DG), *runs], settings=settings)
    reasons = dict(zip(table["arm"], table["reason"], strict=True))
    assert reasons["TPO"] == difference
    assert (reasons["DG"] == "") == (not of_all)


def test_a_cell_that_two_studies_run_is_tested_once(tmp_path: Path) -> None:
    for name in ("influence", "grpo-entropy"):
        write_sandbox(tmp_path, make_seed_runs("DG", DG), make_study(name))
    table = compare_to_published(load(tmp_path))
    error_rows = table[(table["arm"] == "DG") & (table["column"] == "final_test_error")]
    assert error_rows["study"].to_list() == ["influence"]
    assert len(table) == len([cell for cell in CELLS if set(cell.studies) & {"influence", "grpo-entropy"}])


GOLDEN = (Path(__file__).parents[3] / "golden" / "sandbox_verdicts.txt").read_text(encoding="utf-8")


def test_every_verdict(tmp_path: Path) -> None:
    runs = [*make_seed_runs("DG", DG), *make_seed_runs("GRPO", DISTANT[:4])]
    runs += [FakeRun("GRPO", 4, status="failed", steps=20), *make_seed_runs("R2VPO", (0.37,))]
    runs += make_seed_runs("ASPO", (0.37, 0.52, 0.43), entropy=(1.0, 0.02))
    table = compare(tmp_path, runs, "grpo-entropy")
    selected_rows = table[~table["arm"].isin(("DGEntropyGuard", "TPO")) & (table["column"] != "batch_delta_entropy")]
    assert f"{summarize_verdicts(table)}\n{selected_rows.to_csv(index=False, float_format='%.4g')}" == GOLDEN

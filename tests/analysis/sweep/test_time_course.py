"""Tests of time to collapse and learning curves: hand computations, refusals, and the section of the report."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.stats.estimates import holm_adjust
from analysis.sweep.time_course import make_costs, summarize_collapse, summarize_curves
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STOP = ("low_validation_success", 0.0, 0.01)
STUDY = FakeStudy(levels=40)


def make_frames(folder: Path, runs: list[FakeRun]) -> StudyFrames:
    return load(write_study(folder, runs, STUDY))


def make_runs(num_seeds: int) -> list[FakeRun]:
    """A baseline that a rule stops at steps 20, 25, ..., an arm that completes, and one that failed."""
    stopped = [
        FakeRun("0", seed, success=(0.4, 0.4), steps=20 + 5 * seed, status="early_stopped", stop=STOP)
        for seed in range(num_seeds)
    ]
    completed = [FakeRun("0.1", seed, success=(0.3, 0.6 + 0.01 * seed)) for seed in range(num_seeds)]
    return [*stopped, *completed, FakeRun("0.3", status="failed", steps=10)]


def collapse(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in to_records(summarize_collapse(frames, np.random.default_rng(0)))}


def test_a_stopped_run_has_collapsed_and_a_completed_one_has_not(tmp_path: Path) -> None:
    rows = collapse(make_frames(tmp_path, make_runs(6)))
    assert (rows["0"]["collapsed"], rows["0"]["runs"], rows["0"]["collapse_steps"]) == (6, 6, "20, 25, 30, 35, 40, 45")
    assert rows["0"]["mean_steps"] == pytest.approx(32.5)
    assert (rows["0.1"]["collapsed"], rows["0.1"]["mean_steps"]) == (0, 60)
    assert rows["0.1"]["difference"] == pytest.approx(27.5)
    # All six seeds differ in one direction: 2 of 64 exchanges are as extreme, and the bounds are the extreme seeds.
    assert rows["0.1"]["p"] == rows["0.1"]["p_holm"] == 2 / 64
    assert (rows["0.1"]["difference_low"], rows["0.1"]["difference_high"]) == (15, 40)
    assert (rows["0.3"]["runs"], math.isnan(rows["0.3"]["mean_steps"])) == (0, True)  # a failed run says nothing


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_seeds", "change", "note"),
    [
        (5, {}, "an interval needs 6 seeds"),
        (6, {"status": "completed", "steps": 60, "stop": None}, "no run collapsed"),
        (6, {"steps": 20}, "the differences of all seeds are equal"),
    ],
)
def test_without_an_interval_a_row_says_why(tmp_path: Path, num_seeds: int, change: dict[str, Any], note: str) -> None:
    runs = [replace(run, **change) if run.arm == "0" else run for run in make_runs(num_seeds)]
    row = collapse(make_frames(tmp_path, runs))["0.1"]
    assert row["note"] == note
    assert np.isnan([row["difference_low"], row["difference_high"]]).all()


def test_validations_have_their_costs_and_episodes(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, [FakeRun("0"), FakeRun("0.1")])
    table = make_costs(frames)
    assert set(table["episodes"]) == {40}
    first = table.iloc[0]
    assert (first["step"], first["total_optimizer_steps"], first["total_sampled_tokens"]) == (0, 0, 0)
    for row in to_records(table[table["step"] > 0]):
        step = frames.steps[(frames.steps["run_id"] == row["run_id"]) & (frames.steps["step"] == row["step"])].iloc[0]
        assert row["total_optimizer_steps"] == step["total_optimizer_steps"]


@pytest.mark.slow
def test_a_ceiling_above_that_of_the_baseline_is_resolved_with_five_seeds(tmp_path: Path) -> None:
    levels = {"0": 0.5, "0.1": 0.75}
    runs = [FakeRun(arm, seed, success=(0.3, end + 0.004 * seed)) for arm, end in levels.items() for seed in range(5)]
    runs += [FakeRun("1", seed, success=(0.6, 0.0)) for seed in range(5)]
    table = summarize_curves(load(write_study(tmp_path, runs, FakeStudy(levels=200))), np.random.default_rng(0))
    rows = {(row["cost"], row["arm"]): row for row in to_records(table)}
    for cost in ("total_optimizer_steps", "total_sampled_tokens"):
        row = rows[cost, "0.1"]
        assert row["ceiling_difference"] > 0.15
        assert row["ceiling_difference_low"] > 0
        assert row["p_ceiling_holm"] < 0.05
        assert row["refusal"] == ""
        assert rows[cost, "1"]["refusal"].startswith("Collapse: ")
        assert math.isnan(rows[cost, "1"]["ceiling"])
    p_values = np.concatenate([table["p_ceiling"], table["p_midpoint"]])
    adjusted = np.concatenate([table["p_ceiling_holm"], table["p_midpoint_holm"]])
    assert adjusted == pytest.approx(holm_adjust(p_values), nan_ok=True)


def test_one_seed_gives_curves_without_intervals_also_where_a_cost_is_missing(tmp_path: Path) -> None:
    runs = [FakeRun("0", success=(0.3, 0.6)), FakeRun("0.1", success=(0.3, 0.7))]
    frames = load(write_study(tmp_path, runs, FakeStudy(levels=200)))
    table = summarize_curves(frames, np.random.default_rng(0))
    assert table["ceiling"].between(0.4, 1).all()
    assert table[["ceiling_low", "p_ceiling", "midpoint_low"]].isna().all(axis=None)
    steps = frames.steps.copy()
    steps.loc[(steps["arm"] == "0") & (steps["step"] == 30), "total_sampled_tokens"] = np.nan
    table = summarize_curves(replace(frames, steps=steps), np.random.default_rng(0)).set_index(["cost", "arm"])
    ceilings = table["ceiling"]
    assert ceilings["total_sampled_tokens", "0"] != ceilings["total_optimizer_steps", "0"]
    assert ceilings.notna().all()


def test_a_study_without_rows_has_neither_and_one_without_levels_no_curves(tmp_path: Path) -> None:
    for index, runs in enumerate(([], [FakeRun("0", status="", steps=0)], [FakeRun("0", status="failed", steps=0)])):
        frames = make_frames(tmp_path / str(index), runs)
        assert summarize_curves(frames, np.random.default_rng(0)).empty
        assert [row["runs"] for row in collapse(frames).values()] == [0] * len(runs)
    frames = make_frames(tmp_path / "levels", make_runs(2))
    frames = replace(frames, levels=frames.levels.iloc[:0])
    assert summarize_curves(frames, np.random.default_rng(0)).empty
    assert collapse(frames)["0"]["collapsed"] == 2

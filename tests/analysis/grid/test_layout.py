"""Tests of grids: factors come from configurations alone, cells are numbers of runs or say why there is none."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.grid import layout
from tests.fakes.grid_folders import write_grid
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

SMALL = FakeStudy(levels=20, total_steps=4, baseline="a")
KL, ENTROPY, FILTER = "actor.kl_loss_coef", "actor.entropy_coeff", "filter.rollout_filter_value"


def make_named_frames(folder: Path, arms: dict[str, dict[str, object]], **run_fields: Any) -> StudyFrames:
    """Write and load a study of named arms with these settings."""
    runs = [FakeRun(name, steps=4, settings=settings, **run_fields) for name, settings in arms.items()]
    return load(write_study(folder, runs, SMALL))


def test_the_factors_and_panels_of_the_smoke_grid(one_loss_frames: StudyFrames, three_loss_frames: StudyFrames) -> None:
    grid = layout.find_grid(one_loss_frames)
    assert (grid.x, grid.y) == (KL, ENTROPY)
    assert set(grid.panels) == {FILTER, "algorithm.zero_task_advantage"}
    assert grid.factor_values[FILTER] == (1.0, 0.8, 0.6, 0.4)
    assert sorted(grid.factor_values[KL]) == [0, 0.001, 0.003, 0.01, 0.03]
    assert set(layout.find_grid(three_loss_frames).panels) == {*grid.panels, "actor.kl_loss_type"}
    cells = layout.make_cell_table(grid, layout.make_member_table(one_loss_frames, grid))
    assert cells.groupby("panel", sort=False).size().to_dict() == {
        "filter 1": 25, "filter 1, zero task advantage": 16, "filter 0.8": 9, "filter 0.6": 9, "filter 0.4": 9,
    }  # fmt: skip


@pytest.mark.long
def test_one_factor_is_no_grid_and_two_are(tmp_path: Path) -> None:
    axis_frames = load(write_study(tmp_path / "axis", [FakeRun("0", steps=4), FakeRun("0.1", steps=4)], SMALL))
    assert layout.find_grid(axis_frames) is None
    one_factor_frames = make_named_frames(tmp_path / "one", {"a": {ENTROPY: 0.0}, "b": {ENTROPY: 0.1}})
    assert layout.find_grid(one_factor_frames) is None
    switched_arms = {"a": {KL: 0.0, "actor.use_kl_loss": False}, "b": {KL: 0.1, "actor.use_kl_loss": True}}
    assert layout.find_grid(make_named_frames(tmp_path / "switched", switched_arms)) is None  # a switch is not a factor
    assert layout.find_grid(load(write_study(tmp_path / "none", [], SMALL))) is None
    two_factor_frames = make_named_frames(
        tmp_path / "two", {"a": {ENTROPY: 0.0, FILTER: 1.0}, "b": {ENTROPY: 0.1, FILTER: 0.5}}
    )
    grid = layout.find_grid(two_factor_frames)
    assert (grid.x, grid.y, grid.panels) == (ENTROPY, FILTER, ())


def test_the_plane_is_the_pair_with_the_most_points_and_equal_ones_keep_their_names(tmp_path: Path) -> None:
    points = product((0.1, 0.2), (0.0, 0.1, 0.2), (1.0, 0.8, 0.6))
    arms = {f"{a}-{b}-{c}": {"actor.lr": a, ENTROPY: b, FILTER: c} for a, b, c in points}
    grid = layout.find_grid(make_named_frames(tmp_path, arms))
    assert {grid.x, grid.y} == {ENTROPY, FILTER}
    assert grid.panels == ("actor.lr",)
    equal: dict[str, dict[str, object]] = {
        **{name: {ENTROPY: 0.0, FILTER: 1.0} for name in "ab"},
        "c": {ENTROPY: 0.1, FILTER: 0.5},
    }
    frames = make_named_frames(tmp_path / "equal", equal)
    labels = list(layout.make_arm_labels(frames, layout.find_grid(frames)).values())
    assert labels[:2] == ["entropy 0 · filter 1 (a)", "entropy 0 · filter 1 (b)"]
    table = layout.make_cell_table(layout.find_grid(frames), layout.make_member_table(frames, layout.find_grid(frames)))
    assert table["arms"].to_list() == ["c", "a, b"]


@pytest.mark.long
def test_cells_are_the_means_of_their_runs(tmp_path: Path) -> None:
    """A literal double loop over arms and runs gives the same numbers."""
    frames = load(write_grid(tmp_path, {"low_var_kl": ("5",)}, seeds=3, levels=20))
    grid = layout.find_grid(frames)
    table = layout.make_cell_table(grid, layout.make_member_table(frames, grid))
    assert len(table) == 16
    assert (table["runs"] == 3).all()
    for cell in to_records(table):
        scored_runs = frames.trials[frames.trials["arm"] == cell["arms"]]
        scored_runs = scored_runs[scored_runs["status"].isin(("completed", "early_stopped"))]
        success = scored_runs["late_val_success"].to_numpy()
        late_entropies = []
        for run in to_records(scored_runs):
            steps = frames.steps[frames.steps["run_id"] == run["run_id"]]
            late_entropies.append(steps.loc[steps["step"] > 0.75 * run["steps_done"], "entropy"].mean())
        assert cell["success"] == pytest.approx(success.mean())
        assert cell["success_std"] == pytest.approx(success.std(ddof=1))
        assert (cell["success_low"], cell["success_high"]) == (success.min(), success.max())
        assert cell["entropy"] == pytest.approx(np.mean(late_entropies))
        assert cell["scored"] == len(scored_runs)
    assert set(table["scored"]) == {2, 3}  # one run failed, one never ran


def test_a_stop_is_a_failed_regime_with_its_value_and_no_run_is_no_number(one_loss_frames: StudyFrames) -> None:
    grid = layout.find_grid(one_loss_frames)
    table = layout.make_cell_table(grid, layout.make_member_table(one_loss_frames, grid)).set_index("arms")
    for run in to_records(one_loss_frames.trials):
        cell = table.loc[run["arm"]]
        if run["status"] == "early_stopped":
            assert cell["state"] == "stopped"
            assert cell["success"] == run["late_val_success"]
        elif run["status"] == "completed":
            assert (cell["state"], cell["early_stopped"]) == ("scored", 0)
        else:
            assert cell["state"] == run["status"]
            assert np.isnan(cell[[measure.name for measure in layout.MEASURES]].to_numpy(dtype=float)).all()
    assert set(one_loss_frames.trials["status"]) == {"completed", "early_stopped", "failed", "never_ran"}


def test_runs_without_a_kl_loss_count_once(three_loss_frames: StudyFrames) -> None:
    grid = layout.find_grid(three_loss_frames)
    members = layout.make_member_table(three_loss_frames, grid)
    shared_members = members[members["shared"]]
    assert (shared_members[KL] == 0).all()
    assert (shared_members.groupby("run_id").size() == 3).all()
    assert shared_members["run_id"].nunique() == 20  # groups 2 and 3
    assert members["home"].sum() == len(three_loss_frames.trials) == 164
    assert (shared_members.groupby("run_id")["success"].nunique(dropna=False) == 1).all()


def test_labels_name_points_and_are_unique(three_loss_frames: StudyFrames) -> None:
    grid = layout.find_grid(three_loss_frames)
    labels = layout.make_arm_labels(three_loss_frames, grid)
    assert len(set(labels.values())) == len(labels) == 164
    assert labels["g3-smoke-ppo-sokoban-topk100-kl0-ent0-low_var_kl"] == "filter 1 · KL 0 · entropy 0"
    name = "g4-smoke-ppo-sokoban-ta-topk100-kl001-ent0003-mse"
    assert labels[name] == "filter 1 · loss mse · zero task advantage · KL 0.01 · entropy 0.003"
    renamed_frames = layout.rename_arms(three_loss_frames, labels)
    assert renamed_frames.studies[0].baseline == "filter 1 · KL 0 · entropy 0"
    arms = {label: arm for arm, label in labels.items()}
    assert renamed_frames.steps["arm"].map(arms).equals(three_loss_frames.steps["arm"])

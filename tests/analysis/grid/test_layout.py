"""A grid's factors come from configurations alone; its cells are the runs' own numbers, and say who has none."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.grid import layout
from analysis.grid import page as grid_page
from analysis.grid.contrasts import compare_switch, list_switches
from analysis.grid.measures import MEASURES
from analysis.sweep import tables
from tests.fakes.grid_folders import ALL_TYPES, ONE_TYPE, list_smoke_arms, write_grid
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

SMALL = FakeStudy(levels=20, total_steps=4, baseline="a")
KL, ENTROPY, FILTER = "actor.kl_loss_coef", "actor.entropy_coeff", "filter.rollout_filter_value"


def found_in(frames: StudyFrames) -> layout.Grid:
    found = layout.find_grid(frames)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """The 68 arms of one KL loss."""
    return load(write_grid(tmp_path_factory.mktemp("one"), ONE_TYPE, levels=20))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """The 164 arms of three KL losses."""
    return load(write_grid(tmp_path_factory.mktemp("three"), ALL_TYPES, levels=20))


def named(folder: Path, arms: dict[str, dict[str, object]], **made: Any) -> StudyFrames:
    """A study of named arms with these settings."""
    runs = [FakeRun(name, steps=4, settings=settings, **made) for name, settings in arms.items()]
    return load(write_study(folder, runs, SMALL))


def test_the_factors_of_the_smoke_grid(one: StudyFrames, three: StudyFrames) -> None:
    found = found_in(one)
    assert (found.x, found.y) == (KL, ENTROPY)
    assert set(found.panels) == {FILTER, "algorithm.zero_task_advantage"}
    assert found.factor_values[FILTER] == (1.0, 0.8, 0.6, 0.4)
    assert sorted(found.factor_values[KL]) == [0, 0.001, 0.003, 0.01, 0.03]
    assert set(found_in(three).panels) == {*found.panels, "actor.kl_loss_type"}


def test_panels_and_their_sizes_are_those_of_the_groups(one: StudyFrames) -> None:
    found = found_in(one)
    sizes = (
        layout.make_cell_table(found, layout.make_member_table(one, found))
        .groupby("panel", sort=False)
        .size()
        .to_dict()
    )
    assert sizes == {
        "filter 1": 25,
        "filter 1, zero task advantage": 16,
        "filter 0.8": 9,
        "filter 0.6": 9,
        "filter 0.4": 9,
    }


def test_one_axis_is_no_grid_and_two_are(tmp_path: Path) -> None:
    axis = load(write_study(tmp_path / "axis", [FakeRun("0", steps=4), FakeRun("0.1", steps=4)], SMALL))
    assert layout.find_grid(axis) is None
    one = named(tmp_path / "one", {"a": {ENTROPY: 0.0}, "b": {ENTROPY: 0.1}})
    assert layout.find_grid(one) is None
    switched = {"a": {KL: 0.0, "actor.use_kl_loss": False}, "b": {KL: 0.1, "actor.use_kl_loss": True}}
    assert layout.find_grid(named(tmp_path / "switched", switched)) is None  # a switch is no factor
    assert layout.find_grid(load(write_study(tmp_path / "none", [], SMALL))) is None
    two = named(tmp_path / "two", {"a": {ENTROPY: 0.0, FILTER: 1.0}, "b": {ENTROPY: 0.1, FILTER: 0.5}})
    assert (found_in(two).x, found_in(two).y, found_in(two).panels) == (ENTROPY, FILTER, ())


def test_the_plane_is_the_pair_with_the_most_points(tmp_path: Path) -> None:
    arms = {
        f"{a}-{b}-{c}": {"actor.lr": a, ENTROPY: b, FILTER: c}
        for a in (0.1, 0.2)
        for b in (0.0, 0.1, 0.2)
        for c in (1.0, 0.8, 0.6)
    }
    found = found_in(named(tmp_path, arms))
    assert {found.x, found.y} == {ENTROPY, FILTER}
    assert found.panels == ("actor.lr",)


def test_cells_are_the_means_of_their_runs(tmp_path: Path) -> None:
    """A literal double loop over arms and runs gives the same numbers."""
    frames = load(write_grid(tmp_path, {"low_var_kl": ("5",)}, seeds=3, levels=20))
    found = found_in(frames)
    table = layout.make_cell_table(found, layout.make_member_table(frames, found))
    assert len(table) == 16
    assert (table["runs"] == 3).all()
    for cell in to_records(table):
        own = frames.trials[frames.trials["arm"] == cell["arms"]]
        own = own[own["status"].isin(("completed", "early_stopped"))]
        success = own["final_val_success"].to_numpy()
        late = []
        for run in to_records(own):
            steps = frames.steps[frames.steps["run_id"] == run["run_id"]]
            late.append(steps.loc[steps["step"] > 0.75 * run["steps_done"], "entropy"].mean())
        assert cell["success"] == pytest.approx(success.mean())
        assert cell["success_std"] == pytest.approx(success.std(ddof=1))
        assert (cell["success_low"], cell["success_high"]) == (success.min(), success.max())
        assert cell["entropy"] == pytest.approx(np.mean(late))
        assert cell["scored"] == len(own)
    assert set(table["scored"]) == {2, 3}  # one run failed, one never ran


def test_a_stop_is_a_failed_regime_with_its_value_and_no_run_is_no_number(one: StudyFrames) -> None:
    found = found_in(one)
    table = layout.make_cell_table(found, layout.make_member_table(one, found)).set_index("arms")
    for run in to_records(one.trials):
        cell = table.loc[run["arm"]]
        if run["status"] == "early_stopped":
            assert cell["state"] == "stopped"
            assert cell["success"] == run["final_val_success"]
        elif run["status"] == "completed":
            assert (cell["state"], cell["early_stopped"]) == ("scored", 0)
        else:
            assert cell["state"] == run["status"]
            assert np.isnan(cell[[measure.name for measure in MEASURES]].to_numpy(dtype=float)).all()
    assert set(one.trials["status"]) == {"completed", "early_stopped", "failed", "never_ran"}


def test_runs_without_a_kl_loss_are_shown_under_each_form_but_counted_once(three: StudyFrames) -> None:
    found = found_in(three)
    members = layout.make_member_table(three, found)
    idle = members[members["shared"]]
    assert (idle[KL] == 0).all()
    assert (idle.groupby("run_id").size() == 3).all()
    assert idle["run_id"].nunique() == 20  # groups 2 and 3
    assert members["home"].sum() == len(three.trials) == 164
    assert (idle.groupby("run_id")["success"].nunique(dropna=False) == 1).all()


def test_labels_name_points_and_are_unique(three: StudyFrames) -> None:
    found = found_in(three)
    labels = layout.make_arm_labels(three, found)
    assert len(set(labels.values())) == len(labels) == 164
    assert labels["g3-smoke-ppo-sokoban-topk100-kl0-ent0-low_var_kl"] == "filter 1 · KL 0 · entropy 0"
    name = "g4-smoke-ppo-sokoban-ta-topk100-kl001-ent0003-mse"
    assert labels[name] == "filter 1 · loss mse · zero task advantage · KL 0.01 · entropy 0.003"
    renamed = layout.rename_arms(three, labels)
    assert renamed.studies[0]["baseline"] == "filter 1 · KL 0 · entropy 0"
    assert renamed.steps["arm"].map({label: arm for arm, label in labels.items()}).equals(three.steps["arm"])


def test_equal_points_keep_their_own_names(tmp_path: Path) -> None:
    arms: dict[str, dict[str, object]] = {
        "a": {ENTROPY: 0.0, FILTER: 1.0},
        "b": {ENTROPY: 0.0, FILTER: 1.0},
        "c": {ENTROPY: 0.1, FILTER: 0.5},
    }
    frames = named(tmp_path, arms)
    assert list(layout.make_arm_labels(frames, found_in(frames)).values())[:2] == [
        "entropy 0 · filter 1 (a)",
        "entropy 0 · filter 1 (b)",
    ]
    table = layout.make_cell_table(found_in(frames), layout.make_member_table(frames, found_in(frames)))
    assert table["arms"].to_list() == ["c", "a, b"]


def test_the_contrast_is_on_minus_off_over_equal_points(one: StudyFrames) -> None:
    found = found_in(one)
    (setting,) = list_switches(found)
    members = layout.make_member_table(one, found)
    row = compare_switch(found, members, setting).set_index("measure").loc["success"]
    success = one.trials.set_index("arm")["final_val_success"]
    settings = list_smoke_arms(ONE_TYPE)
    twins = [(arm, arm.replace("g4", "g5").replace("ta-topk100", "nofilter")) for arm in settings if "-ta-" in arm]
    differences = [success[on] - success[off] for on, off in twins]
    assert row["pairs"] == len(twins) == 16
    assert row["difference"] == pytest.approx(np.mean(differences))
    assert row["higher"] == sum(difference > 0 for difference in differences)
    assert row["low"] < row["difference"] < row["high"] < 0  # the task helps in the made grid
    assert (row["stopped_off"], row["stopped_on"]) == (4, 0)


def test_each_form_of_the_loss_has_its_own_contrast(three: StudyFrames) -> None:
    found = found_in(three)
    table = compare_switch(found, layout.make_member_table(three, found), "algorithm.zero_task_advantage")
    assert list(dict.fromkeys(table["group"])) == ["kl", "mse", "low_var_kl"]
    assert (table["pairs"] == 16).all()


@pytest.mark.slow
def test_the_page_has_every_arm_once_and_counts_comparisons(three: StudyFrames) -> None:
    found = found_in(three)
    arms = to_records(tables.summarize_arms(layout.rename_arms(three, layout.make_arm_labels(three, found))))
    context = grid_page.make_context(three, found, arms, 0)
    listed = [arm["name"] for panel in context["panels"] for arm in panel["arms"]]
    assert sorted(listed) == sorted(three.trials["arm"])
    assert context["comparisons"] == sum(not np.isnan(arm["p"]) for arm in arms) == 161
    assert context["shared"] == 20
    for panel in context["panels"]:
        assert sum(panel["outcomes"].values()) == len(panel["arms"])


def test_tables_beside_the_pictures_hold_every_cell(three: StudyFrames) -> None:
    found = found_in(three)
    written = dict(grid_page.make_tables(three, found))
    assert set(written) == {"grid_cells", "grid_zero_task_advantage", "grid_kl_to_reference"}
    cells = layout.make_cell_table(found, layout.make_member_table(three, found))
    assert len(written["grid_cells"]) == len(cells)
    pd.testing.assert_series_equal(written["grid_cells"]["success"], cells["success"])

"""Tests of the families of studies: their columns, the summary of a sandbox run, and two families loaded together."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import analysis
from analysis.data.frames import FRAME_NAMES, NONDETERMINISTIC_COLUMNS, SCHEMAS, StudyFrames
from analysis.data.load import load, read_study
from analysis.data.schemas import get_family, get_schemas
from analysis.data.summaries import LATE_EVALUATIONS, compute_late_mean
from analysis.sweep.series import make_curves
from sandboxes.update_rules import family as sandbox
from search_spaces.catalog import FAMILIES
from tests.analysis.data.comparing import check_parquet, diff_all_frames
from tests.fakes import run_folders
from tests.fakes.run_folders import make_study_record
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, write_sandbox
from trainable.files.json_lines import read_lines, write_lines
from trainable.files.json_values import read_object, write_object
from trainable.runs.records import ROW_COLUMNS, STOP_COLUMNS, TOY_TIME_COLUMNS

SHORT = FakeStudy(total_steps=60)
COMMON = (
    *("run_id", "study", "arm", "seed", "axis_setting", "axis_value", "trial_id", "config_hash", "experiment_name"),
    *("status", "reason", "failure_class", "steps_done", "steps_total", "started_at", "ended_at"),
    *("stop_rule", "stop_value", "stop_threshold", "stop_step"),
)


def read_one_run(folder: Path, run: FakeRun, study: FakeStudy = SHORT) -> StudyFrames:
    return read_study(write_sandbox(folder, [run], study))


def test_columns_are_those_of_the_family(tmp_path: Path) -> None:
    frames = read_one_run(tmp_path, FakeRun("DG", steps=60))
    steps = [*ROW_COLUMNS, *sandbox.STEP_COLUMNS, *STOP_COLUMNS]
    assert list(frames.steps) == [column.name for column in steps]
    trials = [name for name in frames.trials if not name.startswith("config/")]
    assert trials == [*COMMON, *(column.name for column in sandbox.TRIAL_COLUMNS)]
    assert frames.families == [FAMILIES["update_rules"]]
    assert all(frame.empty for frame in (frames.levels, frames.gradients, frames.gradient_groups))
    assert frames.trials.loc[0, "config/method"] == "DG"
    for name, schema in get_schemas("update_rules").items():
        dtypes = getattr(frames, name).dtypes
        assert {column: str(dtypes[column]) for column in schema} == dict(schema)


def test_a_study_without_a_family_is_of_language_models_and_shared_names_have_one_type(tmp_path: Path) -> None:
    folder = run_folders.write_study(tmp_path, [run_folders.FakeRun("0", steps=3)])
    frames = read_study(folder)
    assert frames.families == [FAMILIES["ppo"]]
    assert get_schemas("ppo") == SCHEMAS
    assert "final_val_success" in frames.trials
    write_object(folder / "study.json", {**read_object(folder / "study.json"), "family": "ppo"})
    assert diff_all_frames(frames, read_study(folder)) == []
    for name in FRAME_NAMES:
        column_types = [set(get_schemas(family.name)[name].items()) for family in FAMILIES.values()]
        merged_types = set.union(*column_types)
        assert len(merged_types) == len({column for column, _ in merged_types})
    assert {column.name for column in TOY_TIME_COLUMNS} <= NONDETERMINISTIC_COLUMNS


def test_rows_start_at_step_0_and_a_trial_has_the_values_of_its_last_row(tmp_path: Path) -> None:
    run = FakeRun("DG", steps=60, error=(0.6, 0.0), entropy=(1.0, 0.1), final={"chain_reward": 0.75})
    frames = read_one_run(tmp_path, run)
    assert frames.steps["step"].to_list() == [0, 20, 40, 60]
    trial = frames.trials.iloc[0]
    assert (trial["steps_done"], trial["steps_total"], trial["status"]) == (60, 60, "completed")
    assert (trial["final_test_error"], trial["final_entropy"], trial["final_chain_reward"]) == (0.0, 0.1, 0.75)
    # An error of 0, and an entropy of at most 0.1.
    assert (trial["first_step_error_zero"], trial["first_step_entropy_low"]) == (60, 60)
    assert np.isnan(trial["final_perplexity"])
    high = read_one_run(tmp_path / "high", FakeRun("DG", steps=60, error=(0.6, 0.001), entropy=(1.0, 0.101))).trials
    assert high[["first_step_error_zero", "first_step_entropy_low"]].isna().all(axis=None)


def test_first_steps_and_ages_weighted_by_batches(tmp_path: Path) -> None:
    folder = write_sandbox(tmp_path, [FakeRun("DG", steps=60)], SHORT)
    path = folder / "runs" / "DG-seed0" / "metrics.jsonl"
    rows = read_lines(path).records
    ages = ({"age_mean": 4.0}, {"age_mean": 6.0}, {}, {"age_mean": 8.0})
    changes = [{"entropy": entropy, **age} for entropy, age in zip((0.5, 0.05, 0.5, 0.01), ages, strict=True)]
    write_lines(path, [{**row, **change} for row, change in zip(rows, changes, strict=True)])
    trial = read_study(folder).trials.iloc[0]
    assert trial["first_step_entropy_low"] == 20
    # Step 0, steps 1 to 20, and steps 41 to 59: no batch follows the last evaluation.
    batches = {4.0: 1, 6.0: 20, 8.0: 19}
    assert trial["mean_replay_age"] == pytest.approx(sum(age * n for age, n in batches.items()) / 40)
    assert np.isnan(trial["mean_effective_age"])


UNEVEN = ((0, 1.0), (20, 0.6), (50, 0.3), (60, 0.1))
"""Step and entropy. Area: 20 (1 + .6)/2 = 16, 30 (.6 + .3)/2 = 13.5, 10 (.3 + .1)/2 = 2; the plain mean is 0.5."""


def write_rows(folder: Path, entropies: Sequence[tuple[int, float | None]]) -> Path:
    """Replace the rows of the only run in a folder."""
    (path,) = folder.glob("runs/*/metrics.jsonl")
    first_row, *_, last_row = read_lines(path).records
    rows = [{**first_row, "step": step, "entropy": entropy} for step, entropy in entropies]
    rows[-1] |= {name: value for name, value in last_row.items() if name.startswith("stop_")}
    write_lines(path, rows)
    return folder


@pytest.mark.parametrize(
    ("status", "total", "rows", "mean"),
    [
        ("completed", 60, UNEVEN, (16 + 13.5 + 2) / 60),
        ("completed", 60, ((0, 1.0), (60, 0.1)), 0.55),
        ("early_stopped", 100, UNEVEN, (16 + 13.5 + 2 + 40 * 0.1) / 100),  # the last value counts until the end
        ("failed", 100, UNEVEN, (16 + 13.5 + 2) / 60),  # not scored, so its curve ends at its last row
        ("completed", 60, ((0, 1.0), (20, None), (50, 0.5), (60, 0.5)), (37.5 + 5) / 60),
        ("completed", 60, ((0, None), (20, 0.6), (60, 0.2)), 0.4),  # the curve starts at its first value
        ("completed", 60, ((0, None), (60, None)), math.nan),
        ("running", 60, ((0, 0.7),), 0.7),
    ],
)
def test_mean_entropy_is_the_area_over_its_length(
    tmp_path: Path, status: str, total: int, rows: Sequence[tuple[int, float | None]], mean: float
) -> None:
    run = FakeRun("DG", steps=60, status=status, stop=UNIFORM_STOP if status == "early_stopped" else None)
    folder = write_rows(write_sandbox(tmp_path, [run], FakeStudy(total_steps=total)), rows)
    assert read_study(folder).trials["mean_entropy"].iloc[0] == pytest.approx(mean, nan_ok=True)


def test_odd_lines_are_left_out(tmp_path: Path) -> None:
    folder = write_sandbox(tmp_path, [FakeRun("DG", steps=60)], SHORT)
    path = folder / "runs" / "DG-seed0" / "metrics.jsonl"
    rows = read_lines(path).records
    odd_row = {**rows[0], "test_error": "low", "no such column": 1}
    write_lines(path, [{"step": -1}, odd_row, *rows[1:]])
    path.write_bytes(path.read_bytes()[:-40])
    frames = read_study(folder)
    assert frames.steps["step"].to_list() == [0, 20, 40]
    assert np.isnan(frames.steps.loc[0, "test_error"])
    assert frames.trials.loc[0, "final_test_error"] == frames.steps.loc[2, "test_error"]


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    runs = [FakeRun("DG", steps=60), FakeRun("GRPO", steps=40, status="early_stopped", stop=UNIFORM_STOP)]
    check_parquet(write_sandbox(tmp_path, [*runs, FakeRun("TPO", steps=None, status="")], SHORT))


@pytest.mark.long
def test_studies_of_two_families_are_loaded_into_the_same_frames(tmp_path: Path) -> None:
    rules_folder = write_sandbox(tmp_path, [FakeRun("DG", steps=60)], SHORT)
    fake_study = run_folders.FakeStudy(total_steps=3, test_freq=2, levels=10)
    kl_folder = run_folders.write_study(tmp_path, [run_folders.FakeRun("0", steps=3)], fake_study)
    frames = load(tmp_path)
    assert [family.name for family in frames.families] == ["ppo", "update_rules"]
    assert frames.trials["study"].to_list() == ["kl", "influence"]
    assert frames.steps["test_error"].isna().to_list() == [True] * 3 + [False] * 4
    assert frames.steps["pg_loss"].isna().to_list() == [False] * 3 + [True] * 4
    for name, folder in (("kl", kl_folder), ("influence", rules_folder)):
        selected_frames, separate_frames = frames.select_study(name), read_study(folder)
        for frame_name in FRAME_NAMES:
            columns = [column for column in getattr(separate_frames, frame_name) if not column.startswith("config/")]
            extra_columns = [column for column in getattr(selected_frames, frame_name) if column not in columns]
            assert all(column.startswith("config/") for column in extra_columns)
            selected, separate = (getattr(each, frame_name)[columns] for each in (selected_frames, separate_frames))
            assert analysis.diff_frames(selected, separate) == []


def test_an_unknown_family_is_named_and_a_column_of_none_has_no_curve(tmp_path: Path) -> None:
    folder = write_sandbox(tmp_path, [FakeRun("DG", steps=60)], FakeStudy(extra={"family": "trees"}))
    with pytest.raises(ValueError, match=r"`influence` names the family 'trees', .* Known families: ppo, update_rules"):
        load(folder)
    assert get_family(make_study_record()) is FAMILIES["ppo"]
    frames = read_one_run(tmp_path / "known", FakeRun("DG", steps=60))
    assert make_curves(frames, "test_error")["step"].to_list() == [0, 20, 40, 60]
    with pytest.raises(ValueError, match="no step column `val_success`"):
        make_curves(frames, "val_success")


def test_the_outcome_is_the_mean_of_the_last_four_evaluations() -> None:
    curve = [(0, 9.0), (5, 1.0), (10, 2.0), (15, 3.0), (20, 4.0), (25, 5.0)]
    # Without the one before training, unless there is no other.
    means = [compute_late_mean(curve[:count], None) for count in (6, 3, 1, 0)]
    assert means == [3.5, 1.5, 9.0, None]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 30))
def test_missed_evaluations_repeat_the_last_value(values: list[float], interval: int, missed_steps: int) -> None:
    curve = [(interval * number, value) for number, value in enumerate(values, 1)]
    end_step = interval * len(values) + missed_steps
    planned = [step for step in range(1, end_step + 1) if step % interval == 0 or step == end_step]
    carried = [values[min(number, len(values) - 1)] for number in range(len(planned))]
    late = carried[-LATE_EVALUATIONS:]
    assert compute_late_mean(curve, end_step) == pytest.approx(sum(late) / len(late))

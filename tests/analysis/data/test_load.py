"""Tests of reading files into frames: torn lines, repeated steps, statuses, several studies, parquet, moved folders."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis import diff_frames
from analysis.data.frames import FRAME_NAMES, SCHEMAS, StudyFrames, cast_frame
from analysis.data.load import load, read_study
from analysis.data.schemas import CATEGORY
from analysis.data.tables import write_table
from tests.fakes.lines import append_record, change_records
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_lines import read_lines, write_lines
from trainable.files.json_values import DamageWarning, read_object, write_object
from trainable.files.paths import UnsafePathError
from trainable.runs.records import (
    ROW_COLUMNS,
    STEP_COLUMNS,
    STOP_COLUMNS,
    TRIAL_COLUMNS,
    TRIAL_LAST_VALUES,
)
from trainable.runs.run_files import ENDS_KEY
from trainable.runs.study_record import MAX_RUNS, SCHEMA
from tune_study.folder.outputs import lock_folder, write_tables

SHORT = FakeStudy(total_steps=3, test_freq=2, levels=10)
STOPPED = FakeRun(
    "0.3", status="early_stopped", steps=3, success=(0.35, 0.0), stop=("low_validation_success", 0.002, 0.01)
)


def get_path(folder: Path, run: FakeRun, name: str) -> Path:
    return folder / "runs" / run.run_id / name


def diff_all_frames(a: StudyFrames, b: StudyFrames) -> list[str]:
    return [line for name in FRAME_NAMES for line in analysis.diff_frames(getattr(a, name), getattr(b, name))]


def test_one_call_opens_a_study(tmp_path: Path) -> None:
    write_study(tmp_path, [FakeRun("0", steps=3), FakeRun("0.1", steps=3)], SHORT)
    frames = analysis.load(tmp_path)
    assert len(frames.trials) == 2
    assert len(frames.steps) == 6
    assert frames.trials["status"].to_list() == ["completed", "completed"]


def test_columns_are_those_of_the_records(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", steps=3)], SHORT))
    assert list(frames.steps) == [column.name for column in (*ROW_COLUMNS, *STEP_COLUMNS, *STOP_COLUMNS)]
    expected = {column.name for column in (*TRIAL_COLUMNS, *STOP_COLUMNS)} | set(TRIAL_LAST_VALUES)
    expected |= {"run_id", "study", "arm", "seed", "axis_setting", "axis_value"}
    assert {name for name in frames.trials if not name.startswith("config/")} == expected
    assert list(frames.levels) == list(SCHEMAS["levels"])


def test_settings_are_columns_of_their_own_types(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", steps=3), FakeRun("0.1", steps=3)], SHORT))
    assert frames.trials["config/actor.kl_loss_coef"].to_list() == [0.0, 0.1]
    assert frames.trials["config/actor.use_kl_loss"].to_list() == [False, True]
    assert frames.trials["config/env.group_size"].to_list() == [16, 16]
    assert frames.trials["config/actor.betas"].to_list() == ["[0.9, 0.999]"] * 2
    assert frames.trials["config/algorithm.kl_ctrl.type"].to_list() == ["fixed"] * 2


def test_the_numbers_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    run = FakeRun("0.1", steps=60)
    folder = write_study(tmp_path, [run])
    rows = read_lines(get_path(folder, run, "metrics.jsonl")).records
    trial = read_study(folder).trials.iloc[0]
    validations = [row["val_success"] for row in rows if row["val_success"] is not None]
    assert len(validations) == 12
    assert trial["final_val_success"] == validations[-1]
    assert trial["peak_val_success"] == max(validations)
    assert trial["base_val_success"] == rows[0]["base_val_success"]
    assert trial["test_success"] == rows[-1]["test_success"]
    assert (trial["steps_done"], trial["steps_total"]) == (60, 60)
    assert trial["total_env_steps"] == 54_000
    assert (trial["axis_value"], trial["axis_setting"]) == (0.1, "actor.kl_loss_coef")
    assert trial["started_at"] == pd.Timestamp("2026-01-02T03:04:06Z")


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    for name in ("metrics.jsonl", "levels.jsonl"):
        path = get_path(folder, run, name)
        path.write_bytes(path.read_bytes()[:-30])
    frames = read_study(folder)
    assert frames.steps["step"].to_list() == [1, 2]
    assert frames.trials.loc[0, "steps_done"] == 2
    assert ("test", "greedy") not in set(zip(frames.levels["split"], frames.levels["mode"], strict=True))


def test_a_line_torn_before_a_restart_is_left_out_and_its_repetition_counts(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, "metrics.jsonl")
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([first, second[:40], second, "7", third]) + "\n")
    assert read_study(folder).steps["step"].to_list() == [1, 2, 3]


def test_a_repeated_step_counts_and_gives_up_every_later_one(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, "metrics.jsonl")
    append_record(path, {**read_lines(path).records[1], "train_success": 0.875})
    frames = read_study(folder)
    assert frames.steps["step"].to_list() == [1, 2]
    assert frames.steps.loc[1, "train_success"] == 0.875
    assert frames.trials.loc[0, "steps_done"] == 2


def test_of_repeated_evaluations_the_last_line_counts(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, "levels.jsonl")
    level_count = len(read_study(folder).levels)
    line = read_lines(path).records[-1]
    append_record(path, {**line, "success": "1" * len(line["success"])})
    levels = read_study(folder).levels
    names = ["step", "split", "mode"]
    repeated = levels[(levels[names] == [line[name] for name in names]).all(axis=1)]
    assert len(levels) == level_count
    assert len(repeated) == len(line["success"])
    assert repeated["success"].all()


def test_levels_that_do_not_match_their_outcomes_are_refused(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, "levels.jsonl")
    write_lines(path, [{**read_lines(path).records[0], "success": "101"}])
    with pytest.raises(ValueError, match="10 levels, 10 clusters and 3 outcomes"):
        read_study(folder)


@pytest.mark.parametrize(
    ("status", "steps", "live", "expected", "reason"),
    [
        ("completed", 3, False, "completed", ""),
        ("early_stopped", 2, False, "early_stopped", ""),
        ("failed", 2, False, "failed", ""),
        ("failed", 0, False, "failed", ""),
        ("interrupted", 2, False, "interrupted", ""),
        ("interrupted", 0, False, "never_ran", "has not started"),
        ("never_ran", 0, False, "never_ran", "has not started"),
        ("running", 2, False, "interrupted", "the process that ran the study is gone, after step 2"),
        ("running", 0, False, "never_ran", "the process that ran the study is gone before its first step"),
        ("running", 2, True, "running", ""),
        ("running", 0, True, "running", ""),
        ("waiting", 2, False, "interrupted", ""),
        ("waiting", 0, False, "never_ran", "has not started"),
        ("waiting", 2, True, "waiting", ""),
        ("waiting", 0, True, "waiting", ""),
        ("completed", 2, False, "interrupted", "recorded as completed, but interrupted after step 2 of 3"),
        ("completed", 0, False, "interrupted", "recorded as completed, but it has no row"),
        ("early_stopped", 3, False, "early_stopped", ""),
        ("", 3, False, "completed", "trained 3 of 3 steps"),
        ("", 2, False, "interrupted", "interrupted after step 2 of 3"),
        ("", 0, False, "never_ran", "has not started"),
        ("", 0, True, "never_ran", "has not started"),
    ],
)
def test_statuses(tmp_path: Path, status: str, steps: int, live: bool, expected: str, reason: str) -> None:
    stop = ("uniform_groups", 3, 3) if status == "early_stopped" else None
    folder = write_study(tmp_path, [FakeRun("0", status=status, steps=steps, stop=stop)], SHORT)
    trial = read_study(folder, live=live).trials.iloc[0]
    assert (trial["status"], trial["reason"]) == (expected, reason)


def test_a_stop_that_no_row_tells_of_did_not_happen(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", status="early_stopped", steps=2)], SHORT)
    trial = read_study(folder).trials.iloc[0]
    assert trial["status"] == "interrupted"
    assert trial["reason"] == "recorded as early_stopped, but interrupted after step 2 of 3"


def test_without_status_json_the_last_row_tells_which_rule_stopped_the_run(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [STOPPED], SHORT)
    expected = read_study(folder).trials.iloc[0]
    (folder / "runs" / STOPPED.run_id / "status.json").unlink()
    trial = read_study(folder).trials.iloc[0]
    names = ["status", "stop_rule", "stop_value", "stop_threshold", "stop_step"]
    assert trial[names].to_list() == expected[names].to_list()
    assert trial["status"] == "early_stopped"


@pytest.mark.parametrize("name", ["metrics.jsonl", "levels.jsonl"])
def test_a_completed_run_with_a_changed_digit_is_not_shown_as_whole(tmp_path: Path, name: str) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, name)
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    trial = read_study(folder).trials.iloc[0]
    assert trial["status"] == "interrupted"
    assert trial["reason"] == f"recorded as completed, but {name} does not match its checksums at line 1"


def test_a_completed_run_without_a_recorded_episode_is_not_shown_as_whole(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = get_path(folder, run, "episodes.jsonl")
    for step in (0, 2):
        append_record(path, {"step": step, "level": 123})
    ends = {path.name: list(read_lines(path).end)}
    change_records(get_path(folder, run, "metrics.jsonl"), lambda rows: rows[-1].update({ENDS_KEY: ends}))
    assert read_study(folder).trials.loc[0, "status"] == "completed"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    trial = read_study(folder).trials.iloc[0]
    assert trial["status"] == "interrupted"
    problem = "episodes.jsonl lacks lines: it had 2 when the last row was written"
    assert trial["reason"] == f"recorded as completed, but {problem}"


def test_a_reason_is_kept(tmp_path: Path) -> None:
    run = FakeRun("0", status="failed", steps=2, reason="RuntimeError: no memory")
    assert read_study(write_study(tmp_path, [run], SHORT)).trials.loc[0, "reason"] == "RuntimeError: no memory"


def test_a_run_that_only_study_json_knows_never_ran(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run, FakeRun("0.1", steps=3)], SHORT)
    shutil.rmtree(folder / "runs" / run.run_id)
    trials = read_study(folder).trials
    assert trials["arm"].to_list() == ["0", "0.1"]
    assert trials["status"].to_list() == ["never_ran", "completed"]
    assert trials.loc[0, "steps_total"] == SHORT.total_steps  # of the study


def test_a_stop_is_in_the_row_at_which_it_fired_and_only_there(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [STOPPED, FakeRun("0", steps=3)], SHORT))
    rows = frames.steps[frames.steps["stop_rule"] != ""]
    assert rows[["arm", "step", "stop_step"]].to_numpy().tolist() == [["0.3", 3, 3]]
    assert rows[["stop_value", "stop_threshold"]].to_numpy().tolist() == [[0.002, 0.01]]
    assert frames.trials["stop_rule"].to_list() == ["low_validation_success", ""]
    assert frames.trials["stop_step"].isna().to_list() == [False, True]


def test_types_do_not_depend_on_what_is_missing(tmp_path: Path) -> None:
    stopped_frames = read_study(write_study(tmp_path / "a", [STOPPED], SHORT))
    never_ran_frames = read_study(write_study(tmp_path / "b", [FakeRun("0", status="", steps=0)], SHORT))
    empty_frames = read_study(write_study(tmp_path / "c", [], SHORT))
    for name in FRAME_NAMES:
        # As text, since two types of categories are equal only if the categories are.
        frame_dtypes = [
            getattr(frames, name).dtypes.astype("str") for frames in (stopped_frames, never_ran_frames, empty_frames)
        ]
        for dtypes in frame_dtypes[1:]:
            assert dtypes[list(SCHEMAS[name])].equals(frame_dtypes[0][list(SCHEMAS[name])])
    assert len(empty_frames.trials) == 0
    frames_without_entropy = read_study(
        write_study(tmp_path / "d", [FakeRun("0", steps=3, rows={"entropy": None})], SHORT)
    )
    assert frames_without_entropy.steps["entropy"].dtype == np.float64
    assert frames_without_entropy.steps["entropy"].isna().all()


def test_rows_are_in_the_order_of_the_study(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=3) for seed in (1, 0) for arm in ("nofilter", "0.1", "1.0")]
    study = FakeStudy(total_steps=3, levels=10, values=("1.0", "nofilter"))
    frames = read_study(write_study(tmp_path, runs, study))
    order = [("1.0", 0), ("1.0", 1), ("nofilter", 0), ("nofilter", 1), ("0.1", 0), ("0.1", 1)]
    assert list(zip(frames.trials["arm"], frames.trials["seed"], strict=True)) == order
    assert list(dict.fromkeys(zip(frames.steps["arm"], frames.steps["seed"], strict=True))) == order
    assert frames.trials["axis_value"].isna().to_list() == [False, False, True, True, False, False]


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3), STOPPED, FakeRun("1", status="", steps=0)], SHORT)
    frames = read_study(folder)
    frames.write_parquet(folder)
    loaded_frames = load(folder)
    assert diff_all_frames(frames, loaded_frames) == []
    for name in FRAME_NAMES:
        assert getattr(loaded_frames, name).dtypes.equals(getattr(frames, name).dtypes)
    assert loaded_frames.study == frames.study


def write_marked_tables(folder: Path) -> None:
    """Write tables that differ from the line files, so that a test sees which of them were read."""
    frames = read_study(folder)
    frames.steps["train_success"] = -1.0
    frames.write_parquet(folder)


def test_tables_are_read_while_they_are_newest(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    write_marked_tables(folder)
    assert (load(folder).steps["train_success"] == -1).all()
    oldest = min(path.stat().st_mtime_ns for path in folder.glob("*.parquet"))
    path = get_path(folder, run, "metrics.jsonl")
    os.utime(path, ns=(oldest - 1, oldest - 1))
    assert (load(folder).steps["train_success"] == -1).all()
    os.utime(path, ns=(oldest, oldest))
    assert (load(folder).steps["train_success"] != -1).all()


def test_tables_of_a_moved_folder_are_read(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "here", [FakeRun("0", steps=3)], SHORT)
    write_marked_tables(folder)
    (tmp_path / "here").rename(tmp_path / "there")
    assert (load(tmp_path / "there").steps["train_success"] == -1).all()


def test_a_running_status_in_the_tables_is_settled_when_it_is_read_later(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", status="running", steps=2)], SHORT)
    read_study(folder, live=True).write_parquet(folder)
    assert load(folder).trials.loc[0, "status"] == "interrupted"
    assert load(folder, live=True).trials.loc[0, "status"] == "running"


def test_several_studies_are_distinguished(tmp_path: Path) -> None:
    write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    entropy_study = FakeStudy(
        name="entropy", run="entropy_sweep", setting="actor.entropy_coeff", total_steps=3, levels=10
    )
    write_study(tmp_path, [FakeRun("0", steps=3), FakeRun("0.1", steps=3)], entropy_study)
    frames = load(tmp_path)
    assert frames.trials["study"].to_list() == ["entropy", "entropy", "kl"]
    assert [study.name for study in frames.studies] == ["entropy", "kl"]
    entropy_frames = load(tmp_path / "results" / "entropy_sweep")
    assert diff_all_frames(frames.select_study("entropy"), entropy_frames) == []
    with pytest.raises(ValueError, match=r"There is no study `top-p` here\. Choose one of: entropy, kl"):
        frames.select_study("top-p")


def test_studies_of_one_name_are_distinguished_by_their_run(tmp_path: Path) -> None:
    for model in ("a", "b"):
        write_study(tmp_path, [FakeRun("0", steps=3)], FakeStudy(run=f"kl_sweep_{model}", total_steps=3, levels=10))
    frames = load(tmp_path)
    assert frames.trials["study"].to_list() == ["kl_sweep_a", "kl_sweep_b"]
    assert len(frames.select_study("kl_sweep_b").steps) == 3
    # In two outputs too, the folder's name is enough.
    for model in ("a", "b"):
        write_study(
            tmp_path / "outputs" / model, [FakeRun("0", steps=1)], FakeStudy(run=f"kl_sweep_{model}", levels=10)
        )
    assert [study.name for study in load(tmp_path / "outputs").studies] == ["kl_sweep_a", "kl_sweep_b"]


def test_studies_of_one_run_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "a", [FakeRun("0", steps=1)], SHORT)
    # A confirmation has the name and the run of its study; another output may have the same folder.
    shutil.copytree(folder, folder.with_name("confirmation"))
    assert [study.name for study in load(tmp_path).studies] == ["confirmation", folder.name]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    frames = load(tmp_path)
    names = [f"{output}/results/{name}" for output in "ab" for name in ("confirmation", folder.name)]
    assert sorted(study.name for study in frames.studies) == sorted(names)
    assert len(set(frames.trials["study"])) == 4
    assert all(len(frames.select_study(name).trials) == 1 for name in names)


def test_a_folder_without_a_study_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no study at .*: give an output folder"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"contains no study\.json"):
        read_study(tmp_path)


def test_a_broken_study_json_is_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    (folder / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json is damaged: it is not valid JSON"):
        read_study(folder)


def test_diff_frames_names_what_differs(tmp_path: Path) -> None:
    steps = read_study(write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)).steps
    other = steps.assign(seconds_step=9.0, tokens_per_second=1.0, entropy=[*steps["entropy"][:2], 7.0])
    assert analysis.diff_frames(steps, steps.assign(seconds_total=0.0, tokens_per_second=1.0)) == []
    (difference,) = analysis.diff_frames(steps, other)
    assert difference.startswith("entropy: 1 of 3 rows differ, first 2:")
    assert analysis.diff_frames(steps, other, ignored_columns=["entropy"]) == []
    assert analysis.diff_frames(steps, steps.iloc[:2]) == ["3 rows against 2"]
    assert analysis.diff_frames(steps, steps.drop(columns="entropy")) == ["columns differ: ['entropy']"]
    assert "type" in analysis.diff_frames(steps, steps.assign(groups=steps["groups"].astype("int64")))[0]


@pytest.mark.parametrize("schema", [None, 0, SCHEMA + 1, "1"])
def test_a_study_of_another_schema_is_refused(tmp_path: Path, schema: object) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    write_object(folder / "study.json", {**read_object(folder / "study.json"), "schema": schema})
    with pytest.raises(ValueError, match=f"this version reads schema {SCHEMA}"):
        load(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        lambda content: content[:4] + bytes(200) + content[204:],
    ],
)
def test_rows_are_read_where_a_table_is_damaged(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    frames = read_study(folder)
    frames.write_parquet(folder)
    path = folder / "steps.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"steps\.parquet cannot be read .* The files of its runs are read instead"):
        loaded_frames = load(folder)
    assert diff_frames(loaded_frames.steps, frames.steps) == []
    shutil.rmtree(folder / "runs")
    with pytest.raises(ValueError, match=r"steps\.parquet cannot be read"):
        load(folder)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def write_wrong_types(path: Path) -> None:
    write_object(path, {**read_object(path), "config": 3, "started_at": "2:26", "seed": "x"})


DAMAGES = (flip, replace_by_link, write_wrong_types)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_status_is_named_and_the_rows_say_how_the_run_ended(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = FakeRun("0", steps=SHORT.total_steps)
    folder = write_study(tmp_path, [run, FakeRun("0.1", status="interrupted", steps=3)], SHORT)
    expected = read_study(folder)
    damage(folder / "runs" / run.run_id / "status.json")
    with pytest.warns(DamageWarning, match=r"0.*status\.json is "):
        frames = read_study(folder)
    assert frames.trials["status"].to_list() == ["completed", "interrupted"]
    assert diff_frames(frames.steps, expected.steps) == []
    names = [name for name in expected.trials if name not in ("trial_id", "started_at", "ended_at", "reason")]
    assert diff_frames(frames.trials[names], expected.trials[names]) == []


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_damaged_run_json_is_named_and_the_rows_are_read(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = FakeRun("0.1", steps=3)
    folder = write_study(tmp_path, [FakeRun("0", steps=3), run], SHORT)
    expected = read_study(folder)
    damage(folder / "runs" / run.run_id / "run.json")
    with pytest.warns(DamageWarning, match=r"run\.json is "):
        frames = read_study(folder)
    assert diff_frames(frames.steps, expected.steps) == []
    names = ["run_id", "arm", "seed", "status", "steps_total", "final_val_success"]
    assert diff_frames(frames.trials[names], expected.trials[names]) == []


@pytest.mark.parametrize(
    "runs",
    [
        [{"run_id": "../../../outside"}],
        [{"run_id": "/outside"}],
        [{"run_id": ".hidden"}],
        [{"run_id": 3}],
        [{"arm": "0"}],
        [{"run_id": "a", "seed": "x"}],
        ["a"],
        {"run_id": "a"},
        [{"run_id": "a"}] * (MAX_RUNS + 1),
    ],
)
def test_runs_that_are_no_names_of_folders_are_refused(tmp_path: Path, runs: object) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    write_object(folder / "study.json", {**read_object(folder / "study.json"), "runs": runs})
    with pytest.raises(ValueError, match=r"study\.json is (damaged|incomplete)"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": ["a"]},
        {"axis": {"values": [[1]]}},
        {"axis": {"values": ["a"] * (MAX_RUNS + 1)}},
        {"axis": [1]},
        {"axis": {"values": [], "dose": 1}},
        {"seeds": [0.5]},
        {"seeds": [0] * (MAX_RUNS + 1)},
        {"runs": [{"run_id": "a" * 300}]},
        {"preset_steps": "60"},
        {"preset_steps": 0},
        {"preset_steps": 10**400},
    ],
)
def test_a_study_json_of_the_wrong_shape_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    write_object(folder / "study.json", {**read_object(folder / "study.json"), **changes})
    with pytest.raises(ValueError, match=rf"study\.json is damaged, or from another version: {next(iter(changes))}"):
        load(folder)


def test_a_study_json_of_a_version_without_checksums_is_of_another_schema(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    content = read_object(folder / "study.json")
    del content["schema"]
    (folder / "study.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has files of schema 0, and this version reads"):
        load(folder)


@pytest.mark.parametrize("name", ["runs", "runs/{run_id}", "study.json"])
def test_no_link_below_the_folder_is_followed(tmp_path: Path, name: str) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path / "out", [run], SHORT)
    path = folder / name.format(run_id=run.run_id)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="is a symbolic link"):
        load(folder)


def test_the_folder_itself_may_be_reached_through_links(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "out", [FakeRun("0", steps=3)], SHORT)
    (tmp_path / "link").symlink_to(folder)
    assert len(load(tmp_path / "link").steps) == 3
    # A study below the folder is found only where no link leads to it.
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "linked").symlink_to(folder)
    with pytest.raises(ValueError, match="There is no study"):
        load(tmp_path)


def test_a_table_of_another_schema_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], SHORT)
    frames = read_study(folder)
    frames.write_parquet(folder)
    with monkeypatch.context() as patch:
        patch.setattr("analysis.data.tables.SCHEMA", SCHEMA + 1)
        write_table(frames.steps.assign(entropy=7.0), folder / "steps.parquet")
    with pytest.warns(UserWarning, match=f"it has schema {SCHEMA + 1}, and this version reads schema {SCHEMA}"):
        loaded_frames = load(folder)
    assert diff_frames(loaded_frames.steps, frames.steps) == []


def test_tables_made_from_damaged_files_say_so(tmp_path: Path) -> None:
    run = FakeRun("0", steps=3)
    folder = write_study(tmp_path, [run], SHORT)
    path = folder / "runs" / run.run_id / "run.json"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.warns(DamageWarning, match=r"run\.json is damaged"):
        write_tables(folder)
    with pytest.warns(DamageWarning, match=r"run\.json is damaged"):
        load(folder)
    path.write_bytes(content)
    assert load(folder).trials["arm"].to_list() == ["0"]  # repaired
    path.write_bytes(content[:-20])
    with pytest.warns(DamageWarning):
        write_tables(folder)
    shutil.rmtree(folder / "runs")
    with pytest.warns(DamageWarning, match=r"run\.json is damaged"):  # the tables are all that is left
        load(folder)


def test_measures_of_a_game_of_the_user_are_columns_of_steps(tmp_path: Path) -> None:
    rows = {"val_standing": 0.25, "train_standing": 0.5, "nonsense": 1.0, "val_not a name": 1.0}
    steps = load(write_study(tmp_path, [FakeRun("0", steps=5, rows=rows), FakeRun("0.1", steps=5)])).steps
    assert {name for name in steps if name not in SCHEMAS["steps"]} == {"val_standing", "train_standing"}
    assert steps.loc[steps["arm"] == "0", "val_standing"].eq(0.25).all()
    assert steps.loc[steps["arm"] == "0.1", "val_standing"].isna().all()


def test_a_folder_cannot_add_columns_without_end(tmp_path: Path) -> None:
    runs = [FakeRun("0", seed, steps=5, rows={f"val_x{seed}_{number}": 1.0 for number in range(40)}) for seed in (0, 1)]
    steps = load(write_study(tmp_path, runs)).steps
    assert len(set(steps) - set(SCHEMAS["steps"])) == 32


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pd.Categorical(["b", "a", "b"], categories=["b", "a"]), ["b", "a", "b"]),
        (pd.Categorical([2, 1, 2]), ["2", "1", "2"]),
        (pd.Categorical(["b", None, "a"]), ["b", "", "a"]),
        (["b", None, "a"], ["b", "", "a"]),
    ],
)
def test_categories_are_sorted_texts(values: list[str], texts: list[str]) -> None:
    column = cast_frame(pd.DataFrame({"arm": values}), {"arm": CATEGORY})["arm"]
    assert column.tolist() == texts
    assert column.cat.categories.tolist() == sorted(set(texts))
    assert column.cat.categories.dtype == "str"


def test_columns_of_categories_are_equal_if_their_texts_are() -> None:
    a, b = (
        pd.DataFrame({"arm": pd.Categorical(["x", "y"], categories=order)}) for order in (["x", "y"], ["z", "y", "x"])
    )
    assert diff_frames(a, b) == []
    assert diff_frames(a, b.iloc[::-1]) == ["arm: 2 of 2 rows differ, first 0: 'x' against 'y'"]


def test_frames_are_described_without_their_rows(tmp_path: Path) -> None:
    frames = load(write_study(tmp_path, [FakeRun("0", seed) for seed in (0, 1)]))
    assert repr(frames) == (
        f"StudyFrames of kl (2 runs); rows: trials 2, steps 120, levels {len(frames.levels)}, gradients 0, "
        "gradient_groups 0"
    )


def test_settings_are_a_frame_by_section(tmp_path: Path) -> None:
    frames = load(write_study(tmp_path, [FakeRun("0"), FakeRun("0.1")]))
    settings = frames.settings
    assert list(settings.index) == list(frames.trials["run_id"])
    assert settings["actor", "kl_loss_coef"].tolist() == frames.trials["config/actor.kl_loss_coef"].tolist() == [0, 0.1]
    assert settings["actor"]["lr"].equals(settings["actor", "lr"])
    assert settings[""].columns.tolist() == ["seed"]
    assert len(settings.columns) == sum(str(name).startswith("config/") for name in frames.trials)


def test_tables_that_are_made_while_a_study_runs_say_so(tmp_path: Path) -> None:
    runs = [FakeRun("0", status="running", steps=0), FakeRun("0.1", status="waiting", steps=0)]
    folder = write_study(tmp_path, runs, SHORT)
    with lock_folder(folder):
        write_tables(folder)
        assert load(folder, live=True).trials["status"].tolist() == ["running", "waiting"]
    # The process is gone, and so is what only it could say.
    assert load(folder).trials["status"].tolist() == ["never_ran", "never_ran"]

"""Tests of reading files into frames: torn lines, repeated steps, statuses, several studies, parquet, moved folders."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis import diff_frames
from analysis.data.frames import SCHEMAS, cast_frame
from analysis.data.load import load, read_study
from analysis.data.schemas import CATEGORY
from tests.analysis.data.comparing import check_parquet, diff_all_frames
from tests.fakes.lines import append_record, change_records
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_study
from trainable.files.json_lines import read_lines
from trainable.files.json_values import DamageWarning, read_object, write_object
from trainable.files.paths import UnsafePathError
from trainable.runs.records import ROW_COLUMNS, STEP_COLUMNS, STOP_COLUMNS, TRIAL_COLUMNS, TRIAL_LAST_VALUES
from trainable.runs.run_files import ENDS_KEY
from trainable.runs.study_record import MAX_RUNS, SCHEMA
from tune_study.folder.outputs import lock_folder, write_tables

SHORT = FakeStudy(total_steps=3, test_freq=2, levels=10)
RUN = FakeRun("0", steps=3)
STOPPED = FakeRun(
    "0.3", status="early_stopped", steps=3, success=(0.35, 0.0), stop=("low_validation_success", 0.002, 0.01)
)


def get_path(folder: Path, run: FakeRun, name: str) -> Path:
    return folder / "runs" / run.run_id / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of one completed run."""
    return write_study(tmp_path, [RUN], SHORT)


@pytest.fixture
def metrics(folder: Path) -> Path:
    """The rows of the run."""
    return get_path(folder, RUN, "metrics.jsonl")


def test_columns_are_those_of_the_records_and_settings_of_their_own_types(tmp_path: Path) -> None:
    frames = analysis.load(write_study(tmp_path, [RUN, FakeRun("0.1", steps=3)], SHORT))
    assert (len(frames.steps), frames.trials["status"].to_list()) == (6, ["completed", "completed"])
    assert list(frames.steps) == [column.name for column in (*ROW_COLUMNS, *STEP_COLUMNS, *STOP_COLUMNS)]
    expected = {column.name for column in (*TRIAL_COLUMNS, *STOP_COLUMNS)} | set(TRIAL_LAST_VALUES)
    expected |= {"run_id", "study", "arm", "seed", "axis_setting", "axis_value"}
    assert {name for name in frames.trials if not name.startswith("config/")} == expected
    assert list(frames.levels) == list(SCHEMAS["levels"])
    assert frames.trials["config/actor.kl_loss_coef"].to_list() == [0.0, 0.1]
    assert frames.trials["config/actor.use_kl_loss"].to_list() == [False, True]
    assert frames.trials["config/env.group_size"].to_list() == [16, 16]
    assert frames.trials["config/actor.betas"].to_list() == ["[0.9, 0.999]"] * 2
    assert frames.trials["config/algorithm.kl_ctrl.type"].to_list() == ["fixed"] * 2
    assert list(frames.settings.index) == list(frames.trials["run_id"])
    assert frames.settings["actor", "kl_loss_coef"].tolist() == [0, 0.1]
    assert frames.settings["actor"]["lr"].equals(frames.settings["actor", "lr"])
    assert frames.settings[""].columns.tolist() == ["seed"]
    assert len(frames.settings.columns) == sum(str(name).startswith("config/") for name in frames.trials)
    assert repr(frames) == (
        f"StudyFrames of kl (2 runs); rows: trials 2, steps 6, levels {len(frames.levels)}, gradients 0, "
        "gradient_groups 0"
    )


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


def test_a_torn_last_line_is_left_out(folder: Path) -> None:
    for name in ("metrics.jsonl", "levels.jsonl"):
        path = get_path(folder, RUN, name)
        path.write_bytes(path.read_bytes()[:-30])
    frames = read_study(folder)
    assert frames.steps["step"].to_list() == [1, 2]
    assert frames.trials.loc[0, "steps_done"] == 2
    assert ("test", "greedy") not in set(zip(frames.levels["split"], frames.levels["mode"], strict=True))


def test_a_line_torn_before_a_restart_is_left_out_and_its_repetition_counts(folder: Path, metrics: Path) -> None:
    first, second, third = metrics.read_text().splitlines()
    metrics.write_text("\n".join([first, second[:40], second, "7", third]) + "\n")
    assert read_study(folder).steps["step"].to_list() == [1, 2, 3]


def test_a_repeated_step_counts_and_gives_up_every_later_one(folder: Path, metrics: Path) -> None:
    append_record(metrics, {**read_lines(metrics).records[1], "train_success": 0.875})
    frames = read_study(folder)
    assert frames.steps["step"].to_list() == [1, 2]
    assert frames.steps.loc[1, "train_success"] == 0.875
    assert frames.trials.loc[0, "steps_done"] == 2


def test_of_repeated_evaluations_the_last_line_counts(folder: Path) -> None:
    path = get_path(folder, RUN, "levels.jsonl")
    level_count = len(read_study(folder).levels)
    line = read_lines(path).records[-1]
    append_record(path, {**line, "success": "1" * len(line["success"])})
    levels = read_study(folder).levels
    names = ["step", "split", "mode"]
    repeated = levels[(levels[names] == [line[name] for name in names]).all(axis=1)]
    assert (len(levels), len(repeated)) == (level_count, len(line["success"]))
    assert repeated["success"].all()


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


def test_reasons(tmp_path: Path) -> None:
    # A stop that no row tells of did not happen.
    runs = [FakeRun("0", status="early_stopped", steps=2), FakeRun("1", status="failed", steps=2, reason="no memory")]
    assert read_study(write_study(tmp_path, runs, SHORT)).trials[["status", "reason"]].to_numpy().tolist() == [
        ["interrupted", "recorded as early_stopped, but interrupted after step 2 of 3"],
        ["failed", "no memory"],
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "levels.jsonl"])
def test_a_completed_run_with_a_changed_digit_is_not_shown_as_whole(folder: Path, name: str) -> None:
    path = get_path(folder, RUN, name)
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    trial = read_study(folder).trials.iloc[0]
    assert trial["status"] == "interrupted"
    assert trial["reason"] == f"recorded as completed, but {name} does not match its checksums at line 1"


def test_a_completed_run_without_a_recorded_episode_is_not_shown_as_whole(folder: Path, metrics: Path) -> None:
    path = get_path(folder, RUN, "episodes.jsonl")
    for step in (0, 2):
        append_record(path, {"step": step, "level": 123})
    ends = {path.name: list(read_lines(path).end)}
    change_records(metrics, lambda rows: rows[-1].update({ENDS_KEY: ends}))
    assert read_study(folder).trials.loc[0, "status"] == "completed"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    trial = read_study(folder).trials.iloc[0]
    assert trial["status"] == "interrupted"
    assert trial["reason"].endswith("but episodes.jsonl lacks lines: it had 2 when the last row was written")


def test_a_run_that_only_study_json_knows_never_ran(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [RUN, FakeRun("0.1", steps=3)], SHORT)
    shutil.rmtree(folder / "runs" / RUN.run_id)
    trials = read_study(folder).trials
    assert trials["arm"].to_list() == ["0", "0.1"]
    assert trials["status"].to_list() == ["never_ran", "completed"]
    assert trials.loc[0, "steps_total"] == SHORT.total_steps  # of the study


def test_a_stop_is_in_the_row_at_which_it_fired_which_tells_of_it_without_status_json(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [STOPPED, RUN], SHORT))
    rows = frames.steps[frames.steps["stop_rule"] != ""]
    assert rows[["arm", "step", "stop_step"]].to_numpy().tolist() == [["0.3", 3, 3]]
    assert rows[["stop_value", "stop_threshold"]].to_numpy().tolist() == [[0.002, 0.01]]
    assert frames.trials["stop_rule"].to_list() == ["low_validation_success", ""]
    assert frames.trials["stop_step"].isna().to_list() == [False, True]
    folder = write_study(tmp_path / "no-status", [STOPPED], SHORT)
    names = ["status", "stop_rule", "stop_value", "stop_threshold", "stop_step"]
    expected = read_study(folder).trials[names]
    (folder / "runs" / STOPPED.run_id / "status.json").unlink()
    trials = read_study(folder).trials
    assert diff_frames(trials[names], expected) == []
    assert trials.loc[0, "status"] == "early_stopped"


def test_types_do_not_depend_on_what_is_missing(tmp_path: Path) -> None:
    no_entropy = FakeRun("0", steps=3, rows={"entropy": None})
    cases = ([STOPPED], [FakeRun("0", status="", steps=0)], [], [no_entropy])
    studies = [read_study(write_study(tmp_path / str(index), runs, SHORT)) for index, runs in enumerate(cases)]
    for name, schema in SCHEMAS.items():
        # As text, since two types of categories are equal only if the categories are.
        first, *others = (getattr(frames, name).dtypes.astype("str")[list(schema)] for frames in studies)
        assert all(dtypes.equals(first) for dtypes in others)
    assert len(studies[2].trials) == 0
    assert studies[3].steps["entropy"].isna().all()


def test_rows_are_in_the_order_of_the_study(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=3) for seed in (1, 0) for arm in ("nofilter", "0.1", "1.0")]
    study = FakeStudy(total_steps=3, levels=10, values=("1.0", "nofilter"))
    frames = read_study(write_study(tmp_path, runs, study))
    order = [("1.0", 0), ("1.0", 1), ("nofilter", 0), ("nofilter", 1), ("0.1", 0), ("0.1", 1)]
    assert list(zip(frames.trials["arm"], frames.trials["seed"], strict=True)) == order
    assert list(dict.fromkeys(zip(frames.steps["arm"], frames.steps["seed"], strict=True))) == order
    assert frames.trials["axis_value"].isna().to_list() == [False, False, True, True, False, False]


@pytest.mark.parametrize("has_gradients", [False, True])
def test_parquet_holds_the_same_rows(tmp_path: Path, has_gradients: bool) -> None:
    folder = write_study(tmp_path, [RUN, STOPPED, FakeRun("1", status="", steps=0)], SHORT)
    if has_gradients:
        write_analyses(folder, RUN, [FakeAnalysis(1), FakeAnalysis(1, prefilter=True), FakeAnalysis(51, "probe")])
    check_parquet(folder)
    assert load(folder).study == read_study(folder).study


def test_several_studies_are_distinguished(tmp_path: Path) -> None:
    write_study(tmp_path, [RUN], SHORT)
    entropy_study = FakeStudy(
        name="entropy", run="entropy_sweep", setting="actor.entropy_coeff", total_steps=3, levels=10
    )
    write_study(tmp_path, [RUN, FakeRun("0.1", steps=3)], entropy_study)
    frames = load(tmp_path)
    assert frames.trials["study"].to_list() == ["entropy", "entropy", "kl"]
    assert [study.name for study in frames.studies] == ["entropy", "kl"]
    entropy_frames = load(tmp_path / "results" / "entropy_sweep")
    assert diff_all_frames(frames.select_study("entropy"), entropy_frames) == []
    with pytest.raises(ValueError, match=r"There is no study `top-p` here\. Choose one of: entropy, kl"):
        frames.select_study("top-p")


def test_studies_of_one_name_are_distinguished_by_their_run(tmp_path: Path) -> None:
    for model in ("a", "b"):
        for output in (tmp_path / "one", tmp_path / "two" / model):
            write_study(output, [RUN], FakeStudy(run=f"kl_sweep_{model}", total_steps=3, levels=10))
    frames = load(tmp_path / "one")
    assert frames.trials["study"].to_list() == ["kl_sweep_a", "kl_sweep_b"]
    assert len(frames.select_study("kl_sweep_b").steps) == 3
    # In two outputs too, the folder's name is enough.
    assert [study.name for study in load(tmp_path / "two").studies] == ["kl_sweep_a", "kl_sweep_b"]


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


def test_what_is_no_study_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"contains no study\.json"):
        read_study(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert len(load(tmp_path / "link").steps) == 3
    # Below a folder, a study is looked for only where no link leads to it.
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"There is no study at .*: give an output folder"):
        load(tmp_path / "other")
    (tmp_path / "other" / "results").mkdir()
    (tmp_path / "other" / "results" / "linked").symlink_to(folder)
    with pytest.raises(ValueError, match="There is no study"):
        load(tmp_path / "other")
    (folder / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json is damaged: it is not valid JSON"):
        read_study(folder)


def test_diff_frames_names_what_differs(folder: Path) -> None:
    steps = read_study(folder).steps
    other = steps.assign(seconds_step=9.0, tokens_per_second=1.0, entropy=[*steps["entropy"][:2], 7.0])
    assert diff_frames(steps, steps.assign(seconds_total=0.0, tokens_per_second=1.0)) == []
    (difference,) = diff_frames(steps, other)
    assert difference.startswith("entropy: 1 of 3 rows differ, first 2:")
    assert diff_frames(steps, other, ignored_columns=["entropy"]) == []
    assert diff_frames(steps, steps.iloc[:2]) == ["3 rows against 2"]
    assert diff_frames(steps, steps.drop(columns="entropy")) == ["columns differ: ['entropy']"]
    assert "type" in diff_frames(steps, steps.assign(groups=steps["groups"].astype("int64")))[0]


@pytest.mark.parametrize("schema", [0, SCHEMA + 1])
def test_a_study_of_another_schema_is_refused(folder: Path, schema: object) -> None:
    change_study(folder, schema=schema)
    with pytest.raises(ValueError, match=f"this version reads schema {SCHEMA}"):
        load(folder)


def change_study(folder: Path, **changes: object) -> None:
    """Change entries of study.json, with the checksum that belongs to them."""
    write_object(folder / "study.json", {**read_object(folder / "study.json"), **changes})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path, place: Path | None = None) -> None:
    moved = path.rename(place or path.with_suffix(".moved"))
    path.symlink_to(moved)


def write_wrong_types(path: Path) -> None:
    write_object(path, {**read_object(path), "config": 3, "started_at": "2:26", "seed": "x"})


DAMAGES = (flip, replace_by_link, write_wrong_types)


@pytest.mark.parametrize("name", ["status.json", "run.json"])
@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_damaged_file_of_a_run_is_named_and_the_rows_are_read(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    runs = [FakeRun("0.1", steps=SHORT.total_steps), FakeRun("1", status="interrupted", steps=3)]
    folder = write_study(tmp_path, runs, SHORT)
    expected = read_study(folder)
    damage(folder / "runs" / runs[0].run_id / name)
    is_named = name == "run.json" or damage is not Path.unlink
    with pytest.warns(DamageWarning, match=rf"0.*{name} is ") if is_named else nullcontext():
        frames = read_study(folder)
    assert frames.trials["status"].to_list() == ["completed", "interrupted"]
    assert diff_frames(frames.steps, expected.steps) == []
    names = [column for column in expected.trials if column not in ("trial_id", "started_at", "ended_at", "reason")]
    if name == "run.json":
        names = ["run_id", "arm", "seed", "status", "steps_total", "final_val_success"]
    assert diff_frames(frames.trials[names], expected.trials[names]) == []


@pytest.mark.parametrize(
    "changes",
    [
        *({"runs": [{"run_id": name}]} for name in ("../../../outside", "/outside", ".hidden", 3, "a" * 300)),
        *({"runs": runs} for runs in ([{"run_id": "a", "seed": "x"}], ["a"], {"run_id": "a"}, [{"arm": "0"}])),
        {"runs": [{"run_id": "a"}] * (MAX_RUNS + 1)},
        {"family": ["a"]},
        *({"axis": {"values": values}} for values in ([[1]], ["a"] * (MAX_RUNS + 1))),
        *({"axis": axis} for axis in ([1], {"values": [], "dose": 1})),
        *({"seeds": seeds} for seeds in ([0.5], [0] * (MAX_RUNS + 1))),
        *({"preset_steps": steps} for steps in ("60", 0, 10**400)),
    ],
)
def test_a_study_json_of_the_wrong_shape_is_named(folder: Path, changes: dict[str, object]) -> None:
    change_study(folder, **changes)
    names = rf"study\.json is (incomplete: it lacks|damaged, or from another version:) {next(iter(changes))}"
    with pytest.raises(ValueError, match=names):
        load(folder)


@pytest.mark.parametrize("name", ["runs", f"runs/{RUN.run_id}", "study.json"])
def test_no_link_below_the_folder_is_followed(folder: Path, tmp_path: Path, name: str) -> None:
    replace_by_link(folder / name, tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="is a symbolic link"):
        load(folder)


def test_measures_of_a_game_of_the_user_are_columns_of_steps_but_not_without_end(tmp_path: Path) -> None:
    rows = {"val_standing": 0.25, "train_standing": 0.5, "nonsense": 1.0, "val_not a name": 1.0}
    steps = load(write_study(tmp_path / "a", [FakeRun("0", steps=5, rows=rows), FakeRun("0.1", steps=5)])).steps
    assert {name for name in steps if name not in SCHEMAS["steps"]} == {"val_standing", "train_standing"}
    assert steps.loc[steps["arm"] == "0", "val_standing"].eq(0.25).all()
    assert steps.loc[steps["arm"] == "0.1", "val_standing"].isna().all()
    runs = [FakeRun("0", seed, steps=5, rows={f"val_x{seed}_{number}": 1.0 for number in range(40)}) for seed in (0, 1)]
    steps = load(write_study(tmp_path / "b", runs)).steps
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


def test_a_study_that_runs_has_statuses_that_only_its_process_could_say(tmp_path: Path) -> None:
    runs = [FakeRun("0", status="running", steps=2), FakeRun("0.1", status="waiting", steps=0)]
    folder = write_study(tmp_path, runs, SHORT)
    with lock_folder(folder):
        assert write_tables(folder).trials["status"].tolist() == ["running", "waiting"]
        assert load(folder, live=True).trials["status"].tolist() == ["running", "waiting"]
    # The process is gone, and so is what only it could say.
    assert load(folder).trials["status"].tolist() == ["interrupted", "never_ran"]

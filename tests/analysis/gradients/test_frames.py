"""Gradient analyses from line files to frames: repeated and torn lines, probes, older folders, parquet."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import analysis
from analysis.data.frames import FRAME_NAMES, SCHEMAS, StudyFrames
from analysis.data.load import load, read_study
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_lines, write_study
from trainable.runs.records import GRADIENT_COLUMNS, GRADIENT_GROUP_COLUMNS, ROW_COLUMNS

SHORT = FakeStudy(total_steps=3, test_freq=2, levels=10)
RUN = FakeRun("0", steps=3)
FIRST, LATER = FakeAnalysis(1), FakeAnalysis(51)


def study(output: Path, *analyses: FakeAnalysis) -> Path:
    folder = write_study(output, [RUN], SHORT)
    write_analyses(folder, RUN, analyses)
    return folder


def file_of(folder: Path, name: str = "gradients.jsonl") -> Path:
    return folder / "runs" / RUN.run_id / name


def differences(a: StudyFrames, b: StudyFrames) -> list[str]:
    return [line for name in FRAME_NAMES for line in analysis.diff_frames(getattr(a, name), getattr(b, name))]


def moments(frames: StudyFrames) -> list[tuple[int, str, bool]]:
    names = frames.gradients[["step", "source", "prefilter"]].drop_duplicates()
    return [(int(step), str(source), bool(prefilter)) for step, source, prefilter in names.to_numpy()]


def test_every_number_of_a_line_is_in_its_row(tmp_path: Path) -> None:
    made = FakeAnalysis(51, components=("task", "entropy", "kl"))
    frames, line = read_study(study(tmp_path, made)), made.make_line()
    assert list(frames.gradients) == [column.name for column in (*ROW_COLUMNS, *GRADIENT_COLUMNS)]
    assert len(frames.gradients) == len(line["rows"]) == 7 * 4
    for row, written in zip(frames.gradients.to_dict("records"), line["rows"], strict=True):
        assert (row["run_id"], row["study"], row["arm"], row["seed"], row["step"]) == (RUN.run_id, "kl", "0", 0, 51)
        assert (row["source"], row["prefilter"]) == ("train", False)
        for name, value in written.items():
            assert pd.isna(row[name]) if value is None else row[name] == value


def test_every_group_of_a_line_is_a_row(tmp_path: Path) -> None:
    frames = read_study(study(tmp_path, FIRST))
    names = [column.name for column in (*ROW_COLUMNS, *GRADIENT_COLUMNS[:3], *GRADIENT_GROUP_COLUMNS)]
    assert list(frames.gradient_groups) == names
    found = frames.gradient_groups[["bucket", "group", "reward_std"]].to_dict("records")
    assert found == FIRST.make_line()["groups"]
    assert len(found) == 24


def test_the_last_line_of_an_analysis_counts(tmp_path: Path) -> None:
    before, after = replace(FIRST, prefilter=True), replace(FIRST, seed=1)
    folder = study(tmp_path, before, FIRST, after)
    assert moments(read_study(folder)) == [(1, "train", False), (1, "train", True)]
    write_lines(file_of(folder), [before.make_line(), after.make_line()])
    alone = read_study(folder)
    write_lines(file_of(folder), [before.make_line(), FIRST.make_line(), after.make_line()])
    assert differences(read_study(folder), alone) == []


def test_a_run_that_went_back_gave_up_later_analyses_and_no_probe(tmp_path: Path) -> None:
    analyses = [FIRST, LATER, replace(LATER, prefilter=True), FakeAnalysis(11, prefilter=True)]
    probes = [FakeAnalysis(step, "probe") for step in (101, 51, 75)]
    frames = read_study(study(tmp_path, *analyses, *probes))
    trained = [(1, "train", False), (11, "train", True)]
    assert moments(frames) == [*trained, (51, "probe", False), (75, "probe", False), (101, "probe", False)]


def test_the_last_probe_of_a_checkpoint_counts(tmp_path: Path) -> None:
    first, second = FakeAnalysis(51, "probe"), FakeAnalysis(51, "probe", components=("task",))
    frames = read_study(study(tmp_path, first, FakeAnalysis(51, "probe", prefilter=True), second))
    assert moments(frames) == [(51, "probe", False), (51, "probe", True)]
    after = frames.gradients[~frames.gradients["prefilter"]]
    assert set(after["component"]) == {"task", "total"}


def without(line: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != name}


def changed(line: dict[str, Any], part: str, name: str, value: object) -> dict[str, Any]:
    return {**line, part: [{**line[part][0], name: value}, *line[part][1:]]}


ODD = [
    *(without(LATER.make_line(), name) for name in ("step", "source", "prefilter", "rows", "groups")),
    {**LATER.make_line(), "step": "51"},
    {**LATER.make_line(), "step": -1},
    {**LATER.make_line(), "step": True},
    {**LATER.make_line(), "source": "test"},
    {**LATER.make_line(), "source": ["train"]},
    {**LATER.make_line(), "prefilter": 0},
    {**LATER.make_line(), "rows": {}},
    {**LATER.make_line(), "rows": [1]},
    {**LATER.make_line(), "groups": "none"},
    changed(LATER.make_line(), "rows", "bucket", None),
    changed(LATER.make_line(), "rows", "component", 3),
    changed(LATER.make_line(), "rows", "uses_training_batch", None),
    changed(LATER.make_line(), "groups", "group", 1.5),
]


@pytest.mark.parametrize("line", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("name", ["gradients.jsonl", "probes.jsonl"])
def test_an_odd_line_is_left_out(tmp_path: Path, line: dict[str, Any], name: str) -> None:
    folder = study(tmp_path, FIRST)
    alone = read_study(folder)
    with file_of(folder, name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert differences(read_study(folder), alone) == []


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    folder = study(tmp_path, FIRST, LATER, FakeAnalysis(51, "probe"))
    for name in ("gradients.jsonl", "probes.jsonl"):
        path = file_of(folder, name)
        path.write_bytes(path.read_bytes()[:-40])
    assert moments(read_study(folder)) == [(1, "train", False)]


def test_a_value_that_does_not_fit_its_column_is_missing(tmp_path: Path) -> None:
    folder = study(tmp_path)
    line = changed(changed(FIRST.make_line(), "rows", "snr", "large"), "groups", "reward_std", "wide")
    write_lines(file_of(folder), [changed(line, "rows", "surplus", 1)])
    frames = read_study(folder)
    assert pd.isna(frames.gradients.loc[0, "snr"])
    assert frames.gradients.loc[0, "noise"] == line["rows"][0]["noise"]
    assert pd.isna(frames.gradient_groups.loc[0, "reward_std"])


def test_types_do_not_depend_on_what_is_missing(tmp_path: Path) -> None:
    bare = {**FIRST.make_line(), "rows": [{"bucket": "all", "component": "task", "uses_training_batch": True}]}
    full, nothing, folder = study(tmp_path / "a", FIRST), study(tmp_path / "b"), study(tmp_path / "c")
    write_lines(file_of(folder), [bare])
    for name in ("gradients", "gradient_groups"):
        for found in (full, nothing, folder):
            types = getattr(read_study(found), name).dtypes
            assert {column: str(kind) for column, kind in types.items()} == SCHEMAS[name]
    assert read_study(nothing).gradients.empty


def test_frames_without_analyses_can_be_made_by_hand(tmp_path: Path) -> None:
    read = read_study(study(tmp_path))
    made = StudyFrames(read.trials, read.steps, read.levels, read.study)
    assert differences(made, read) == []
    assert made.gradients.dtypes.equals(read.gradients.dtypes)


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    folder = study(tmp_path, FIRST, replace(FIRST, prefilter=True), FakeAnalysis(51, "probe"))
    frames = read_study(folder)
    frames.write_parquet(folder)
    frames.gradients["norm"] = -1.0  # the tables are marked, so that a test sees that they were read
    frames.write_parquet(folder)
    found = load(folder)
    assert differences(found, frames) == []
    for name in FRAME_NAMES:
        assert getattr(found, name).dtypes.equals(getattr(frames, name).dtypes)


def test_a_folder_of_an_older_version_is_read_from_its_lines(tmp_path: Path) -> None:
    folder = study(tmp_path)
    frames = read_study(folder)
    frames.steps["train_success"] = -1.0
    frames.write_parquet(folder)
    for name in ("gradients", "gradient_groups"):
        (folder / f"{name}.parquet").unlink()
    found = load(folder)
    assert (found.steps["train_success"] != -1).all()
    assert found.gradients.empty


def test_a_probe_makes_tables_out_of_date(tmp_path: Path) -> None:
    folder = study(tmp_path, FIRST)
    read_study(folder).write_parquet(folder)
    write_analyses(folder, RUN, [FakeAnalysis(51, "probe")])
    assert moments(load(folder)) == [(1, "train", False), (51, "probe", False)]


def test_analyses_of_several_studies_are_told_apart(tmp_path: Path) -> None:
    study(tmp_path, FIRST)
    other = write_study(tmp_path, [RUN], replace(SHORT, name="entropy", run="entropy_sweep"))
    write_analyses(other, RUN, [LATER])
    write_study(tmp_path, [RUN], replace(SHORT, name="top-p", run="top_p_sweep"))
    frames = load(tmp_path)
    assert frames.gradients.groupby("study")["step"].unique().to_dict() == {"entropy": [51], "kl": [1]}
    assert differences(frames.select_study("entropy"), load(other)) == []
    assert frames.select_study("top-p").gradient_groups.empty

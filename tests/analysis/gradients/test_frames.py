"""Tests of reading gradient analyses into frames: repeated and torn lines, probes, older folders, parquet."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.data.frames import SCHEMAS, StudyFrames
from analysis.data.load import read_study
from tests.analysis.data.comparing import diff_all_frames
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_study
from tests.strategies.examples import thin_out
from trainable.files.json_lines import write_lines
from trainable.files.json_values import DamageWarning
from trainable.runs.records import GRADIENT_COLUMNS, GRADIENT_GROUP_COLUMNS, ROW_COLUMNS

SHORT = FakeStudy(total_steps=3, test_freq=2, levels=10)
RUN = FakeRun("0", steps=3)
FIRST_ANALYSIS, LATER_ANALYSIS = FakeAnalysis(1), FakeAnalysis(51)


def write_analyzed_study(output: Path, *analyses: FakeAnalysis) -> Path:
    folder = write_study(output, [RUN], SHORT)
    write_analyses(folder, RUN, analyses)
    return folder


def get_path(folder: Path, name: str = "gradients.jsonl") -> Path:
    return folder / "runs" / RUN.run_id / name


def list_analyses(frames: StudyFrames) -> list[tuple[int, str, bool]]:
    names = frames.gradients[["step", "source", "prefilter"]].drop_duplicates()
    return [(int(step), str(source), bool(prefilter)) for step, source, prefilter in names.to_numpy()]


def test_every_number_and_every_group_of_a_line_is_in_a_row(tmp_path: Path) -> None:
    fake_analysis = FakeAnalysis(51, components=("task", "entropy", "kl"))
    frames, line = read_study(write_analyzed_study(tmp_path, fake_analysis)), fake_analysis.make_line()
    assert list(frames.gradients) == [column.name for column in (*ROW_COLUMNS, *GRADIENT_COLUMNS)]
    assert len(frames.gradients) == len(line["rows"]) == 7 * 4
    for row, line_row in zip(frames.gradients.to_dict("records"), line["rows"], strict=True):
        assert (row["run_id"], row["study"], row["arm"], row["seed"], row["step"]) == (RUN.run_id, "kl", "0", 0, 51)
        assert (row["source"], row["prefilter"]) == ("train", False)
        for name, value in line_row.items():
            assert pd.isna(row[name]) if value is None else row[name] == value
    frames = read_study(write_analyzed_study(tmp_path / "groups", FIRST_ANALYSIS))
    names = [column.name for column in (*ROW_COLUMNS, *GRADIENT_COLUMNS[:3], *GRADIENT_GROUP_COLUMNS)]
    assert list(frames.gradient_groups) == names
    groups = frames.gradient_groups[["bucket", "group", "reward_std"]].to_dict("records")
    assert groups == FIRST_ANALYSIS.make_line()["groups"]
    assert len(groups) == 24


def test_the_last_line_of_an_analysis_or_a_probe_counts(tmp_path: Path) -> None:
    prefilter_analysis, repeated_analysis = replace(FIRST_ANALYSIS, prefilter=True), replace(FIRST_ANALYSIS, seed=1)
    folder = write_analyzed_study(tmp_path, prefilter_analysis, FIRST_ANALYSIS, repeated_analysis)
    assert list_analyses(read_study(folder)) == [(1, "train", False), (1, "train", True)]
    write_lines(get_path(folder), [prefilter_analysis.make_line(), repeated_analysis.make_line()])
    expected_frames = read_study(folder)
    analyses = (prefilter_analysis, FIRST_ANALYSIS, repeated_analysis)
    write_lines(get_path(folder), [fake_analysis.make_line() for fake_analysis in analyses])
    assert diff_all_frames(read_study(folder), expected_frames) == []
    first, second = FakeAnalysis(51, "probe"), FakeAnalysis(51, "probe", components=("task",))
    frames = read_study(
        write_analyzed_study(tmp_path / "probes", first, FakeAnalysis(51, "probe", prefilter=True), second)
    )
    assert list_analyses(frames) == [(51, "probe", False), (51, "probe", True)]
    postfilter_rows = frames.gradients[~frames.gradients["prefilter"]]
    assert set(postfilter_rows["component"]) == {"task", "total"}


def test_a_run_that_went_back_loses_later_analyses_and_no_probe_and_frames_may_have_none(tmp_path: Path) -> None:
    later = [LATER_ANALYSIS, replace(LATER_ANALYSIS, prefilter=True), FakeAnalysis(11, prefilter=True)]
    probes = [FakeAnalysis(step, "probe") for step in (101, 51, 75)]
    frames = read_study(write_analyzed_study(tmp_path, FIRST_ANALYSIS, *later, *probes))
    expected = [(1, "train", False), (11, "train", True), *((step, "probe", False) for step in (51, 75, 101))]
    assert list_analyses(frames) == expected
    loaded_frames = read_study(write_analyzed_study(tmp_path / "none"))
    built_frames = StudyFrames(loaded_frames.trials, loaded_frames.steps, loaded_frames.levels, loaded_frames.study)
    assert diff_all_frames(built_frames, loaded_frames) == []
    assert built_frames.gradients.dtypes.equals(loaded_frames.gradients.dtypes)


def change_first_row(line: dict[str, Any], list_name: str, name: str, value: object) -> dict[str, Any]:
    return {**line, list_name: [{**line[list_name][0], name: value}, *line[list_name][1:]]}


ODD_LINES = [
    *(
        {key: value for key, value in LATER_ANALYSIS.make_line().items() if key != name}
        for name in ("step", "source", "prefilter", "rows", "groups")
    ),
    *(LATER_ANALYSIS.make_line() | {"step": step} for step in ("51", -1, True)),
    *(LATER_ANALYSIS.make_line() | {"source": source} for source in ("test", ["train"])),
    *(LATER_ANALYSIS.make_line() | {"rows": rows} for rows in ({}, [1])),
    *(LATER_ANALYSIS.make_line() | change for change in ({"prefilter": 0}, {"groups": "none"})),
    *(change_first_row(LATER_ANALYSIS.make_line(), "rows", name, None) for name in ("bucket", "uses_training_batch")),
    change_first_row(LATER_ANALYSIS.make_line(), "rows", "component", 3),
    change_first_row(LATER_ANALYSIS.make_line(), "groups", "group", 1.5),
]


@pytest.mark.parametrize("line", thin_out(ODD_LINES, 6), ids=range(len(ODD_LINES)))
@pytest.mark.parametrize("name", ["gradients.jsonl", "probes.jsonl"])
def test_an_odd_line_is_left_out(tmp_path: Path, line: dict[str, Any], name: str) -> None:
    folder = write_analyzed_study(tmp_path, FIRST_ANALYSIS)
    expected_frames = read_study(folder)
    with get_path(folder, name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    # No row vouches for the lines of probes, so a line without a checksum is named.
    with pytest.warns(DamageWarning, match="probes.jsonl") if name == "probes.jsonl" else nullcontext():
        frames = read_study(folder)
    assert diff_all_frames(frames, expected_frames) == []


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    folder = write_analyzed_study(tmp_path, FIRST_ANALYSIS, LATER_ANALYSIS, FakeAnalysis(51, "probe"))
    for name in ("gradients.jsonl", "probes.jsonl"):
        path = get_path(folder, name)
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(DamageWarning, match=r"probes\.jsonl does not match its checksums at line 1"):
        assert list_analyses(read_study(folder)) == [(1, "train", False)]


def test_a_value_that_does_not_fit_its_column_is_missing_and_types_stay(tmp_path: Path) -> None:
    folder = write_analyzed_study(tmp_path)
    line = change_first_row(FIRST_ANALYSIS.make_line(), "rows", "snr", "large")
    line = change_first_row(line, "groups", "reward_std", "wide")
    bare_row = {"bucket": "all", "component": "task", "uses_training_batch": True}
    for rows in ([], [line["rows"][0] | {"surplus": 1}], [bare_row]):
        write_lines(get_path(folder), [{**line, "rows": rows}] * bool(rows))
        frames = read_study(folder)
        for name in ("gradients", "gradient_groups"):
            assert {column: str(dtype) for column, dtype in getattr(frames, name).dtypes.items()} == SCHEMAS[name]
        assert frames.gradients["snr"].isna().all()
        assert len(frames.gradients) == len(rows)
        assert frames.gradients["noise"].dropna().to_list() == [row["noise"] for row in rows if "noise" in row]
        assert frames.gradient_groups["reward_std"].isna().to_list() == ([True] + [False] * 23) * bool(rows)

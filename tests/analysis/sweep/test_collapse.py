"""Tests of which runs collapsed: the definition, survival, counts, and the sentence about them."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.sweep.collapse import HALVED_SUCCESS, compute_survival, count_collapses, find_run_ends, make_validations
from analysis.sweep.findings import describe_collapses
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.runs.history import RunHistory

STUDY = FakeStudy(levels=40)
STOP = ("low_validation_success", 0.002, 0.01)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """Two arms of two seeds, of which a rule stops one run at step 20, and an arm that loses its success."""
    runs = [FakeRun("0", 0), FakeRun("0", 1), FakeRun("0.1", 0)]
    runs += [FakeRun("0.1", 1, status="early_stopped", steps=20, success=(0.35, 0.3), stop=STOP)]
    runs += [FakeRun("1", 0, success=(0.8, 0.0)), FakeRun("1", 1, status="failed", steps=3)]
    return read_study(write_study(tmp_path_factory.mktemp("collapse"), runs, STUDY))


def test_a_run_collapses_by_a_rule_or_by_its_success_as_its_files_tell(frames: StudyFrames) -> None:
    ends = find_run_ends(frames).set_index(["arm", "seed"])
    assert ends.index[ends["is_collapse"]].to_list() == [("0.1", 1), ("1", 0)]
    assert ends["cause"].to_list() == ["", "", "", "low_validation_success", HALVED_SUCCESS, ""]
    curve = make_validations(frames).query("run_id == 'arm1-seed0'")
    is_low = curve["value"].to_numpy() < np.maximum.accumulate(curve["value"].to_numpy()) / 2
    first = int(np.flatnonzero(is_low[1:] & is_low[:-1])[0]) + 1
    assert ends["end_step"].to_list() == [60, 60, 60, 20, curve["step"].iloc[first], 3]
    for end in find_run_ends(frames).to_dict("records"):
        history = RunHistory.read(frames.folders[0] / "runs" / end["run_id"], 60)
        assert history.find_collapse() == (end["end_step"] if end["is_collapse"] else math.inf)


def test_survival_is_the_fraction_of_runs_without_collapse_among_those_that_still_run(
    frames: StudyFrames, tmp_path: Path
) -> None:
    table = compute_survival(frames)
    assert table[table["arm"] == "0"][["step", "surviving_fraction"]].to_numpy().tolist() == [[0, 1], [60, 1]]
    curve = table[table["arm"] == "0.1"][["step", "surviving_fraction"]]
    assert curve.to_numpy().tolist() == [[0, 1], [20, 0.5], [60, 0.5]]
    assert table.drop_duplicates("arm")[["runs", "collapsed"]].to_numpy().tolist() == [[2, 0], [2, 1], [2, 1]]
    runs = [FakeRun("0", 0, status="failed", steps=10), FakeRun("0", 1, status="early_stopped", steps=20, stop=STOP)]
    table = compute_survival(read_study(write_study(tmp_path, runs, STUDY)))
    assert table[["step", "surviving_fraction"]].to_numpy().tolist() == [[0, 1], [20, 0]]


def test_only_scored_runs_are_counted_with_seeds_in_the_order_of_their_steps(
    frames: StudyFrames, tmp_path: Path
) -> None:
    table = count_collapses(frames).set_index("arm")
    assert table["runs"].to_dict() == {"0": 2, "0.1": 2, "1": 1}
    assert table["collapsed"].to_dict() == {"0": 0, "0.1": 1, "1": 1}
    assert (table.loc["0.1", "steps"], table.loc["0.1", "seeds"]) == ((20,), (1,))
    assert (table.loc["0", "steps"], table.loc["0", "seeds"]) == ((), ())
    ends = (25, 20, 25)
    runs = [FakeRun("0", seed, status="early_stopped", steps=end, stop=STOP) for seed, end in enumerate(ends)]
    (row,) = count_collapses(read_study(write_study(tmp_path, runs, STUDY))).to_dict("records")
    assert (row["steps"], row["seeds"]) == ((20, 25, 25), (1, 0, 2))


def test_many_arms_and_steps_are_counted_and_a_study_without_steps_has_no_collapse(tmp_path: Path) -> None:
    rows = [(str(index), 3, 2, (10.0 + index, 30.0 + index), (1, 2)) for index in range(20)]
    table = pd.DataFrame([*rows, ("99", 3, 0, (), ())], columns=["arm", "runs", "collapsed", "steps", "seeds"])
    assert describe_collapses(table) == (
        "40 of 63 runs collapsed, in 20 of 21 arms, at steps 10 to 49; no run of arm 99 collapsed."
    )
    frames = read_study(write_study(tmp_path, [FakeRun("0", status="", steps=0)], STUDY))
    assert find_run_ends(frames).empty
    assert compute_survival(frames).empty
    assert describe_collapses(count_collapses(frames)) == ""

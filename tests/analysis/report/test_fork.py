"""Tests of the report of a fork: until which step each remedy was in time, and which collapses are its own."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.grid.layout import find_grid
from analysis.report.common import list_remarks
from analysis.report.fork import FORK, describe_remedy
from analysis.report.results import SweepResults
from analysis.report.sweep import SWEEP_REPORT
from analysis.sweep.collapse import find_run_ends
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.runs.history import RunHistory

pytestmark = pytest.mark.long

SEEDS = range(3)
STEPS = (2, 4, 6)
COLLAPSING, SAFE = (0.9, 0.0), (0.9, 0.85)
"""Success before training, and at the end."""
RECOVERS_UNTIL = 4


def write_fork(output: Path, remedy_settings: dict[str, object]) -> Path:
    """Write a fork whose runs collapse as before, and with the remedy if it begins after step 4."""
    runs = []
    for step in STEPS:
        runs += [FakeRun(f"as-before-from-{step}", seed, success=COLLAPSING) for seed in SEEDS]
        success = SAFE if step <= RECOVERS_UNTIL else COLLAPSING
        runs += [FakeRun(f"kl-from-{step}", seed, success=success, settings=remedy_settings) for seed in SEEDS]
    parents = [{"run_id": f"p{seed}", "seed": seed, "arm": "0", "checkpoints": f"p/{seed}"} for seed in SEEDS]
    steps = {run.arm: int(run.arm.rpartition("-")[2]) for run in runs}
    extra = {
        "forks": {"run": "kl", "folder": "kl", "arm": "0", "parents": parents, "steps": steps},
        "contrasts": [
            {"name": f"kl from step {step}", "pairs": [[f"kl-from-{step}", f"as-before-from-{step}"]]} for step in STEPS
        ],
        "points": {arm: {} for arm in steps},
    }
    study = FakeStudy(levels=120, setting="fork", baseline="as-before-from-2", extra=extra)
    return write_study(output, runs, study)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    settings = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1, "actor.lr": 1e-5}
    return load(write_fork(tmp_path_factory.mktemp("fork"), settings))


@pytest.fixture(scope="module")
def results(frames: StudyFrames) -> SweepResults:
    return SweepResults(frames)


def test_a_remedy_is_in_time_until_the_last_step_from_which_it_ended_better(results: SweepResults) -> None:
    assert list(FORK.sentences(results)) == [
        "Remedy kl was in time until step 4: it ended better than as before from steps 2 and 4; equal from step 6. "
        "No run of it collapsed from steps 2 and 4; from step 6 3 of 3 did (as before 3 of 3)."
    ]
    assert list_remarks(results.frames)[0].startswith("Fork of arm 0 of kl, seeds 0 to 2: the rows up to the step")
    assert FORK in [section for section in SWEEP_REPORT.sections if section.concludes and section.when(results)]
    assert find_grid(results.frames) is None  # although two numbers differ


def test_the_rows_behind_the_sentence_are_those_of_the_declared_contrasts(results: SweepResults) -> None:
    (table,) = FORK.tables(results)
    contrasts = results.contrasts[results.contrasts["column"] == results.frames.families[0].primary_column]
    assert [(row["step"], row["difference"]) for row in table.rows] == [
        *zip(STEPS, contrasts["difference"], strict=True)
    ]
    counts = [(row["collapsed"], row["runs"], row["before_collapsed"]) for row in table.rows]
    assert counts == [(0, 3, 3), (0, 3, 3), (3, 3, 3)]


def make_row(step: int, verdict: str, collapsed: int = 0, before: int = 0) -> dict[str, Any]:
    counts = {"runs": 3, "before_runs": 3, "collapsed": collapsed, "before_collapsed": before}
    return {"remedy": "kl", "step": step, "verdict": verdict, **counts}


def test_a_remedy_that_is_better_only_from_a_later_step_is_not_in_time_until_it() -> None:
    assert describe_remedy([make_row(5, "better")]) == (
        "Remedy kl was in time until step 5: it ended better than as before from step 5."
    )
    assert describe_remedy([make_row(5, "worse"), make_row(9, "better"), make_row(12, "open")]) == (
        "Remedy kl is not shown to be in time from any step: worse from step 5; better from step 9; open from step 12."
    )
    assert describe_remedy([make_row(5, "open", 2, 3)]) == (
        "Remedy kl is not shown to be in time from any step: open from step 5. From step 5 2 of 3 of its runs "
        "collapsed (as before 3 of 3)."
    )


def test_a_collapse_up_to_the_step_of_an_arm_is_that_of_the_forked_run(frames: StudyFrames) -> None:
    study, arm = frames.studies[0], "as-before-from-2"
    assert study.forks is not None
    ends = find_run_ends(frames).query("arm == @arm")
    assert ends["is_collapse"].all()
    # The same rows, of which the first 40 would be those of the forked run, which had lost its success by then.
    forks = replace(study.forks, steps={**study.forks.steps, arm: 40})
    moved_ends = find_run_ends(replace(frames, study=replace(study, forks=forks))).query("arm == @arm")
    assert not (moved_ends["is_collapse"] & (moved_ends["end_step"] <= 40)).any()
    assert not moved_ends["is_collapse"].all()
    for step, table in ((2, ends), (40, moved_ends)):
        for end in table.to_dict("records"):
            history = RunHistory.read(frames.folders[0] / "runs" / end["run_id"], 60)
            assert history.find_collapse(step) == (end["end_step"] if end["is_collapse"] else math.inf)

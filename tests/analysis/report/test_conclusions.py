"""Tests of what leaves a report: the conclusion of the terminal, verdicts of runs, and arms that need more seeds."""

import math
from pathlib import Path

import pytest

from analysis.data.load import load
from analysis.report.pages import conclude, list_open_arms, summarize_runs, write_frames_report
from analysis.report.section import Section
from analysis.sweep.verdicts import explain_open
from tests.fakes.grid_folders import write_grid
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study


@pytest.mark.long
def test_arms_of_a_grid_are_named_as_they_are_typed_and_each_run_has_the_verdict_of_its_arm(tmp_path: Path) -> None:
    frames = load(write_grid(tmp_path, {"low_var_kl": ("3", "5")}, seeds=3))
    headings, *rows = conclude(frames).verdicts
    assert headings[:2] == ("arm", "verdict")
    verdicts = {row[0]: row[1] for row in rows}
    assert len(rows) == len(verdicts)
    assert verdicts.keys() == set(frames.trials["arm"])
    open_arms = {arm for arm, verdict in verdicts.items() if verdict == "open"}
    assert set(list_open_arms(frames)) == open_arms
    assert 0 < len(open_arms) < len(verdicts)
    summaries = summarize_runs(frames)
    arms = frames.trials.set_index("run_id")["arm"]
    assert {run_id: summary["verdict"] for run_id, summary in summaries.items()} == dict(arms.map(verdicts))
    assert verdicts[frames.studies[0].baseline] == "baseline"


def test_a_section_of_ones_own_may_conclude(tmp_path: Path) -> None:
    folder = write_study(
        tmp_path, [FakeRun("0", steps=4), FakeRun("0.1", steps=4)], FakeStudy(levels=20, total_steps=4)
    )
    frames = load(folder)
    effort = Section("effort", "Effort", sentences=lambda results: ["Every run took `4` steps."], concludes=True)
    assert conclude(frames, [effort]).sentences[-1] == "Every run took 4 steps."
    assert conclude(frames).sentences == conclude(frames, [effort]).sentences[:-1]
    page = write_frames_report(frames, folder, with_pictures=False, own_sections=[effort]).read_text()
    assert page.partition("<main>")[0].count("Every run took <code>4</code> steps.") == 1
    assert "Every run took" not in page.partition("<main>")[2]


@pytest.mark.parametrize(
    ("outcome", "low", "p_holm", "is_told"),
    [
        ("open", 0.1, 0.07, True),
        ("open", -0.1, 0.07, False),
        ("better", 0.1, 0.01, False),
        ("open", 0.1, math.nan, False),
    ],
)
def test_an_open_difference_whose_interval_leaves_out_0_is_explained(
    outcome: str, low: float, p_holm: float, *, is_told: bool
) -> None:
    row = {"outcome": outcome, "difference_low": low, "difference_high": 0.5, "p_holm": p_holm}
    assert ("corrected for the number of arms" in explain_open([row], "arms")) == is_told

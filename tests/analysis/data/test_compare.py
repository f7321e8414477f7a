"""Tests of comparisons where seeds were added after a look: a test that holds at all looks, and its words."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.data.compare import has_added_seeds
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.report.pages import list_open_arms
from analysis.stats.sequential import compute_e_value, find_fewest_seeds
from analysis.sweep.contrasts import compute_contrasts
from sandboxes.toys.report.report import ToyResults
from sandboxes.toys.report.tables import make_notes
from tests.fakes.run_folders import make_study_record
from tests.fakes.sandbox_folders import FakeStudy, make_seed_runs, write_sandbox

BASELINE = (0.30, 0.34, 0.35, 0.31, 0.33, 0.36, 0.32, 0.35)
# Paired differences: near -.2, exactly 0 on average with a small spread, and 0 with a large one.
SHIFTS = {
    "apart": (-0.20, -0.21, -0.19, -0.20, -0.18, -0.22, -0.20, -0.20),
    "same": (0.004, -0.004, 0.003, -0.003, 0.002, -0.002, 0.004, -0.004),
    "unclear": (0.05, -0.04, 0.06, -0.07, 0.03, -0.03, 0.02, -0.02),
}


def load_study(folder: Path, num_seeds: int, **study_fields: Any) -> StudyFrames:
    arms = {"DG": BASELINE} | {arm: np.add(BASELINE, shifts).tolist() for arm, shifts in SHIFTS.items()}
    runs = [run for arm, ends in arms.items() for run in make_seed_runs(arm, ends[:num_seeds])]
    contrasts = [{"name": "apart from DG", "pairs": [["apart", "DG"]]}, {"name": "same", "pairs": [["same", "DG"]]}]
    return load(write_sandbox(folder, runs, FakeStudy("some-study", extra={"contrasts": contrasts, **study_fields})))


def get_row(frames: StudyFrames, arm: str) -> dict[str, Any]:
    rows = to_records(ToyResults(frames).differences)
    (row,) = [row for row in rows if (row["arm"], row["column"]) == (arm, "late_test_error")]
    return row


def get_contrasts(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    rows = to_records(compute_contrasts(frames))
    return {row["contrast"]: row for row in rows if row["column"] == "late_test_error"}


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        ({}, False),
        ({"seeds": [0, 1, 2], "planned_seeds": 3}, False),
        ({"seeds": [0, 1, 2], "planned_seeds": 2}, True),
        ({"seeds": [0, 1, 2], "planned_seeds": 3, "max_seeds": 20}, True),
        # Further seeds of the baseline count if they were not planned.
        ({"seeds": [0], "planned_seeds": 1, "baseline": "0", "extra_seeds": {"0": [1, 2]}, "max_seeds": None}, False),
        ({"seeds": [0], "planned_baseline_seeds": 3, "baseline": "0", "extra_seeds": {"0": [1, 2]}}, False),
        ({"seeds": [0], "planned_baseline_seeds": 2, "baseline": "0", "extra_seeds": {"0": [1, 2]}}, True),
    ],
)
def test_seeds_beyond_the_planned_ones_were_added(study: dict[str, Any], expected: bool) -> None:
    assert has_added_seeds(make_study_record(**study)) is expected


@pytest.mark.long
def test_verdicts_after_added_seeds_are_those_of_the_e_values(tmp_path: Path) -> None:
    frames = load_study(tmp_path, 8, planned_seeds=3)
    row = get_row(frames, "apart")
    differences = np.array(SHIFTS["apart"])
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(8))
    assert row["p"] == pytest.approx(1 / float(compute_e_value(t, 8)))
    assert row["difference"] == pytest.approx(differences.mean())
    assert row["basis"] == "over 8 seeds, with a test that is valid at every look"
    contrasts = get_contrasts(frames)
    # At the ends of an interval, e is the number of arms, or of contrasts, divided by 0.05.
    for tested, count in ((row, 3), (contrasts["apart from DG"], 2)):
        t_at_end = (tested["difference_high"] - tested["difference"]) / tested["se"]
        assert float(compute_e_value(t_at_end, 8)) == pytest.approx(count / 0.05)
    verdicts = {arm: get_row(frames, arm)["verdict"] for arm in SHIFTS}
    assert verdicts == {"apart": "better", "same": "equal", "unclear": "open"}
    assert [row["verdict"] for row in contrasts.values()] == ["better", "equal"]
    assert list_open_arms(frames) == ["unclear"]
    # The same seeds, all of them planned, are judged with the noise of all arms.
    planned = get_row(load_study(tmp_path / "planned", 8, planned_seeds=8), "apart")
    assert planned["basis"] == "over 8 seeds, with the noise of all arms"


def test_arms_of_one_seed_are_compared_with_all_runs_of_the_baseline(tmp_path: Path) -> None:
    runs = [*make_seed_runs("DG", BASELINE[:5]), *make_seed_runs("TPO", [0.2])]
    row = get_row(load(write_sandbox(tmp_path, runs)), "TPO")
    variance = np.var(BASELINE[:5], ddof=1)
    assert row["difference"] == pytest.approx(0.2 - np.mean(BASELINE[:5]))
    assert (row["se"], row["df"]) == (pytest.approx(math.sqrt(variance * (1 + 1 / 5))), pytest.approx(4))
    assert row["basis"] == "one seed against 5 seeds of the baseline, with the noise of the only arm with several runs"


def test_with_too_few_seeds_every_arm_is_open_and_the_row_says_why(tmp_path: Path) -> None:
    frames = load_study(tmp_path, 3, planned_seeds=3, max_seeds=20)
    row = get_row(frames, "apart")
    assert find_fewest_seeds(3) == 6
    assert row["basis"] == "over 3 seeds, of which a test that is valid at every look needs 6"
    assert (row["verdict"], math.isnan(row["difference_low"])) == ("open", True)
    assert list_open_arms(frames) == list(SHIFTS)
    contrast = get_contrasts(frames)["apart from DG"]
    assert (contrast["verdict"], contrast["seeds"], math.isnan(contrast["difference_low"])) == ("open", 3, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "num_looks", "start"),
    [
        (
            {"planned_seeds": 3, "max_seeds": 20},
            3,
            "Seeds are added to open arms, up to 20 per arm. The results were looked at 3 times, with up to 3, 6, 8 ",
        ),
        (
            {"planned_seeds": 3},
            1,
            "Seeds were added after a look: more were run than planned. The results were looked at once, with up to 3 ",
        ),
        ({"planned_seeds": 8}, 0, ""),
    ],
)
def test_the_report_says_how_often_was_looked(
    tmp_path: Path, fields: dict[str, int], num_looks: int, start: str
) -> None:
    looks = [{"at": "2026-01-02T03:04:05+00:00", "runs": 4 * seeds, "seeds": seeds} for seeds in (3, 6, 8)[:num_looks]]
    lines = [note for note in make_notes(load_study(tmp_path, 8, looks=looks, **fields)) if "look" in note]
    assert [line.startswith(start) for line in lines] == [True] * bool(start)


@pytest.mark.long
def test_an_arm_without_evidence_counts_in_the_number_of_comparisons(tmp_path: Path) -> None:
    """The twin of the baseline has no spread: p and p_equal are 1, and the others are corrected for it."""
    arms = {"DG": BASELINE, "twin": BASELINE}
    arms |= {arm: tuple(np.add(BASELINE, SHIFTS[arm]).tolist()) for arm in ("apart", "unclear")}
    runs = [run for arm, ends in arms.items() for run in make_seed_runs(arm, list(ends))]
    frames = load(write_sandbox(tmp_path, runs, FakeStudy("some-study", extra={"planned_seeds": 3})))
    rows = {arm: get_row(frames, arm) for arm in ("twin", "apart", "unclear")}
    assert (rows["twin"]["p"], rows["twin"]["p_equal"], rows["twin"]["verdict"]) == (1, 1, "open")
    assert rows["apart"]["p_holm"] == pytest.approx(3 * rows["apart"]["p"])
    assert min(row["p_equal_holm"] for row in rows.values()) == pytest.approx(3 * rows["unclear"]["p_equal"]) or (
        rows["unclear"]["p_equal_holm"] == 1
    )

"""Tests of the comparison of studies: which arms are in common, and differences with the noise of all arms."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.data.compare import collect_joint_outcomes, collect_outcomes
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.report import comparison as page
from tests.analysis.report.test_pages import parse_page
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STUDY = FakeStudy(levels=40, total_steps=20)
LIMITS = {"0": 0.6, "0.01": 0.6, "0.1": 0.3}


def make_frames(folder: Path, limits: dict[str, float], seeds: int = 3, study: FakeStudy = STUDY) -> StudyFrames:
    runs = [
        FakeRun(arm, seed, steps=20, success=(0.3, limit)) for arm, limit in limits.items() for seed in range(seeds)
    ]
    return load(write_study(folder, runs, study))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StudyFrames]:
    """A study and another one, in which arm 0.01 does much better and arm 0.3 takes the place of 0.1."""
    return {
        "A": make_frames(tmp_path_factory.mktemp("a"), LIMITS),
        "B": make_frames(tmp_path_factory.mktemp("b"), {"0": 0.6, "0.010": 0.95, "0.3": 0.3}),
    }


def test_arms_of_equal_values_or_settings_are_in_common(studies: dict[str, StudyFrames], tmp_path: Path) -> None:
    assert page.find_common_arms(studies["A"], studies["B"]) == [("0", "0"), ("0.01", "0.010")]
    first = make_frames(tmp_path / "a", {"0": 0.6, "0.1": 0.5}, seeds=1)
    entropy = replace(STUDY, name="entropy", run="entropy_sweep", setting="actor.entropy_coeff")
    second = make_frames(tmp_path / "b", {"0": 0.6, "0.1": 0.5}, seeds=1, study=entropy)
    assert page.find_common_arms(first, second) == [("0", "0")]  # 0.1 is a value of another setting
    first, second = make_frames(tmp_path / "c", {"0.1": 0.5}), make_frames(tmp_path / "d", {"0.2": 0.5})
    with pytest.raises(ValueError, match="no arm in common"):
        page.compare_arms({"A": first, "B": second})


def test_a_difference_is_the_other_study_minus_the_first(studies: dict[str, StudyFrames]) -> None:
    table = page.compare_arms(studies)
    assert table["arm"].to_list() == ["0", "0.01"]
    for row in to_records(table):
        means = [
            collect_outcomes(studies[label], "late_val_success").get_values(arm).mean()
            for label, arm in (("A", row["arm"]), ("B", row["other_arm"]))
        ]
        assert (row["reference"], row["other"]) == pytest.approx(means)
        assert row["difference"] == pytest.approx(means[1] - means[0])
        # Arm 0 has the same rows in both: what differs has no noise.
        assert row["equal_rows"] == (row["arm"] == "0")
        assert row["equal_rows"] or row["difference_low"] < row["difference"] < row["difference_high"]
    assert table.loc[table["arm"] == "0.01", "verdict"].item() == "better"
    turned = page.compare_arms(dict(reversed(studies.items())))
    assert turned["difference"].to_list() == pytest.approx([-value for value in table["difference"]])
    assert turned["p"].to_list() == pytest.approx(table["p"].to_list(), nan_ok=True)
    assert turned.loc[turned["other_arm"] == "0.01", "verdict"].item() == "worse"


def test_equal_rows_are_seen_whatever_other_arms_measured(studies: dict[str, StudyFrames]) -> None:
    frames = studies["A"]
    is_baseline = frames.steps["arm"] == "0"
    steps = frames.steps.assign(kl_loss=frames.steps["kl_loss"].mask(is_baseline))
    assert steps["kl_loss"].notna().any()
    alone = replace(
        frames, trials=frames.trials[frames.trials["arm"] == "0"], steps=steps[is_baseline].drop(columns="kl_loss")
    )
    (row,) = to_records(page.compare_arms({"A": replace(frames, steps=steps), "B": alone}))
    assert (row["arm"], row["verdict"]) == ("0", "no effect")


def test_the_noise_is_of_all_arms_and_added_seeds_need_the_test_for_all_looks(studies: dict[str, StudyFrames]) -> None:
    outcomes = collect_joint_outcomes(studies, "late_val_success", 2)
    assert outcomes.values.index.to_list() == ["A 0", "A 0.01", "A 0.1", "B 0", "B 0.010", "B 0.3"]
    assert outcomes.values.shape == (6, 3)
    assert set(outcomes.min_variances) == set(outcomes.values.index)
    assert outcomes.num_comparisons == 0  # no seed was added after a look
    (study,) = studies["A"].studies
    extended = replace(studies["A"], study=replace(study, planned_seeds=1))
    outcomes = collect_joint_outcomes({"A": extended, "B": studies["B"]}, "late_val_success", 2)
    assert outcomes.num_comparisons == 2
    table = page.compare_arms({"A": extended, "B": studies["B"]})
    assert np.isnan(table["difference_low"]).all()  # three seeds are too few for any verdict
    assert dict(zip(table["arm"], table["verdict"], strict=True)) == {"0": "no effect", "0.01": "open"}


def test_stopped_runs_count_and_failed_ones_are_not_compared(tmp_path: Path, studies: dict[str, StudyFrames]) -> None:
    stop = ("reward_variance_collapse", 0.1, 0.2)
    stopped = [FakeRun("0", seed, "early_stopped", steps=15, stop=stop, success=(0.3, 0.01)) for seed in range(2)]
    first = load(write_study(tmp_path / "a", [*stopped, FakeRun("0", 2, steps=20)], STUDY))
    (row,) = to_records(page.compare_arms({"A": first, "B": make_frames(tmp_path / "b", {"0": 0.6})}))
    assert (row["reference_stopped"], row["reference_runs"]) == (2, 3)
    assert (row["other_stopped"], row["other_runs"]) == (0, 3)
    runs = [FakeRun("0", seed, steps=20) for seed in range(2)] + [FakeRun("0.01", status="failed", steps=5)]
    frames = load(write_study(tmp_path / "failed", runs, STUDY))
    table = page.compare_arms({"A": studies["A"], "B": frames})
    row = table[table["arm"] == "0.01"].iloc[0]
    assert row["verdict"] == "no comparison"
    assert math.isnan(row["difference"])


def test_only_settings_that_differ_are_listed(studies: dict[str, StudyFrames]) -> None:
    (study,) = studies["A"].studies
    assert page.compare_settings({"A": study, "B": study}).empty
    settings = {**study.settings, "actor": {**study.settings["actor"], "lr": 0.5}, "new": 1}
    table = page.compare_settings({"A": study, "B": replace(study, preset="stress", settings=settings)})
    assert to_records(table) == [
        {"setting": "preset", "A": '"laptop"', "B": '"stress"'},
        {"setting": "actor.lr", "A": str(study.settings["actor"]["lr"]), "B": "0.5"},
        {"setting": "new", "A": "", "B": "1"},
    ]
    # One that a study lacks is listed unless the others have its default.
    for value, is_listed in ((1, False), (2, True)):
        newer = replace(study, settings={**study.settings, "new": value}, defaults={"new": 1})
        assert list(page.compare_settings({"A": study, "B": newer})["setting"]) == ["new"] * is_listed


def test_the_page_has_every_study_arm_setting_and_seed(studies: dict[str, StudyFrames], tmp_path: Path) -> None:
    comparison = page.compare(studies, {"A": "here/<results>", "B": "there"})
    text = page.write_comparison(comparison, tmp_path / "comparison.html").read_text()
    words = parse_page(text).words
    (sentence,) = comparison.describe()
    assert sentence.startswith("B against A, 2 arms in common: better in 0.010; ")
    for part in (sentence, "here/<results>", "seeds", "0 to 2", "Only in A: 0.1.", "Only in B: 0.3."):
        assert part in words
    row = comparison.arms.set_index("arm").loc["0.01"]
    numbers = f"{row['reference']:.3f} {row['other']:.3f} +{row['difference']:.3f} [+{row['difference_low']:.3f}, "
    assert f"0.01 = 0.010 better B {numbers}+{row['difference_high']:.3f}] " in words
    assert "0 of 3, 0 of 3" in words
    assert "<results>" not in text  # escaped
    (chart,) = re.findall(r'<script type="application/json" id="differences-chart">(.*?)</script>', text)
    points = max(json.loads(chart)["datasets"].values(), key=len)
    assert [(point["name"], point["difference"]) for point in points] == [
        (f"B {arm}", difference) for arm, difference in zip(("0", "0.010"), comparison.arms["difference"], strict=True)
    ]
    assert "The settings that all arms of a study share are the same in every study." in words
    fewer = replace(studies["B"], trials=studies["B"].trials[studies["B"].trials["seed"] == 0])
    *_, sentence = page.compare({**studies, "B": fewer}, {"A": "a", "B": "b"}).describe()
    assert sentence.startswith("The studies have different seeds. Means are over the seeds of each study.")

"""Tests of the order of symptoms: known onsets, ranks, leads, and the section of the report."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.sweep import symptoms
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_lines import read_lines, write_lines
from trainable.runs.study_record import ForkedStudy

STOP = ("reward_variance_collapse", 0.1, 0.3)
STUDY = FakeStudy(levels=40)


def make_ramp(start: int, end: int, before: float, after: float, num_steps: int, seed: int) -> list[float]:
    """A ramp with a little noise, at steps 1 to num_steps: `before` up to step `start`, `after` from `end` on."""
    steps = np.arange(1, num_steps + 1)
    noise = np.random.default_rng(seed).normal(0, 0.01 * abs(after - before), num_steps)
    return list(np.interp(steps, [start, end], [before, after]) + noise)


def write_collapse(folder: Path, spread_starts: tuple[int, ...], success_start: int = 20) -> Path:
    """Runs stopped at step 40 whose spread falls from the given steps on, and whose success falls from step 20 on."""
    runs = [
        FakeRun("0", seed, status="early_stopped", steps=40, success=(0.5, 0.5), stop=STOP)
        for seed in range(len(spread_starts))
    ]
    study_folder = write_study(folder, [*runs, FakeRun("0.1")], STUDY)
    for run, start in zip(runs, spread_starts, strict=True):
        series = {
            "reward_std": make_ramp(start, start + 8, 3.0, 0.1, 40, run.seed),
            "train_success": make_ramp(success_start, success_start + 8, 0.5, 0.0, 40, 10 + run.seed),
            "entropy": make_ramp(success_start + 2, success_start + 10, 0.4, 2.0, 40, 20 + run.seed),
        }
        columns = [dict(zip(series, map(float, values), strict=True)) for values in zip(*series.values(), strict=True)]
        path = study_folder / "runs" / run.run_id / "metrics.jsonl"
        write_lines(path, [row | column for row, column in zip(read_lines(path).records, columns, strict=True)])
    return study_folder


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    return load(write_collapse(tmp_path_factory.mktemp("symptoms"), (10, 12, 14, 9, 11, 13)))


@pytest.fixture(scope="module")
def onsets(frames: StudyFrames) -> pd.DataFrame:
    return symptoms.find_collapse_onsets(frames, np.random.default_rng(0))


def test_onsets_are_those_of_the_ramps(onsets: pd.DataFrame) -> None:
    spread = onsets[onsets["is_collapse"] & (onsets["symptom"] == "reward_std")]
    assert spread["onset"].to_list() == [10, 12, 14, 9, 11, 13]
    assert (spread["end"] - spread["onset"]).to_list() == [8] * 6
    assert spread["before"].to_numpy() == pytest.approx(3.0, abs=0.05)
    assert spread["after"].to_numpy() == pytest.approx(0.1, abs=0.05)
    assert ((spread["low"] <= spread["onset"]) & (spread["onset"] <= spread["high"])).all()
    entropy = onsets[onsets["is_collapse"] & (onsets["symptom"] == "entropy")]  # both directions count
    assert entropy["onset"].to_list() == [22] * 6
    assert set(onsets.loc[onsets["is_collapse"], "arm"]) == {"0"}
    assert set(onsets.loc[~onsets["is_collapse"], "arm"]) == {"0.1"}  # it stayed well


def test_a_change_for_the_better_is_no_symptom(tmp_path: Path) -> None:
    """Spread that rises and success that rises: neither has an onset."""
    folder = write_collapse(tmp_path, (10,))
    path = folder / "runs" / "arm0-seed0" / "metrics.jsonl"
    rows = read_lines(path).records
    write_lines(path, [{**row, **{name: -row[name] for name in ("reward_std", "train_success")}} for row in rows])
    table = symptoms.find_collapse_onsets(load(folder), np.random.default_rng(0))
    table = table[table["is_collapse"]].set_index("symptom")
    assert table.loc[["reward_std", "train_success"], "onset"].isna().all()
    assert table.loc["entropy", "onset"] == 22


def test_the_first_symptom_is_one_whose_interval_ends_before_all_others_begin(onsets: pd.DataFrame) -> None:
    for _, rows in onsets.groupby("run_id"):
        known = rows.dropna(subset="onset")
        for row in known.itertuples():
            others = known[known["symptom"] != row.symptom]
            assert row.is_first == (len(others) > 0 and all(row.high < low for low in others["low"]))
    assert set(onsets.loc[onsets["is_first"], "symptom"]) == {"reward_std"}


def test_overlapping_intervals_are_no_order(tmp_path: Path) -> None:
    """The spread falls one step before success, with noise: no run shows which began first."""
    table = symptoms.find_collapse_onsets(load(write_collapse(tmp_path, (19, 19))), np.random.default_rng(0))
    order = symptoms.summarize_order(table.assign(low=table["onset"] - 3, high=table["onset"] + 3)).set_index("symptom")
    assert order.loc["reward_std", ["earlier", "later", "undecided"]].to_list() == [0, 0, 2]
    wide = table.assign(low=table["onset"] - 3, high=table["onset"] + 3, is_first=False)
    first, _ = symptoms.describe_order(wide)
    assert first.endswith("no symptom is known to be the first: the intervals of the onsets overlap.")


def test_changes_are_corrected_for_all_symptoms_and_runs(onsets: pd.DataFrame) -> None:
    """Benjamini and Hochberg's procedure, step by step, over all symptoms of all runs."""
    p_values = sorted(onsets["p"].dropna())
    passed = [p for rank, p in enumerate(p_values, 1) if p <= symptoms.MAX_P * rank / len(p_values)]
    assert onsets["onset"].notna().sum() == sum(p <= max(passed) for p in p_values) > 10
    # Without a change in any series, p is uniform: hardly any study has a change left, of which 4 in 78 would be.
    generator = np.random.default_rng(1)
    assert sum((symptoms.adjust_discoveries(generator.random(78)) <= symptoms.MAX_P).any() for _ in range(200)) < 22


def test_the_summary_counts_what_came_before_success(onsets: pd.DataFrame) -> None:
    table = symptoms.summarize_order(onsets).set_index("symptom")
    spread = table.loc["reward_std"]
    assert spread[["runs", "changed", "earlier", "later", "undecided"]].to_list() == [6, 6, 6, 0, 0]
    assert spread[["well_runs", "well_changed", "first"]].to_list() == [1, 1, 5]
    assert spread["median_onset"] == 11.5
    assert spread["lead"] == 8.5  # success begins to fall at step 20
    assert (spread["lead_low"], spread["lead_high"]) == (6, 11)
    assert spread["p"] == pytest.approx(2 / 2**6)
    entropy = table.loc["entropy"]
    assert entropy[["earlier", "later"]].to_list() == [0, 6]
    # Of the three symptoms with a lead, two have this p: at least two of three hypotheses are as surprising.
    assert entropy["p_adjusted"] == pytest.approx(3 / 2 * 2 / 2**6)
    assert entropy["lead"] == -2
    success = table.loc["train_success"]
    assert success[["earlier", "later", "undecided"]].to_list() == [0, 0, 0]
    assert math.isnan(success["lead"])
    assert list(table.index).index("reward_std") < list(table.index).index("train_success")


def test_the_median_lead_equals_an_enumeration_of_signs() -> None:
    leads = [3.0, -1.0, 4.0, 2.0, 0.0, 7.0, 5.0]
    estimate = symptoms.estimate_median_lead(leads)
    different = [lead for lead in leads if lead]
    positive = sum(lead > 0 for lead in different)
    extreme = [
        signs
        for signs in itertools.product((0, 1), repeat=len(different))
        if min(sum(signs), len(different) - sum(signs)) <= min(positive, len(different) - positive)
    ]
    assert estimate.p == pytest.approx(len(extreme) / 2 ** len(different))
    assert estimate.value == 3.0
    # With 7 values, the smallest and the largest enclose the median with probability 1 - 2 / 2^7.
    assert (estimate.low, estimate.high) == (-1.0, 7.0)
    assert 2 * stats.binom.cdf(0, 7, 0.5) < 0.05 < 2 * stats.binom.cdf(1, 7, 0.5)
    assert np.isnan(symptoms.estimate_median_lead([1.0] * 5)[1:3]).all()
    assert math.isnan(symptoms.estimate_median_lead([0.0] * 6).p)
    assert math.isnan(symptoms.estimate_median_lead([]).value)


def test_the_sentences_name_what_was_first(onsets: pd.DataFrame) -> None:
    first, second = symptoms.describe_order(onsets)
    assert first == (
        "In 5 of the 6 runs that collapsed, the interval of one onset ends before all others begin: spread of the "
        "rewards in a group (5)."
    )
    assert second.endswith(
        "changed up to the same step. A symptom that changes as often in both groups predicts nothing."
    )
    assert "In 1 run that stayed well, " in second
    assert symptoms.describe_order(onsets.iloc[:0]) == []


def test_only_the_chosen_runs_and_their_rows_up_to_the_collapse_count(frames: StudyFrames) -> None:
    onsets = symptoms.find_collapse_onsets(frames, np.random.default_rng(0), {"arm0-seed1", "arm0-seed2"})
    assert set(onsets.loc[onsets["is_collapse"], "run_id"]) == {"arm0-seed1", "arm0-seed2"}
    assert symptoms.describe_order(onsets)[0].startswith("In 2 of the 2 runs that collapsed,")
    one = symptoms.find_collapse_onsets(frames, np.random.default_rng(0), {"arm0-seed1"})
    assert symptoms.describe_order(one)[0].startswith("In the only run that collapsed, the interval of one onset ends")
    # Runs that stayed well are read as far as those that collapsed.
    assert set(onsets.loc[~onsets["is_collapse"], "end_step"]) == {40.0}
    ends = symptoms.find_run_ends(frames)
    ends = ends[ends["is_collapse"]].assign(end_step=15)
    table = symptoms.find_onsets(frames, ends, np.random.default_rng(0))
    assert table.loc[table["symptom"] == "train_success", "onset"].isna().all()  # it falls from step 20 on
    assert (table.loc[table["symptom"] == "reward_std", "p"] <= symptoms.MAX_P).any()


def test_what_changed_in_rows_that_a_fork_copies_is_not_its_own(frames: StudyFrames) -> None:
    (study,) = frames.studies
    forked = replace(frames, study=replace(study, forks=ForkedStudy("kl", "kl", "0", (), {"0": 16})))
    onsets = symptoms.find_collapse_onsets(forked, np.random.default_rng(0))
    onsets = onsets[onsets["is_collapse"]]
    assert (onsets["onset"].dropna() > 16).all()  # the spread falls from step 9 to 14 on
    assert onsets.loc[onsets["symptom"] == "train_success", "onset"].to_list() == [20] * 6
    late = replace(frames, study=replace(study, forks=ForkedStudy("kl", "kl", "0", (), {"0": 35})))
    (sentence,) = symptoms.describe_order(symptoms.find_collapse_onsets(late, np.random.default_rng(0)))
    assert sentence.endswith("a change needs at least 8 measurements before the collapse.")


def test_a_short_run_has_no_order(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", status="early_stopped", steps=5, stop=STOP), FakeRun("0.1")], STUDY)
    onsets = symptoms.find_collapse_onsets(load(folder), np.random.default_rng(0))
    assert onsets.loc[onsets["is_collapse"], "onset"].isna().all()
    (sentence,) = symptoms.describe_order(onsets)
    assert sentence.startswith("In the only run that collapsed, no change is resolved: a change needs at least 8")

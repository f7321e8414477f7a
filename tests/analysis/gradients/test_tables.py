"""Tests of the tables of gradient analyses: complete grids, shares, lines, and trends compared with SciPy."""

import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.gradients import tables as gradients
from tests.conftest import TEMPORARY_ROOT_ENV
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy, write_analyses, write_study

STUDY = FakeStudy(total_steps=3, test_freq=2, levels=10)
ALL = ("task", "entropy", "kl")
AFTER = FakeAnalysis(51)
BEFORE = replace(AFTER, prefilter=True)
TABLES = (
    *(gradients.make_analysis_table, gradients.make_share_table),
    *(gradients.make_signal_lines, gradients.make_share_lines),
)


def make_frames(output: Path, runs: list[tuple[FakeRun, list[FakeAnalysis]]]) -> StudyFrames:
    folder = write_study(output, [run for run, _ in runs], STUDY)
    for run, analyses in runs:
        write_analyses(folder, run, analyses)
    return read_study(folder)


@cache
def make_rows(*analyses: FakeAnalysis) -> pd.DataFrame:
    with TemporaryDirectory(dir=os.environ.get(TEMPORARY_ROOT_ENV)) as folder:
        return make_frames(Path(folder), [(FakeRun("0", steps=3), list(analyses))]).gradients


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_every_analysis_is_listed_and_none_gives_empty_tables(generator: np.random.Generator) -> None:
    probe = FakeAnalysis(51, "probe", components=ALL, buckets=3)
    table = gradients.make_analysis_table(make_rows(BEFORE, AFTER, probe))
    names = ["source", "step", "prefilter", "groups", "sequences", "buckets", "components"]
    assert table[names].to_numpy().tolist() == [
        ["train", 51, False, 24, 384, 6, "task, entropy"],
        ["train", 51, True, 24, 384, 6, "task, entropy"],
        ["probe", 51, False, 12, 192, 3, "task, entropy, kl"],
    ]
    whole_batch = make_rows(AFTER)[lambda rows: rows["bucket"] == "all"]
    assert gradients.make_analysis_table(whole_batch).empty
    no_rows = make_rows()
    assert all(make_table(no_rows).empty for make_table in TABLES)
    assert gradients.compute_trends(no_rows, generator).empty
    assert gradients.summarize_trends(no_rows, generator).empty


def test_the_grid_of_buckets_is_complete_and_in_order_and_says_what_is_off() -> None:
    table = gradients.make_bucket_table(make_rows(AFTER))
    assert len(table) == 6 * 4
    assert table["bucket"].drop_duplicates().to_list() == [f"bucket_{number}" for number in range(1, 7)]
    off = table[~table["on"]]
    assert set(off["component"]) == {"kl"}
    assert off[["norm", "norm_per_sample", "norm_per_token", "loss"]].isna().all(axis=None)
    assert table["reward_std_mean"].notna().all()
    rows = make_rows(FakeAnalysis(1, buckets=12), FakeAnalysis(51, buckets=3))
    bucket_rows = gradients.select_buckets(rows.iloc[::-1])
    names = bucket_rows.loc[bucket_rows["step"] == 1, "bucket"].drop_duplicates().to_list()
    assert names == [f"bucket_{n}" for n in range(1, 13)]
    assert bucket_rows["step"].is_monotonic_decreasing  # the order of the analyses does not change
    assert list(bucket_rows) == list(rows)


@pytest.mark.parametrize(
    ("components", "terms", "summed"),
    [(ALL, "KL + entropy", ["kl", "entropy"]), (("task", "entropy"), "entropy", ["entropy"]), (("task",), "", [])],
)
def test_the_summary_adds_the_terms_that_are_on(components: tuple[str, ...], terms: str, summed: list[str]) -> None:
    fake_analysis = FakeAnalysis(51, components=components)
    table = gradients.make_summary_table(make_rows(fake_analysis))
    norms = {(row["bucket"], row["component"]): row["norm"] for row in fake_analysis.make_line()["rows"]}
    assert table["label"].to_list() == ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
    assert set(table["terms"]) == {terms}
    for row in table.itertuples():
        assert row.task == norms[row.bucket, "task"]
        if summed:
            assert row.regularizer == pytest.approx(sum(norms[row.bucket, name] for name in summed), rel=1e-12)
        else:
            assert math.isnan(row.regularizer)


def test_steps_have_the_trained_batch_and_few_folds_no_interval() -> None:
    empty_after_filter = FakeAnalysis(1, prefilter=True)
    rows = make_rows(empty_after_filter, BEFORE, AFTER)
    table = gradients.make_steps_table(rows, [1, 51])
    assert table["step"].to_list() == [1] * 6 + [51] * 6
    assert table["prefilter"].to_list() == [True] * 6 + [False] * 6
    for fake_analysis, step in ((empty_after_filter, 1), (AFTER, 51)):
        task_rows = [row for row in fake_analysis.make_line()["rows"] if row["component"] == "task"]
        reward_stds = [row["reward_std_mean"] for row in task_rows[:6]]
        assert table.loc[table["step"] == step, "reward_std_mean"].to_list() == reward_stds
    lines_of_few_folds = gradients.make_signal_lines(make_rows(replace(AFTER, folds=2)))
    assert lines_of_few_folds["low"].isna().all()


@pytest.mark.parametrize("components", [("task",), ("task", "entropy"), ALL, (*ALL, "value")])
def test_shares_sum_to_one(components: tuple[str, ...]) -> None:
    table = gradients.make_share_table(make_rows(FakeAnalysis(51, components=components)))
    assert table["bucket"].to_list() == [f"bucket_{number}" for number in range(1, 7)]
    share_sums = table[["task", "regularizer", "value"]].fillna(0).sum(axis=1)
    assert share_sums.to_numpy() == pytest.approx(np.ones(6), rel=1e-12)
    for name in ("entropy", "kl", "value"):
        assert table[name].notna().all() == (name in components)
    assert table["regularizer"].isna().all() == (components == ("task",))


def test_lines_of_one_arm_are_its_steps_and_of_several_their_last_steps_and_every_probe(tmp_path: Path) -> None:
    steps = [FakeAnalysis(step) for step in range(1, 100, 7)]
    rows = make_rows(*steps, FakeAnalysis(99, "probe"))
    names = gradients.select_report_lines(rows)["line"].drop_duplicates().to_list()
    assert names == ["step 1", "step 22", "step 43", "step 57", "step 78", "step 99", "step 99, probe"]
    lines_of_few_steps = gradients.select_report_lines(make_rows(FakeAnalysis(1), BEFORE, AFTER))
    assert lines_of_few_steps["line"].drop_duplicates().to_list() == ["step 1", "step 51"]
    assert len(lines_of_few_steps) == 3 * 7 * 3
    probe = FakeAnalysis(101, "probe")
    runs = [
        (FakeRun("0", steps=3), [FakeAnalysis(1), AFTER, probe]),
        (FakeRun("0.1", steps=3), [FakeAnalysis(1), replace(probe, step=1), replace(probe, step=51)]),
    ]
    table = gradients.select_report_lines(make_frames(tmp_path / "several", runs).gradients)
    assert table[["line", "step", "source"]].drop_duplicates().to_numpy().tolist() == [
        ["0", 51, "train"],
        ["0.1", 1, "train"],
        ["0, probe", 101, "probe"],
        ["0.1, probe of step 1", 1, "probe"],
        ["0.1, probe of step 51", 51, "probe"],
    ]


@pytest.mark.long
def test_what_the_filter_left_empty_is_in_no_table(generator: np.random.Generator) -> None:
    empty_analysis = replace(AFTER, buckets=0)
    rows, rows_before = make_rows(BEFORE, empty_analysis), make_rows(BEFORE)
    assert len(rows) == len(rows_before) + 1
    pd.testing.assert_frame_equal(
        gradients.select_trained(rows).reset_index(drop=True), gradients.select_trained(rows_before)
    )
    for make_table in TABLES:
        table, expected = (make_table(each).reset_index(drop=True) for each in (rows, rows_before))
        pd.testing.assert_frame_equal(table, expected)
    assert gradients.make_steps_table(rows, [51])["prefilter"].to_list() == [True] * 6
    assert len(gradients.compute_trends(rows, generator)) == len(gradients.compute_trends(rows_before, generator))


def test_labels_are_the_buckets_own_numbers() -> None:
    rows = make_rows(replace(AFTER, mode="fixed_rv"))
    some = rows[~rows["bucket"].isin(["bucket_1", "bucket_4"])]
    for mode, prefix in (("fixed_rv", ""), ("quantile", "Q"), ("", "")):
        labels = gradients.make_summary_table(some.assign(bucket_mode=mode))["label"].to_list()
        assert labels == [f"{prefix}{number}" for number in (2, 3, 5, 6)]


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        (("task", "entropy"), "own"),
        (("task", "kl"), "own"),
        (ALL, "rest"),
        ((*ALL, "value"), "none"),
        (("task", "entropy", "value"), "own"),
        (("task",), "none"),
    ],
)
def test_the_interval_of_the_regularizer_is_that_of_its_term_or_of_the_remainder(
    components: tuple[str, ...], expected: str
) -> None:
    fake_analysis = FakeAnalysis(51, components=components)
    table = gradients.make_share_table(make_rows(fake_analysis))
    rows = {(row["bucket"], row["component"]): row for row in fake_analysis.make_line()["rows"]}
    for share in table.itertuples():
        numbers = [share.regularizer, share.regularizer_low, share.regularizer_high]
        columns = ["signal_share", "signal_share_low", "signal_share_high"]
        if expected == "none":
            assert np.isnan(numbers[1:]).all()
        elif expected == "own":
            row = rows[share.bucket, "kl" if "kl" in components else "entropy"]
            assert numbers == [row[name] for name in columns]
        else:
            value, low, high = (rows[share.bucket, "task"][name] for name in columns)
            assert numbers == pytest.approx([1 - value, 1 - high, 1 - low], rel=1e-12)


@pytest.mark.long
def test_tables_of_figures_have_the_numbers_of_the_lines() -> None:
    rows = make_rows(BEFORE, AFTER)
    signal, share = gradients.make_signal_lines(rows), gradients.make_share_lines(rows)
    bucket_rows = [row for row in AFTER.make_line()["rows"] if row["bucket"] != "all"]
    expected_rows = [row for row in bucket_rows if row["component"] == "task"]
    postfilter_signal = signal[~signal["prefilter"]]
    for column, name in (("reward_std", "reward_std_mean"), ("value", "snr"), ("low", "snr_low"), ("high", "snr_high")):
        assert postfilter_signal[column].to_list() == [row[name] for row in expected_rows]
    expected_rows = [row for row in bucket_rows if row["component"] == "entropy"]
    for column, name in (("value", "signal_share"), ("low", "signal_share_low"), ("high", "signal_share_high")):
        assert share.loc[~share["prefilter"], column].to_list() == [row[name] for row in expected_rows]
    assert gradients.make_share_lines(make_rows(FakeAnalysis(components=("task",)))).empty
    assert gradients.make_share_lines(rows.assign(signal_share=np.nan)).empty  # no fold tells a signal


def test_a_trend_has_spearmans_rho_an_exact_p_and_a_ratio(generator: np.random.Generator) -> None:
    rows = make_rows(BEFORE, AFTER)
    table = gradients.compute_trends(rows, generator)
    assert len(table) == 2 * 2 * 3
    for row in table.itertuples():
        trend_rows = rows[(rows["prefilter"] == row.prefilter) & (rows["component"] == row.component)].iloc[:6]
        if trend_rows[row.measure].nunique() == 1:
            assert math.isnan(row.rho)
            continue
        assert row.rho == pytest.approx(
            stats.spearmanr(trend_rows["reward_std_mean"], trend_rows[row.measure]).statistic, rel=1e-9
        )
        assert row.p * 720 == pytest.approx(round(row.p * 720), rel=1e-9)
    task = table[(table["component"] == "task") & (table["measure"] == "norm")]
    assert task["rho"].to_list() == [1, 1]
    assert task["p"].to_list() == [2 / 720, 2 / 720]
    assert set(table["buckets"]) == {6}
    for buckets, lower, upper in ((6, [0, 1, 2], [3, 4, 5]), (5, [0, 1], [3, 4]), (2, [0], [1])):
        fake_analysis = FakeAnalysis(1, components=("task",), buckets=buckets)
        rows = make_rows(fake_analysis)
        norms = [row["mean_norm"] for row in fake_analysis.make_line()["rows"] if row["component"] == "task"]
        table = gradients.compute_trends(rows, generator, ("mean_norm",))
        expected = np.mean([norms[index] for index in upper]) / np.mean([norms[index] for index in lower])
        assert table.loc[0, "ratio"] == pytest.approx(expected, rel=1e-12)
        assert math.isnan(gradients.compute_trends(rows, generator, ("signal",)).loc[0, "ratio"])
    single_bucket_trends = gradients.compute_trends(make_rows(FakeAnalysis(buckets=1)), generator)
    assert single_bucket_trends[["rho", "p", "ratio"]].isna().all(axis=None)


def test_trends_have_an_interval_over_runs_from_three_on(tmp_path: Path, generator: np.random.Generator) -> None:
    runs = [
        (FakeRun("0", seed, steps=3), [FakeAnalysis(step, prefilter=True, seed=seed) for step in (1, 51)])
        for seed in range(3)
    ]
    all_rows = make_frames(tmp_path, runs).gradients
    summary_of_two, summary_of_three = (
        gradients.summarize_trends(rows, generator, ("norm",)).set_index("component")
        for rows in (all_rows[all_rows["seed"] < 2], all_rows)
    )
    bounds = ["rho_low", "rho_high", "ratio_low", "ratio_high"]
    assert summary_of_two[bounds].isna().all(axis=None)
    assert summary_of_three[bounds].notna().all(axis=None)
    assert summary_of_three.loc["task", ["runs", "analyses", "buckets"]].to_list() == [3, 6, 36]
    assert summary_of_three.loc["task", "ratio_low"] > 1.2
    assert summary_of_three.loc["entropy", "ratio_low"] < 1 < summary_of_three.loc["entropy", "ratio_high"]
    assert (summary_of_three["rho_low"] >= -1).all()
    assert (summary_of_three["rho_high"] <= 1).all()
    assert summary_of_three.loc["task", "p"] < 0.01 < summary_of_three.loc["entropy", "p"]


def test_a_trend_over_runs_is_the_mean_of_their_trends(tmp_path: Path, generator: np.random.Generator) -> None:
    """A run with two steps has the same weight as a run with one."""
    runs = [
        (FakeRun("0", seed, steps=3), [FakeAnalysis(step, prefilter=True, seed=seed) for step in steps])
        for seed, steps in enumerate(([1, 51], [1], [1]))
    ]
    rows = make_frames(tmp_path, runs).gradients
    trends = gradients.compute_trends(rows, generator, ("norm",))
    entropy_rhos = trends[trends["component"] == "entropy"].groupby("run_id")["rho"].mean()
    summary = gradients.summarize_trends(rows, generator, ("norm",)).set_index("component")
    assert summary.loc["entropy", "rho"] == pytest.approx(entropy_rhos.mean(), rel=1e-12)
    half_width = stats.t.ppf(0.975, 2) * entropy_rhos.std(ddof=1) / math.sqrt(3)
    assert summary.loc["entropy", "rho_low"] == pytest.approx(max(entropy_rhos.mean() - half_width, -1), rel=1e-9)
    rows = make_rows(AFTER)
    single, together = (
        compute(rows, generator, ("norm",)) for compute in (gradients.compute_trends, gradients.summarize_trends)
    )
    assert together["p"].to_list() == single["p"].to_list()
    assert together["rho"].to_list() == single["rho"].to_list()

"""Tables of gradient analyses: published keys and values, complete grids, shares, lines, and trends against SciPy."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import gradients
from analysis.frames import StudyFrames
from analysis.load import read_run
from tests.run_folders import MadeAnalysis, MadeRun, MadeStudy, write_analyses, write_study

STUDY = MadeStudy(total_steps=3, test_freq=2, rooms=10)
ALL = ("task", "entropy", "kl")
AFTER = MadeAnalysis(51)
BEFORE = replace(AFTER, prefilter=True)


def frames_of(output: Path, runs: list[tuple[MadeRun, list[MadeAnalysis]]]) -> StudyFrames:
    folder = write_study(output, [run for run, _ in runs], STUDY)
    for run, analyses in runs:
        write_analyses(folder, run, analyses)
    return read_run(folder)


def rows_of(output: Path, *analyses: MadeAnalysis) -> pd.DataFrame:
    return frames_of(output, [(MadeRun("0", steps=3), list(analyses))]).gradients


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


BUCKETS = ("all", "bucket_1", "bucket_2")
PUBLISHED = {
    *(f"grad_norm/{bucket}/{key}" for bucket in BUCKETS for key in (
        "task", "entropy", "kl", "per_sample/task", "per_sample/entropy", "per_sample/kl", "per_token/task",
        "per_token/entropy", "per_token/kl", "loss/policy", "loss/entropy", "loss/kl", "loss/total", "sample_count",
        "sample_pct", "reward_std_mean", "reward_std_min", "reward_std_max", "group_rv_count",
    )),
    "actor/loss/policy", "actor/loss/entropy", "actor/loss/kl", "actor/loss/total",
    "actor/grad_norm/task", "actor/grad_norm/entropy", "actor/grad_norm/kl",
    "grad_analysis/source_env_groups", "grad_analysis/source_group_size", "grad_analysis/source_batch_size",
    "grad_analysis/adjusted_batch_size", "grad_analysis/empty_after_filter", "grad_analysis/uses_training_batch",
}  # fmt: skip


def test_published_keys_are_those_of_the_published_system(tmp_path: Path) -> None:
    made = MadeAnalysis(51, components=ALL, buckets=2)
    assert set(gradients.published_metrics(rows_of(tmp_path, made))) == PUBLISHED


def test_before_the_filter_the_prefix_differs_and_the_actor_is_not_repeated(tmp_path: Path) -> None:
    made = MadeAnalysis(51, components=ALL, buckets=2, prefilter=True)
    expected = {key.replace("grad_norm/", "grad_norm_prefilter/") for key in PUBLISHED if key.startswith("grad_norm/")}
    expected |= {"grad_analysis_prefilter/source_batch_size", "grad_analysis_prefilter/adjusted_batch_size"}
    assert set(gradients.published_metrics(rows_of(tmp_path, made))) == expected


def test_a_component_that_is_off_has_no_published_key(tmp_path: Path) -> None:
    found = gradients.published_metrics(rows_of(tmp_path, AFTER, BEFORE))
    assert not [key for key in found if key.endswith("/kl")]
    assert "grad_norm_prefilter/bucket_6/per_token/entropy" in found
    assert not any(math.isnan(value) for value in found.values())


def test_published_values_are_those_of_the_rows(tmp_path: Path) -> None:
    found = gradients.published_metrics(rows_of(tmp_path, replace(AFTER, components=ALL), BEFORE))
    rows = {(row["bucket"], row["component"]): row for row in replace(AFTER, components=ALL).line()["rows"]}
    assert found["grad_norm/bucket_3/task"] == rows["bucket_3", "task"]["norm"]
    assert found["grad_norm/bucket_3/per_sample/kl"] == rows["bucket_3", "kl"]["norm_per_sample"]
    assert found["grad_norm/bucket_6/per_token/entropy"] == rows["bucket_6", "entropy"]["norm_per_token"]
    assert found["grad_norm/bucket_1/loss/policy"] == rows["bucket_1", "task"]["loss"]
    assert found["grad_norm/bucket_1/loss/total"] == rows["bucket_1", "total"]["loss"]
    assert found["grad_norm/bucket_2/group_rv_count"] == rows["bucket_2", "task"]["group_count"]
    assert found["actor/loss/policy"] == found["grad_norm/all/loss/policy"] == rows["all", "task"]["loss"]
    assert found["actor/grad_norm/kl"] == rows["all", "kl"]["norm"]
    assert found["grad_analysis/source_batch_size"] == found["grad_analysis_prefilter/source_batch_size"] == 24 * 16
    assert (found["grad_analysis/uses_training_batch"], found["grad_analysis/empty_after_filter"]) == (0, 0)


def test_the_value_loss_has_no_published_key_and_is_in_the_total(tmp_path: Path) -> None:
    made = MadeAnalysis(1, components=("task", "value"), buckets=1)
    found = gradients.published_metrics(rows_of(tmp_path, made))
    assert not [key for key in found if key.endswith("value")]
    (total,) = (row["loss"] for row in made.line()["rows"] if (row["bucket"], row["component"]) == ("all", "total"))
    assert found["actor/loss/total"] == total
    assert found["actor/loss/total"] != found["actor/loss/policy"]


def test_rows_of_two_steps_are_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, MadeAnalysis(1), AFTER)
    with pytest.raises(ValueError, match=r"These rows are of 2 analyses .*step 1.*step 51.*: take those of one"):
        gradients.published_metrics(rows)
    with pytest.raises(ValueError, match="of 2 analyses"):
        gradients.bucket_table(rows)


def test_every_analysis_is_listed(tmp_path: Path) -> None:
    table = gradients.analyses(rows_of(tmp_path, BEFORE, AFTER, MadeAnalysis(51, "probe", components=ALL, buckets=3)))
    names = ["source", "step", "prefilter", "groups", "sequences", "buckets", "components"]
    assert table[names].to_numpy().tolist() == [
        ["train", 51, False, 24, 384, 6, "task, entropy"],
        ["train", 51, True, 24, 384, 6, "task, entropy"],
        ["probe", 51, False, 12, 192, 3, "task, entropy, kl"],
    ]
    assert gradients.analyses(table_without_buckets(tmp_path)).empty


def table_without_buckets(tmp_path: Path) -> pd.DataFrame:
    return rows_of(tmp_path / "whole", AFTER)[lambda rows: rows["bucket"] == "all"]


def test_the_grid_of_buckets_is_complete_and_says_what_is_off(tmp_path: Path) -> None:
    table = gradients.bucket_table(rows_of(tmp_path, AFTER))
    assert len(table) == 6 * 4
    assert table["bucket"].drop_duplicates().to_list() == [f"bucket_{number}" for number in range(1, 7)]
    off = table[~table["on"]]
    assert set(off["component"]) == {"kl"}
    assert off[["norm", "norm_per_sample", "norm_per_token", "loss"]].isna().all(axis=None)
    assert table["reward_std_mean"].notna().all()


def test_buckets_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, MadeAnalysis(1, buckets=12), MadeAnalysis(51, buckets=3))
    found = gradients.of_buckets(rows.iloc[::-1])
    assert found.loc[found["step"] == 1, "bucket"].drop_duplicates().to_list() == [f"bucket_{n}" for n in range(1, 13)]
    assert found["step"].is_monotonic_decreasing  # analyses stay where they are
    assert list(found) == list(rows)


@pytest.mark.parametrize(
    ("components", "terms", "summed"),
    [(ALL, "KL + entropy", ["kl", "entropy"]), (("task", "entropy"), "entropy", ["entropy"]), (("task",), "", [])],
)
def test_the_summary_adds_what_is_on(
    tmp_path: Path, components: tuple[str, ...], terms: str, summed: list[str]
) -> None:
    made = MadeAnalysis(51, components=components)
    table = gradients.summary_table(rows_of(tmp_path, made))
    norms = {(row["bucket"], row["component"]): row["norm"] for row in made.line()["rows"]}
    assert table["label"].to_list() == ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
    assert set(table["terms"]) == {terms}
    for row in table.itertuples():
        assert row.task == norms[row.bucket, "task"]
        if summed:
            assert row.regularizer == pytest.approx(sum(norms[row.bucket, name] for name in summed), rel=1e-12)
        else:
            assert math.isnan(row.regularizer)


def test_steps_are_shown_as_trained_on(tmp_path: Path) -> None:
    empty_after = MadeAnalysis(1, prefilter=True)
    rows = rows_of(tmp_path, empty_after, BEFORE, AFTER)
    table = gradients.steps_table(rows, [1, 51])
    assert table["step"].to_list() == [1] * 6 + [51] * 6
    assert table["prefilter"].to_list() == [True] * 6 + [False] * 6
    for made, step in ((empty_after, 1), (AFTER, 51)):
        spread = [row["reward_std_mean"] for row in made.line()["rows"] if row["component"] == "task"][:6]
        assert table.loc[table["step"] == step, "reward_std_mean"].to_list() == spread


def test_trusted_numbers_stand_beside_the_published_norm(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, BEFORE, AFTER)
    table = gradients.trusted(rows)
    assert len(table) == len(rows)
    assert (table["norm"].dropna() > table["mean_norm"][table["norm"].notna()]).all()
    assert table.loc[table["above_noise"], "snr_low"].min() > 0
    assert (~table.loc[~table["above_noise"], "snr_low"].gt(0)).all()
    assert set(table["above_noise"]) == {True, False}
    few = gradients.trusted(rows_of(tmp_path / "few", replace(AFTER, folds=2)))
    assert few["snr_low"].isna().all()
    assert not few["above_noise"].any()


@pytest.mark.parametrize("components", [("task",), ("task", "entropy"), ALL, (*ALL, "value")])
def test_shares_sum_to_one(tmp_path: Path, components: tuple[str, ...]) -> None:
    table = gradients.shares(rows_of(tmp_path, MadeAnalysis(51, components=components)))
    assert table["bucket"].to_list() == [f"bucket_{number}" for number in range(1, 7)]
    parts = table[["task", "regularizer", "value"]].fillna(0).sum(axis=1)
    assert parts.to_numpy() == pytest.approx(np.ones(6), rel=1e-12)
    for name in ("entropy", "kl", "value"):
        assert table[name].notna().all() == (name in components)
    assert table["regularizer"].isna().all() == (components == ("task",))


def test_lines_of_one_arm_are_its_steps(tmp_path: Path) -> None:
    steps = [MadeAnalysis(step) for step in range(1, 100, 7)]
    rows = rows_of(tmp_path, *steps, MadeAnalysis(99, "probe"))
    names = gradients.report_lines(rows)["line"].drop_duplicates().to_list()
    assert names == ["step 1", "step 22", "step 43", "step 64", "step 85", "step 99"]
    few = gradients.report_lines(rows_of(tmp_path / "few", MadeAnalysis(1), BEFORE, AFTER))
    assert few["line"].drop_duplicates().to_list() == ["step 1", "step 51"]
    assert len(few) == 3 * 7 * 3


def test_lines_of_several_arms_are_the_last_steps_of_their_runs(tmp_path: Path) -> None:
    runs = [
        (MadeRun("0", steps=3), [MadeAnalysis(1), AFTER, MadeAnalysis(101, "probe")]),
        (MadeRun("0.1", steps=3), [MadeAnalysis(1)]),
    ]
    table = gradients.report_lines(frames_of(tmp_path, runs).gradients)
    assert table[["line", "step", "source"]].drop_duplicates().to_numpy().tolist() == [
        ["0", 51, "train"], ["0.1", 1, "train"],
    ]  # fmt: skip


def test_the_figures_tables_hold_the_lines_numbers(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, BEFORE, AFTER)
    signal, share = gradients.signal_lines(rows), gradients.share_lines(rows)
    written = [row for row in AFTER.line()["rows"] if row["component"] == "task" and row["bucket"] != "all"]
    after = signal[~signal["prefilter"]]
    for column, name in (("spread", "reward_std_mean"), ("value", "snr"), ("low", "snr_low"), ("high", "snr_high")):
        assert after[column].to_list() == [row[name] for row in written]
    written = [row for row in AFTER.line()["rows"] if row["component"] == "entropy" and row["bucket"] != "all"]
    assert share.loc[~share["prefilter"], "value"].to_list() == [row["share"] for row in written]
    assert share["low"].isna().all()
    assert gradients.share_lines(rows_of(tmp_path / "task", MadeAnalysis(components=("task",)))).empty


def test_some_of_keeps_the_ends() -> None:
    assert gradients.some_of([1, 51, 101], 3) == [1, 51, 101]
    assert gradients.some_of(list(range(1, 102)), 3) == [1, 51, 101]
    assert gradients.some_of([1, 2], 3) == [1, 2]
    assert gradients.some_of([], 3) == []


def test_a_trend_is_spearmans_with_an_exact_p(tmp_path: Path, generator: np.random.Generator) -> None:
    rows = rows_of(tmp_path, BEFORE, AFTER)
    table = gradients.trends(rows, generator)
    assert len(table) == 2 * 2 * 3
    for row in table.itertuples():
        own = rows[(rows["prefilter"] == row.prefilter) & (rows["component"] == row.component)].iloc[:6]
        if own[row.measure].nunique() == 1:
            assert math.isnan(row.rho)
            continue
        assert row.rho == pytest.approx(stats.spearmanr(own["reward_std_mean"], own[row.measure]).statistic, rel=1e-9)
        assert row.p * 720 == pytest.approx(round(row.p * 720), rel=1e-9)
    task = table[(table["component"] == "task") & (table["measure"] == "norm")]
    assert task["rho"].to_list() == [1, 1]
    assert task["p"].to_list() == [2 / 720, 2 / 720]
    assert set(table["buckets"]) == {6}


def test_the_ratio_is_of_the_upper_to_the_lower_half(tmp_path: Path, generator: np.random.Generator) -> None:
    for buckets, lower, upper in ((6, [0, 1, 2], [3, 4, 5]), (5, [0, 1], [3, 4]), (2, [0], [1])):
        made = MadeAnalysis(1, components=("task",), buckets=buckets)
        rows = rows_of(tmp_path / str(buckets), made)
        norms = [row["mean_norm"] for row in made.line()["rows"] if row["component"] == "task"]
        table = gradients.trends(rows, generator, ("mean_norm",))
        expected = np.mean([norms[index] for index in upper]) / np.mean([norms[index] for index in lower])
        assert table.loc[0, "ratio"] == pytest.approx(expected, rel=1e-12)
        assert math.isnan(gradients.trends(rows, generator, ("signal",)).loc[0, "ratio"])
    alone = gradients.trends(rows_of(tmp_path / "one", MadeAnalysis(buckets=1)), generator)
    assert alone[["rho", "p", "ratio"]].isna().all(axis=None)


def test_trends_have_an_interval_over_runs_from_three_on(tmp_path: Path, generator: np.random.Generator) -> None:
    def summary(seeds: int) -> pd.DataFrame:
        runs = [
            (MadeRun("0", seed, steps=3), [MadeAnalysis(step, prefilter=True, seed=seed) for step in (1, 51)])
            for seed in range(seeds)
        ]
        rows = frames_of(tmp_path / str(seeds), runs).gradients
        return gradients.trend_summary(rows, generator, ("norm",)).set_index("component")

    two, three = summary(2), summary(3)
    bounds = ["rho_low", "rho_high", "ratio_low", "ratio_high"]
    assert two[bounds].isna().all(axis=None)
    assert three[bounds].notna().all(axis=None)
    assert three.loc["task", ["runs", "analyses", "buckets"]].to_list() == [3, 6, 36]
    assert three.loc["task", "ratio_low"] > 1.2
    assert three.loc["entropy", "ratio_low"] < 1 < three.loc["entropy", "ratio_high"]
    assert (three["rho_low"] >= -1).all()
    assert (three["rho_high"] <= 1).all()
    assert three.loc["task", "p"] < 0.01 < three.loc["entropy", "p"]


def test_a_trend_over_runs_is_the_mean_of_theirs(tmp_path: Path, generator: np.random.Generator) -> None:
    """A run with two steps counts no more than one with one."""
    runs = [
        (MadeRun("0", seed, steps=3), [MadeAnalysis(step, prefilter=True, seed=seed) for step in steps])
        for seed, steps in enumerate(([1, 51], [1], [1]))
    ]
    rows = frames_of(tmp_path, runs).gradients
    single = gradients.trends(rows, generator, ("norm",))
    entropy = single[single["component"] == "entropy"].groupby("run_id")["rho"].mean()
    summary = gradients.trend_summary(rows, generator, ("norm",)).set_index("component")
    assert summary.loc["entropy", "rho"] == pytest.approx(entropy.mean(), rel=1e-12)
    half = stats.t.ppf(0.975, 2) * entropy.std(ddof=1) / math.sqrt(3)
    assert summary.loc["entropy", "rho_low"] == pytest.approx(max(entropy.mean() - half, -1), rel=1e-9)


def test_one_analysis_has_the_same_p_alone_and_together(tmp_path: Path, generator: np.random.Generator) -> None:
    rows = rows_of(tmp_path, AFTER)
    single, together = (of(rows, generator, ("norm",)) for of in (gradients.trends, gradients.trend_summary))
    assert together["p"].to_list() == single["p"].to_list()
    assert together["rho"].to_list() == single["rho"].to_list()


def test_no_analysis_gives_empty_tables(tmp_path: Path, generator: np.random.Generator) -> None:
    nothing = rows_of(tmp_path)
    of_all = (gradients.analyses, gradients.trusted, gradients.shares, gradients.signal_lines, gradients.share_lines)
    for table_of in of_all:
        assert table_of(nothing).empty
    assert gradients.trends(nothing, generator).empty
    assert gradients.trend_summary(nothing, generator).empty

"""Tests of the comparison of arms: what is scored, how large the differences are, and the words of the verdicts."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from analysis.data.compare import collect_level_outcomes, describe_basis, find_last_points
from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.stats.estimates import Trend, difference_over_levels, holm_adjust
from analysis.stats.power import find_detectable_difference
from analysis.sweep import findings, tables, verdicts
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_lines import read_lines, write_lines

LOW_SUCCESS = ("low_validation_success", 0.002, 0.01)
ONE_RUN = "over the levels of this one run; says nothing about other seeds"


def make_collapsed_run(arm: str, seed: int = 0, steps: int = 45) -> FakeRun:
    return FakeRun(
        arm, seed, status="early_stopped", steps=steps, success=(0.35, 0.0), greedy=(0.6, 0.0), stop=LOW_SUCCESS
    )


def make_frames(folder: Path, *runs: FakeRun, **changes: object) -> StudyFrames:
    study = FakeStudy(**{"levels": 120, **changes})  # type: ignore[arg-type]
    return read_study(write_study(folder, runs, study))


def get_row(frames: StudyFrames | pd.DataFrame, arm: str) -> pd.Series:
    summary = frames if isinstance(frames, pd.DataFrame) else tables.summarize_arms(frames)
    return summary.set_index("arm").loc[arm]


@pytest.fixture(scope="module")
def six_arm_frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """Six arms of one seed. The fifth is stopped by a rule."""
    ends = {"0": 0.6, "0.01": 0.61, "0.03": 0.6, "0.1": 0.58, "1": 0.30}
    runs = [FakeRun(arm, success=(0.35, end)) for arm, end in ends.items()]
    runs.insert(4, make_collapsed_run("0.3"))
    return make_frames(tmp_path_factory.mktemp("six"), *runs, levels=400)


@pytest.fixture(scope="module")
def summary(six_arm_frames: StudyFrames) -> pd.DataFrame:
    return tables.summarize_arms(six_arm_frames)


@pytest.fixture(scope="module")
def three_seed_frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """Three seeds of four arms. One run of arm 1 is stopped, and one of nofilter failed."""
    runs = [FakeRun("0", seed) for seed in range(3)]
    runs += [FakeRun("0.1", seed, success=(0.35, 0.9)) for seed in range(3)]
    runs += [FakeRun("1", 0, success=(0.35, 0.4)), make_collapsed_run("1", 1), FakeRun("1", 2, success=(0.35, 0.4))]
    runs += [FakeRun("nofilter", 0), FakeRun("nofilter", 1)]
    runs += [FakeRun("nofilter", 2, status="failed", steps=12, reason="RuntimeError: no memory")]
    return make_frames(tmp_path_factory.mktemp("seeded"), *runs)


def test_there_is_one_row_per_arm_in_the_order_of_the_study(summary: pd.DataFrame) -> None:
    assert summary["arm"].to_list() == ["0", "0.01", "0.03", "0.1", "0.3", "1"]
    assert summary["is_baseline"].to_list() == [True] + [False] * 5
    assert summary["early_stopped"].to_list() == [0, 0, 0, 0, 1, 0]


def test_one_seed_is_compared_over_levels_at_the_last_validation(
    six_arm_frames: StudyFrames, summary: pd.DataFrame
) -> None:
    levels = six_arm_frames.levels[
        (six_arm_frames.levels["split"] == "val")
        & (six_arm_frames.levels["mode"] == "sampled")
        & (six_arm_frames.levels["step"] == 60)
    ]
    wide = levels.pivot_table(index="level", columns="arm", values="success", aggfunc="first").astype(float)
    clusters = levels.drop_duplicates("level").set_index("level")["cluster"].loc[wide.index]
    expected = difference_over_levels(wide["1"] - wide["0"], clusters)
    row = get_row(summary, "1")
    assert (row["difference"], row["difference_low"], row["difference_high"]) == pytest.approx(expected[:3])
    assert row["difference"] == pytest.approx(row["final_val_success"] - get_row(summary, "0")["final_val_success"])
    assert (row["basis"], row["paired_seeds"]) == (ONE_RUN, 1)


def test_p_values_and_power_count_all_compared_arms(summary: pd.DataFrame) -> None:
    compared = summary[~summary["is_baseline"]]
    assert compared["p_holm"].to_list() == pytest.approx(holm_adjust(compared["p"]))
    assert (compared["p_holm"] > compared["p"]).sum() >= 3
    expected = [find_detectable_difference(row.se, row.df, 5) for row in compared.itertuples()]
    assert compared["detectable"].to_list() == pytest.approx(expected)


def test_the_last_validation_of_a_stopped_run_is_what_counts(
    six_arm_frames: StudyFrames, summary: pd.DataFrame
) -> None:
    row = get_row(summary, "0.3")
    trial = six_arm_frames.trials.set_index("arm").loc["0.3"]
    assert row["final_val_success"] == trial["final_val_success"]
    assert row["difference"] < -0.5
    assert row["final_stopped_as_zero"] == 0
    assert math.isnan(row["final_survivors"])
    assert (row["stopped_fraction"], row["stopped_high"]) == (1.0, 1.0)
    assert row["outcome"] == "failed regime"


def test_area_of_a_stopped_run_carries_its_last_value(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    row = get_row(summary, "0.3")
    steps = six_arm_frames.steps[(six_arm_frames.steps["arm"] == "0.3") & six_arm_frames.steps["val_success"].notna()]
    x = [0, *steps["step"], 60]
    y = [row["base_val_success"], *steps["val_success"], steps["val_success"].iloc[-1]]
    assert row["auc"] == pytest.approx(np.trapezoid(y, x) / 60)
    assert row["auc_difference"] == pytest.approx(row["auc"] - get_row(summary, "0")["auc"])


def test_gain_is_over_the_levels_of_the_run_itself(summary: pd.DataFrame) -> None:
    row = get_row(summary, "0")
    assert row["gain"] == pytest.approx(row["final_val_success"] - row["base_val_success"])
    assert row["gain_greedy"] == pytest.approx(row["final_val_greedy_success"] - row["base_val_greedy_success"])
    assert row["gain_low"] < row["gain"] < row["gain_high"]


def test_gain_over_three_seeds_is_over_seeds(three_seed_frames: StudyFrames) -> None:
    runs = three_seed_frames.trials[three_seed_frames.trials["arm"] == "0.1"]
    row = get_row(three_seed_frames, "0.1")
    assert row["gain"] == pytest.approx((runs["final_val_success"] - runs["base_val_success"]).mean())
    greedy = runs["final_val_greedy_success"] - runs["base_val_greedy_success"]
    interval = scipy_stats.ttest_1samp(greedy, 0).confidence_interval(0.95)
    assert (row["gain_greedy_low"], row["gain_greedy_high"]) == pytest.approx((interval.low, interval.high))


def test_costs_are_means_over_runs(summary: pd.DataFrame) -> None:
    row = get_row(summary, "0")
    assert (row["total_env_steps"], row["total_sampled_tokens"], row["kept_ratio"]) == (54_000, 300_000, 1.0)
    assert get_row(summary, "0.3")["kept_ratio"] < 1


def test_three_seeds_are_compared_over_seeds(three_seed_frames: StudyFrames) -> None:
    final = three_seed_frames.trials.pivot_table(index="seed", columns="arm", values="final_val_success")
    expected = scipy_stats.ttest_rel(final["0.1"], final["0"])
    row = get_row(three_seed_frames, "0.1")
    assert row["difference"] == pytest.approx((final["0.1"] - final["0"]).mean())
    assert row["difference_low"] == pytest.approx(expected.confidence_interval(0.95).low)
    assert row["p"] == pytest.approx(expected.pvalue)
    assert (row["basis"], row["paired_seeds"], row["improvement"]) == ("over 3 seeds", 3, 1.0)


def test_a_failed_run_is_named_and_not_scored(three_seed_frames: StudyFrames) -> None:
    row = get_row(three_seed_frames, "nofilter")
    assert (row["runs"], row["completed"], row["failed"], row["paired_seeds"]) == (3, 2, 1, 2)
    assert row["basis"] == "over the levels of these 2 runs; says nothing about other seeds"
    assert row["verdict"].endswith("not scored: seed 2 failed after 12 of 60 steps (RuntimeError: no memory)")
    scored = three_seed_frames.trials[
        (three_seed_frames.trials["arm"] == "nofilter") & (three_seed_frames.trials["status"] == "completed")
    ]
    assert row["final_val_success"] == pytest.approx(scored["final_val_success"].mean())


def test_stops_have_their_own_rate(three_seed_frames: StudyFrames) -> None:
    row = get_row(three_seed_frames, "1")
    assert row["stopped_fraction"] == pytest.approx(1 / 3)
    assert row["final_stopped_as_zero"] < row["final_val_success"] < row["final_survivors"]
    assert row["verdict"].startswith(
        "failed regime in 1 of 3 runs: low_validation_success stopped 1 of 3 runs (step 45: 0.002 < 0.01); "
    )


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        (0, ""),
        (1, ONE_RUN),
        (2, "over the levels of these 2 runs; says nothing about other seeds"),
        (3, "over 3 seeds"),
    ],
)
def test_the_basis_claims_no_more_than_the_seeds_support(seeds: int, words: str) -> None:
    assert describe_basis(seeds) == words


def test_levels_after_the_last_step_do_not_count(tmp_path: Path) -> None:
    run = FakeRun("0")
    folder = write_study(tmp_path, [run], FakeStudy(levels=10))
    path = folder / "runs" / run.run_id / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:57]))
    frames = read_study(folder)
    assert [point.step for point in find_last_points(collect_level_outcomes(frames, frames.trials)).values()] == [55]


def test_episodes_of_one_level_are_averaged(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, FakeRun("0"), levels=4)
    doubled = pd.concat([frames.levels, frames.levels.assign(success=~frames.levels["success"])], ignore_index=True)
    outcomes = collect_level_outcomes(StudyFrames(frames.trials, frames.steps, doubled, frames.study), frames.trials)
    assert all((rows["success"] == 0.5).all() and len(rows) == 4 for rows in outcomes.values())


def test_without_levels_there_is_a_value_and_no_interval(tmp_path: Path) -> None:
    runs = [FakeRun("0"), FakeRun("0.1")]
    folder = write_study(tmp_path, runs, FakeStudy(levels=10))
    for run in runs:
        (folder / "runs" / run.run_id / "levels.jsonl").unlink()
    row = get_row(read_study(folder), "0.1")
    assert not math.isnan(row["difference"])
    assert not math.isnan(row["gain"])
    assert math.isnan(row["difference_low"])
    assert row["verdict"].startswith("no interval: ")


def test_a_run_stopped_before_its_first_validation_has_the_success_of_the_base_policy(tmp_path: Path) -> None:
    stopped_run = FakeRun("0.1", status="early_stopped", steps=3, stop=("empty_filtered_steps", 3, 3))
    folder = write_study(tmp_path, [FakeRun("0"), stopped_run], FakeStudy(levels=40))
    path = folder / "runs" / stopped_run.run_id
    # The fake validates at its last step: without that row, the stop is told by the one before.
    first, second, third = read_lines(path / "metrics.jsonl").records
    stop_columns = {name: value for name, value in third.items() if name.startswith("stop_")}
    write_lines(path / "metrics.jsonl", [first, {**second, **stop_columns}])
    row = get_row(read_study(folder), "0.1")
    assert row["final_val_success"] == row["base_val_success"]
    assert row["gain"] == 0


# Verdicts: one sentence for each case.


@pytest.mark.parametrize(
    ("rule", "value", "threshold", "sentence"),
    [
        ("low_validation_success", 0.002, 0.01, "step 45: 0.002 < 0.01"),
        ("reward_variance_collapse", 0.1234, 0.35, "step 45: 0.123 < 0.35"),
        ("empty_filtered_steps", 5, 5, "step 45: 5 ≥ 5"),
    ],
)
def test_verdict_of_a_stopped_arm(tmp_path: Path, rule: str, value: float, threshold: float, sentence: str) -> None:
    stopped_run = FakeRun("0.1", status="early_stopped", steps=45, stop=(rule, value, threshold))
    row = get_row(make_frames(tmp_path, FakeRun("0"), stopped_run), "0.1")
    assert row["verdict"] == f"failed regime: {rule} stopped 1 of 1 runs ({sentence})"


def test_verdicts_of_two_rules_in_one_arm(tmp_path: Path) -> None:
    other_run = FakeRun("0.1", 1, status="early_stopped", steps=30, stop=("empty_filtered_steps", 5, 5))
    frames = make_frames(tmp_path, FakeRun("0"), make_collapsed_run("0.1"), other_run, make_collapsed_run("0.1", 2, 50))
    assert get_row(frames, "0.1")["verdict"] == (
        "failed regime: low_validation_success stopped 2 of 3 runs (step 45: 0.002 < 0.01; step 50: 0.002 < 0.01) "
        "and empty_filtered_steps stopped 1 of 3 runs (step 30: 5 ≥ 5)"
    )


@pytest.mark.parametrize(
    ("seeds", "difference", "p_holm", "word"),
    [
        (3, 0.1, 0.049, "better"),
        (5, -0.1, 0.049, "worse"),
        (3, 0.1, 0.051, "no clear difference"),
        (3, 0.1, float("nan"), "no comparison"),
        (1, 0.1, 0.049, "ended higher"),
        (2, -0.1, 0.001, "ended lower"),
        (2, 0.1, 0.051, "no clear difference"),
    ],
)
def test_the_outcome_follows_the_adjusted_p_and_the_seeds(
    seeds: int, difference: float, p_holm: float, word: str
) -> None:
    row = {"completed": seeds, "early_stopped": 0, "is_baseline": False, "difference": difference, "p_holm": p_holm}
    assert verdicts.classify_outcome({**row, "paired_seeds": seeds}) == word


def test_a_verdict_of_one_run_is_about_the_run_and_not_its_setting(summary: pd.DataFrame, tmp_path: Path) -> None:
    row = get_row(summary, "1")
    interval_text = f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}]"
    expected_verdict = f"this run ended lower than the baseline (0): {interval_text}, Holm p < 0.001 ({ONE_RUN})"
    assert row["verdict"] == expected_verdict.replace("-", "−")
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm, end in (("0", 0.35), ("0.1", 0.9)) for seed in (0, 1)]
    higher_row = get_row(make_frames(tmp_path, *runs, levels=300), "0.1")
    assert higher_row["verdict"].startswith("these 2 runs ended higher than the baseline (0): +0.")


def test_with_three_seeds_the_verdict_is_about_the_setting(tmp_path: Path) -> None:
    arms = (("0", 0.35), ("0.1", 0.9), ("1", 0.02))
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm, end in arms for seed in range(3)]
    summary = tables.summarize_arms(make_frames(tmp_path, *runs, levels=300))
    assert get_row(summary, "0.1")["verdict"].startswith("better than the baseline (0): +0.")
    assert get_row(summary, "1")["verdict"].startswith("worse than the baseline (0): −0.")
    assert findings.format_headline(summary) == (
        "3 arms, baseline 0. Compared over 3 seeds. Better than the baseline: arm 0.1. Worse than the baseline: arm 1."
    )


def test_the_headline_of_one_seed_says_what_the_runs_did(summary: pd.DataFrame) -> None:
    headline = findings.format_headline(summary)
    assert (
        "Compared over validation levels, with 1 run per arm: the result describes these runs, and another seed"
        in headline
    )
    assert "Ended lower than the baseline: " in headline
    assert "orse than" not in headline
    assert "etter than" not in headline
    assert not any(word in verdict for verdict in summary["verdict"] for word in ("worse than", "better than"))


def test_verdict_without_a_clear_difference_says_what_would_have_been_missed(summary: pd.DataFrame) -> None:
    row = get_row(summary, "0.03")
    assert row["outcome"] == "no clear difference"
    assert row["verdict"].startswith("no clear difference between this run and the baseline (0): ")
    assert (
        f"; differences smaller than about {row['detectable']:.3f} would probably be missed ({ONE_RUN})"
        in row["verdict"]
    )
    assert row["detectable"] > (row["difference_high"] - row["difference_low"]) / 2


def test_a_hopeless_comparison_says_so(summary: pd.DataFrame) -> None:
    row = {**get_row(summary, "0.03"), "arm": "0.03", "detectable": 1.7}
    assert "; any difference would probably be missed (" in verdicts.format_verdict(row)


def test_an_interval_of_a_share_stays_within_its_bounds(three_seed_frames: StudyFrames) -> None:
    row = get_row(three_seed_frames, "1")
    assert (row["final_low"], row["final_high"]) == (0.0, pytest.approx(row["final_high"]))
    assert row["final_high"] <= 1


def test_verdict_of_the_baseline(summary: pd.DataFrame) -> None:
    row = get_row(summary, "0")
    assert row["verdict"] == (
        f"baseline: {row['final_val_success']:.3f} at the end, {row['gain']:+.3f} [{row['gain_low']:+.3f}, "
        f"{row['gain_high']:+.3f}] from the policy before training ({ONE_RUN})"
    )


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (FakeRun("0.1", status="failed", steps=0, reason="ValueError: x"), "seed 0 failed after 0 of 60 steps"),
        (
            FakeRun("0.1", status="interrupted", steps=20, reason="stopped by the user"),
            "seed 0 interrupted after 20 of",
        ),
        (FakeRun("0.1", status="", steps=0), "seed 0 never ran (no training step was recorded)"),
    ],
)
def test_verdict_of_an_arm_without_a_scored_run(tmp_path: Path, run: FakeRun, sentence: str) -> None:
    row = get_row(make_frames(tmp_path, FakeRun("0"), run), "0.1")
    assert row["verdict"].startswith(f"no verdict: {sentence}")
    assert row["outcome"] == "no verdict"
    assert math.isnan(row["final_val_success"])


def test_verdict_without_a_scored_baseline(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, FakeRun("0", status="failed", steps=3, reason="x"), FakeRun("0.1"))
    row = get_row(frames, "0.1")
    assert row["verdict"] == "no comparison: the baseline (0) and this arm have no scored runs with a common seed"


def test_verdict_against_a_failed_baseline(tmp_path: Path) -> None:
    row = get_row(make_frames(tmp_path, make_collapsed_run("0"), FakeRun("0.1"), levels=200), "0.1")
    assert row["verdict"].startswith("this run ended higher than the baseline (0), itself a failed regime: +0.")


def test_no_run_at_all(tmp_path: Path) -> None:
    frames = make_frames(tmp_path)
    assert tables.summarize_arms(frames).empty
    assert tables.make_dose_response(frames).empty
    assert tables.make_run_outcomes(frames).empty
    assert math.isnan(tables.compute_trend(frames, np.random.default_rng(0))[0].rho)


def test_several_studies_are_refused(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    frames_of_two = StudyFrames(
        six_arm_frames.trials,
        six_arm_frames.steps,
        six_arm_frames.levels,
        [*six_arm_frames.studies, *six_arm_frames.studies],
    )
    with pytest.raises(
        ValueError, match=r"These frames contain 2 studies \(.*\)\. Select one: frames\.select_study\(NAME\)"
    ):
        tables.summarize_arms(frames_of_two)


# The axis.


def compute_positions(folder: Path, *values: str) -> tuple[list[float], str]:
    frames = make_frames(
        folder, *(FakeRun(value, status="", steps=0) for value in values), values=values, setting="actor.entropy_coeff"
    )
    names, positions, scale = tables.compute_axis_positions(frames)
    assert names == list(values)
    return positions, scale


def test_positions_are_logarithmic_with_zero_and_words_apart(tmp_path: Path) -> None:
    positions, scale = compute_positions(tmp_path, "0", "0.01", "0.1", "1", "nofilter")
    assert scale == "log"
    assert positions == pytest.approx([-3, -2, -1, 0, 1])


def test_positions_of_negative_values_are_to_the_left(tmp_path: Path) -> None:
    positions, _ = compute_positions(tmp_path, "-0.1", "0", "0.01", "0.1")
    assert positions == pytest.approx([-4, -3, -2, -1])


def test_positions_are_ranks_where_a_log_scale_would_merge_them(tmp_path: Path) -> None:
    positions, scale = compute_positions(tmp_path, "1.0", "0.98", "0.4", "nofilter")
    assert scale == "rank"
    assert positions == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [(("0",), [-1.0]), (("0.1",), [0.0]), (("nofilter",), [1.0]), (("0", "nofilter"), [-1.0, 1.0])],
)
def test_positions_of_few_arms(tmp_path: Path, values: tuple[str, ...], expected: list[float]) -> None:
    assert compute_positions(tmp_path, *values)[0] == pytest.approx(expected)


def test_dose_response_has_the_numbers_of_the_figure(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    table = tables.make_dose_response(six_arm_frames)
    assert table["success"].to_list() == summary["final_val_success"].to_list()
    assert table[["low", "high"]].to_numpy().tolist() == summary[["final_low", "final_high"]].to_numpy().tolist()
    assert table["base"].nunique() == 1
    assert table["early_stopped"].to_list() == [0, 0, 0, 0, 1, 0]
    assert (table["low"] < table["success"]).all()
    outcomes = tables.make_run_outcomes(six_arm_frames)
    assert outcomes["x"].to_list() == table["x"].to_list()


def test_trend_leaves_words_out_and_pairs_seeds(three_seed_frames: StudyFrames) -> None:
    trend, page_p = tables.compute_trend(three_seed_frames, np.random.default_rng(0))
    assert trend.n == 9
    table = three_seed_frames.trials[three_seed_frames.trials["arm"] != "nofilter"].pivot_table(
        index="seed", columns="axis_value", values="final_val_success"
    )
    one_sided = [scipy_stats.page_trend_test(values).pvalue for values in (table, table.to_numpy()[:, ::-1])]
    assert page_p == pytest.approx(min(1, 2 * min(one_sided)))


def test_trend_of_one_seed_has_no_page_test(six_arm_frames: StudyFrames) -> None:
    trend, page_p = tables.compute_trend(six_arm_frames, np.random.default_rng(0))
    assert (trend.n, math.isnan(page_p)) == (6, True)
    assert trend.rho < 0


def test_numbers_are_written_with_a_true_minus() -> None:
    assert verdicts.format_signed(-0.1234) == "−0.123"
    assert verdicts.format_interval(-0.1, 0.2) == "[−0.100, +0.200]"
    assert verdicts.format_interval(float("nan"), 0.2) == ""
    assert verdicts.format_fraction(float("nan")) == "–"
    assert (verdicts.format_p_value(0.0004), verdicts.format_p_value(0.0123)) == ("p < 0.001", "p 0.012")


def test_a_trend_has_its_direction_only_where_it_is_clear() -> None:
    clear, unclear = Trend(-0.83, 0.012, 6), Trend(0.5, 0.31, 6)
    assert findings.describe_trend(clear, float("nan"), "actor.kl_loss_coef").startswith(
        "Success tends to fall as actor.kl_loss_coef grows (rank correlation −0.83, p 0.012 over 6 runs)."
    )
    assert findings.describe_trend(unclear, 0.4).startswith(
        "Success has no clear trend over the axis (rank correlation +0.50, p 0.31 over 6 runs). Page's test over the "
        "paired seeds: p 0.4."
    )

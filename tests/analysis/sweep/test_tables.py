"""Tests of the comparison of arms: what is scored, how large the differences are, and the words of the verdicts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from analysis.data import compare
from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.report.pages import list_open_arms
from analysis.stats.estimates import Estimate, holm_adjust
from analysis.stats.noise import estimate_pooled_mean, fit_noise
from analysis.sweep import findings, planned_power, tables, verdicts
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.planned_power import compute_resolved_ratio
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_lines import read_lines, write_lines

LOW_SUCCESS = ("low_validation_success", 0.002, 0.01)
RECORDED = tuple(np.random.default_rng(0).normal(0.6, 0.015, 20))
ONE_SEED = "over one seed, with the noise of 20 recorded runs"
NO_INTERVAL = "no interval, because one run says nothing about a setting"


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
    """Of a study whose baseline has recorded replicates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compare, "find_recorded_values", lambda study, column: RECORDED if column == "late_val_success" else ()
        )
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


@pytest.fixture(scope="module")
def three_seed_summary(three_seed_frames: StudyFrames) -> pd.DataFrame:
    return tables.summarize_arms(three_seed_frames)


def test_one_seed_has_the_noise_of_recorded_runs(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    late = six_arm_frames.trials.set_index("arm")["late_val_success"]
    variance = float(np.var(RECORDED, ddof=1))
    levels = compare.estimate_evaluation_variances(six_arm_frames)
    row = get_row(summary, "1")
    assert row["difference"] == pytest.approx(late["1"] - late["0"])
    assert row["se"] == pytest.approx(math.sqrt(2 * max(variance, (levels["0"] + levels["1"]) / 2)))
    assert (row["df"], row["basis"], row["seeds"]) == (19, ONE_SEED, 1)
    # There is an interval, and no word: one run says nothing of a setting.
    assert row["difference_high"] < 0
    assert math.isnan(row["p_holm"])
    assert row["outcome"] == "open"
    assert row["notes"] == "one seed is too few for a verdict"
    caveats = findings.list_caveats(six_arm_frames, summary)
    assert caveats[0].startswith("1 seed: the noise is estimated from recorded runs of a similar arm.")
    assert not any("from all arms together" in caveat for caveat in caveats)


def test_one_seed_without_recorded_runs_has_numbers_and_no_interval(six_arm_frames: StudyFrames) -> None:
    summary = tables.summarize_arms(six_arm_frames)
    row = get_row(summary, "1")
    assert row["difference"] < -0.2
    assert math.isnan(row["difference_low"])
    assert (row["outcome"], row["basis"]) == ("open", "")
    assert row["notes"] == NO_INTERVAL
    assert "nothing shows how much runs of one setting differ" in findings.list_caveats(six_arm_frames, summary)[0]


@pytest.mark.parametrize("missed", range(4))
def test_the_last_validation_of_a_stopped_run_stands_for_those_that_it_missed(tmp_path: Path, missed: int) -> None:
    run = FakeRun("0", status="early_stopped", steps=60 - 5 * missed, stop=LOW_SUCCESS)
    frames = make_frames(tmp_path, run)
    levels = frames.levels[(frames.levels["split"] == "val") & (frames.levels["mode"] == "sampled")]
    wide = levels.pivot_table(index="level", columns="step", values="success", aggfunc="first").astype(float)
    late_steps = [min(step, run.steps) for step in (45, 50, 55, 60)]
    weights = np.array([late_steps.count(step) / 4 for step in sorted(set(late_steps))])
    late = wide[sorted(set(late_steps))].to_numpy()
    assert frames.trials["late_val_success"].iloc[0] == pytest.approx(float((late.mean(axis=0) * weights).sum()))
    # With a single validation, the variance is that of new levels.
    variances = late.var(axis=1, ddof=1) if late.shape[1] > 1 else np.full(120, late.mean() * (1 - late.mean()))
    expected = (weights**2).sum() * variances.sum() / 120**2
    assert compare.estimate_evaluation_variances(frames) == {"0": pytest.approx(expected)}


def test_p_values_count_all_compared_arms_and_all_secondary_outcomes(
    three_seed_frames: StudyFrames, three_seed_summary: pd.DataFrame
) -> None:
    compared = three_seed_summary[~three_seed_summary["is_baseline"]]
    assert compared["p_holm"].to_list() == pytest.approx(holm_adjust(compared["p"]), nan_ok=True)
    assert compared["p"].notna().to_list() == [True, True, False]  # the last one has two runs left
    assert (compared["p_holm"] > compared["p"]).any()
    (family,) = three_seed_frames.families
    table = tables.compare_outcomes(three_seed_frames, family.secondary_columns).dropna(subset="difference")
    columns = ["mean_val_success", "final_val_greedy_success"]
    assert set(columns) <= set(table["column"])
    assert table["arm"].to_list()[:3] == ["0.1", "1", "nofilter"]
    assert table["p_holm"].to_list() == pytest.approx(holm_adjust(table["p"]), nan_ok=True)
    mean = three_seed_frames.trials.pivot_table(index="seed", columns="arm", values="mean_val_success")
    assert table["difference"].iloc[0] == pytest.approx((mean["0.1"] - mean["0"]).mean())


@pytest.mark.parametrize("recorded", [(), RECORDED])
def test_what_a_report_calls_resolvable_is_what_the_plan_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: tuple[float, ...]
) -> None:
    monkeypatch.setattr(planned_power, "find_recorded_values", lambda study, column: recorded)
    runs = [FakeRun(arm, seed) for arm in ("0", "0.1", "1") for seed in range(4)]
    frames = make_frames(tmp_path, *runs)
    pool = compare.collect_outcomes(frames, "late_val_success").noise.paired
    deviation = np.std(recorded, ddof=1) if recorded else math.sqrt(pool.variance)
    row = get_row(frames, "1")
    assert row["detectable"] == pytest.approx(deviation * compute_resolved_ratio(3, 4))
    if recorded:
        assert row["detectable"] == planned_power.find_resolved_difference(frames.studies[0], 4)


def test_the_last_validation_of_a_stopped_run_carries_on(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    row = get_row(summary, "0.3")
    trial = six_arm_frames.trials.set_index("arm").loc["0.3"]
    # Validated at step 45 for the last time, it misses those at 50, 55 and 60.
    steps = six_arm_frames.steps[(six_arm_frames.steps["arm"] == "0.3") & six_arm_frames.steps["val_success"].notna()]
    assert row["late_val_success"] == pytest.approx(trial["final_val_success"]) == steps["val_success"].iloc[-1]
    assert row["difference"] < -0.5
    assert row["outcome"] == "stopped"
    x = [0, *steps["step"], 60]
    y = [row["base_val_success"], *steps["val_success"], steps["val_success"].iloc[-1]]
    assert row["mean_val_success"] == pytest.approx(np.trapezoid(y, x) / 60)


def test_gain_is_that_of_the_run_itself(summary: pd.DataFrame) -> None:
    row = get_row(summary, "0")
    assert row["gain"] == pytest.approx(row["late_val_success"] - row["base_val_success"])
    assert row["gain_greedy"] == pytest.approx(row["final_val_greedy_success"] - row["base_val_greedy_success"])
    # The noise of recorded runs, and that of the evaluation before training.
    p = row["base_val_success"]
    se = math.sqrt(np.var(RECORDED, ddof=1) + p * (1 - p) / 400)
    half_width = scipy_stats.t.ppf(0.975, 19) * se
    assert (row["gain_low"], row["gain_high"]) == pytest.approx((row["gain"] - half_width, row["gain"] + half_width))
    assert math.isnan(row["gain_greedy_low"])


def test_three_seeds_and_their_gains_have_the_noise_of_all_arms(
    three_seed_frames: StudyFrames, three_seed_summary: pd.DataFrame
) -> None:
    late = three_seed_frames.trials[three_seed_frames.trials["status"] != "failed"].pivot_table(
        index="arm", columns="seed", values="late_val_success", sort=False
    )
    levels = compare.estimate_evaluation_variances(three_seed_frames)
    expected = estimate_pooled_mean(
        late.loc["0.1"] - late.loc["0"], fit_noise(late).paired, 2.0, (levels["0"] + levels["0.1"]) / 2
    )
    row = get_row(three_seed_summary, "0.1")
    assert (row["difference"], row["difference_low"], row["difference_high"]) == pytest.approx(expected[:3])
    assert (row["p"], row["df"]) == pytest.approx((expected.p, expected.df))
    assert (row["basis"], row["seeds"]) == ("over 3 seeds, with the noise of all arms", 3)
    runs = three_seed_frames.trials[three_seed_frames.trials["arm"] == "0.1"]
    gains = runs["late_val_success"] - runs["base_val_success"]
    assert row["gain"] == pytest.approx(gains.mean())
    assert row["gain_high"] - row["gain"] > 1.96 * gains.std(ddof=1) / math.sqrt(3)


def test_a_failed_run_is_named_and_not_scored(three_seed_frames: StudyFrames, three_seed_summary: pd.DataFrame) -> None:
    row = get_row(three_seed_summary, "nofilter")
    assert (row["runs"], row["completed"], row["failed"], row["seeds"]) == (3, 2, 1, 2)
    assert row["basis"] == "over 2 seeds, with the noise of these runs alone"
    assert row["notes"] == (
        "2 seeds are too few for a verdict; not scored: seed 2 failed after 12 of 60 steps (RuntimeError: no memory)"
    )
    scored = three_seed_frames.trials[
        (three_seed_frames.trials["arm"] == "nofilter") & (three_seed_frames.trials["status"] == "completed")
    ]
    assert row["late_val_success"] == pytest.approx(scored["late_val_success"].mean())
    values = compare.collect_outcomes(three_seed_frames, "late_val_success").values
    assert (values.index.to_list(), values.columns.to_list()) == (["0", "0.1", "1", "nofilter"], [0, 1, 2])
    assert values.isna().sum(axis=1).to_dict() == {"0": 0, "0.1": 0, "1": 0, "nofilter": 1}


def test_a_stopped_run_is_in_the_notes(three_seed_summary: pd.DataFrame) -> None:
    row = get_row(three_seed_summary, "1")
    assert (row["failed_stops"], row["outcome"], row["difference"] < 0) == (1, "open", True)
    assert row["notes"].endswith("; low_validation_success stopped 1 of 3 runs (step 45: 0.002 < 0.01)")


def test_a_run_stopped_before_its_first_validation_has_the_success_of_the_base_policy(tmp_path: Path) -> None:
    stopped_run = FakeRun("0.1", status="early_stopped", steps=3, stop=("empty_filtered_steps", 3, 3))
    folder = write_study(tmp_path, [FakeRun("0"), stopped_run], FakeStudy(levels=40))
    path = folder / "runs" / stopped_run.run_id
    # The fake validates at its last step: without that row, the stop is told by the one before.
    first, second, third = read_lines(path / "metrics.jsonl").records
    stop_columns = {name: value for name, value in third.items() if name.startswith("stop_")}
    write_lines(path / "metrics.jsonl", [first, {**second, **stop_columns}])
    row = get_row(read_study(folder), "0.1")
    assert row["late_val_success"] == row["base_val_success"]
    assert row["gain"] == 0


def make_arm(status: str, steps: int, **fields: Any) -> list[FakeRun]:
    """Make a completed run of the baseline, and one of arm 0.1 with this end."""
    return [FakeRun("0"), FakeRun("0.1", status=status, steps=steps, **fields)]


@pytest.mark.parametrize(
    ("runs", "outcome", "notes"),
    [
        *(
            (make_arm("early_stopped", 45, stop=stop), "stopped", f"{stop[0]} stopped 1 of 1 runs (step 45: {numbers})")
            for stop, numbers in (
                (LOW_SUCCESS, "0.002 < 0.01"),
                (("reward_variance_collapse", 0.1234, 0.35), "0.123 < 0.35"),
                (("empty_filtered_steps", 5, 5), "5 ≥ 5"),
            )
        ),
        (
            [
                FakeRun("0"),
                *(make_collapsed_run("0.1", seed, steps) for seed, steps in ((0, 45), (2, 50))),
                FakeRun("0.1", 1, status="early_stopped", steps=30, stop=("empty_filtered_steps", 5, 5)),
            ],
            "stopped",
            "low_validation_success stopped 2 of 3 runs (step 45: 0.002 < 0.01; step 50: 0.002 < 0.01) "
            "and empty_filtered_steps stopped 1 of 3 runs (step 30: 5 ≥ 5)",
        ),
        (make_arm("failed", 0, reason="x"), "no verdict", "not scored: seed 0 failed after 0 of 60 steps (x)"),
        (make_arm("interrupted", 20, reason="x"), "no verdict", "not scored: seed 0 interrupted after 20 of 60 steps"),
        (make_arm("", 0), "no verdict", "not scored: seed 0 never ran (has not started)"),
        (
            [FakeRun("0", status="failed", steps=3, reason="x"), FakeRun("0.1")],
            "no comparison",
            "the baseline or this arm has no scored run with a value",
        ),
        (
            [make_collapsed_run("0"), FakeRun("0.1")],
            "open",
            f"{NO_INTERVAL}; the baseline was itself stopped in all runs; ",
        ),
    ],
)
def test_the_verdict_of_an_arm(tmp_path: Path, runs: list[FakeRun], outcome: str, notes: str) -> None:
    row = get_row(make_frames(tmp_path, *runs, levels=200), "0.1")
    assert row["outcome"] == outcome
    assert row["notes"].startswith(notes)
    assert math.isnan(row["late_val_success"]) == (outcome == "no verdict")


@pytest.mark.parametrize(
    ("difference", "p_holm", "p_equal_holm", "word"),
    [
        (0.1, 0.049, 0.9, "better"),
        (-0.1, 0.049, 0.9, "worse"),
        (0.01, 0.049, 0.049, "better"),
        (0.01, 0.051, 0.049, "equal"),
        (0.1, 0.051, 0.051, "open"),
        (0.1, math.nan, math.nan, "open"),
        (math.nan, math.nan, math.nan, "no comparison"),
    ],
)
def test_the_outcome_follows_the_adjusted_p_values(
    difference: float, p_holm: float, p_equal_holm: float, word: str
) -> None:
    row = {"completed": 3, "early_stopped": 0, "failed_stops": 0, "is_baseline": False, "difference": difference}
    row |= {"p_holm": p_holm, "p_equal_holm": p_equal_holm, "equal_rows": False}
    assert verdicts.classify_outcome(row) == word
    if word != "no comparison":
        assert verdicts.classify_outcome({**row, "equal_rows": True}) == "no effect"


def test_verdicts_are_about_settings_and_name_the_margin(tmp_path: Path) -> None:
    ends = {"0": 0.5, "0.1": 0.9, "0.3": 0.5, "1": 0.05, "nofilter": 0.47}
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm, end in ends.items() for seed in range(3)]
    resolved_summary = tables.summarize_arms(make_frames(tmp_path, *runs, levels=500))
    better, worse = get_row(resolved_summary, "0.1"), get_row(resolved_summary, "1")
    assert (better["outcome"], worse["outcome"]) == ("better", "worse")
    assert (better["difference_low"] > 0, worse["difference_high"] < 0) == (True, True)
    # The baseline looks noisier than the others, with a doubt of 0.83: the noise of both arms counts as well.
    assert better["basis"] == "over 3 seeds, with the noise of these runs and of all arms"
    assert better["notes"] == worse["notes"] == ""
    row = {**get_row(resolved_summary, "0.3"), "outcome": "equal", "p_equal_holm": 0.012}
    assert verdicts.describe_verdict(row) == "within 0.05, Holm p 0.012"
    assert verdicts.describe_verdict({**row, "outcome": "better"}) == "by less than 0.05, Holm p 0.012"
    summary = resolved_summary.assign(outcome=["baseline", "better", "equal", "worse", "open"], margin=0.05)
    assert findings.format_headline(summary) == (
        "Compared with baseline 0 over 3 seeds, success at the end is higher for arm 0.1, lower for arm 1, equal "
        "within 0.05 for arm 0.3 and not resolved (open) for arm nofilter."
    )


def test_the_basis_says_whose_noise_an_interval_has(tmp_path: Path) -> None:
    """An arm that is noisier than the others has its own noise in a mean; in a difference only partly."""
    ends = {"0": (0.5, 0.5, 0.5), "0.1": (0.5, 0.52, 0.48), "0.3": (0.51, 0.5, 0.49), "1": (0.1, 0.5, 0.9)}
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm in ends for seed, end in enumerate(ends[arm])]
    summary = tables.summarize_arms(make_frames(tmp_path, *runs, levels=500))
    assert get_row(summary, "1")["basis"] == "over 3 seeds, with the noise of these runs and of all arms"
    assert get_row(summary, "1")["late_basis"] == "over 3 seeds, with the noise of these runs alone"
    assert get_row(summary, "0.1")["basis"] == "over 3 seeds, with the noise of all arms"


def test_few_stopped_runs_condemn_no_setting(tmp_path: Path) -> None:
    runs = [run for seed in range(6) for run in (make_collapsed_run("0.3", seed), _make_baseline_run(seed))]
    frames = make_frames(tmp_path, *runs)
    summary = tables.summarize_arms(frames)
    assert get_row(summary, "0.3")["outcome"] == "failed regime"
    assert findings.format_headline(summary) == "Failed regime, stopped by a rule: arm 0.3."
    fewer = get_row(replace(frames, trials=frames.trials[frames.trials["seed"] < 5]), "0.3")
    assert (fewer["outcome"], fewer["failed_stops"]) == ("stopped", 5)


def _make_baseline_run(seed: int) -> FakeRun:
    return FakeRun("0", seed, success=(0.35, 0.6 + 0.01 * seed))


MASTERED = ("reward_variance_collapse", 0.01, 0.05)


def test_mastery_is_no_collapse(tmp_path: Path) -> None:
    """The spread of the rewards also ends when every rollout succeeds: then the arm is scored like any other."""
    mastered = [
        FakeRun(
            "0.1", seed, "early_stopped", 45, (0.35, 0.985 + 0.004 * seed), stop=MASTERED, rows={"train_success": 0.95}
        )
        for seed in range(3)
    ]
    frames = make_frames(tmp_path, *mastered, *(_make_baseline_run(seed) for seed in range(3)), levels=300)
    row = get_row(frames, "0.1")
    assert (row["outcome"], row["early_stopped"], row["failed_stops"]) == ("better", 3, 0)
    assert row["late_val_success"] > 0.9
    assert row["notes"].startswith("reward_variance_collapse stopped 3 of 3 runs (step 45: 0.01 < 0.05, at success 0.9")
    assert not find_run_ends(frames)["is_collapse"].any()
    low = [replace(run, success=(0.35, 0.7)) for run in mastered]
    # The last validation may be old: success has gone since then.
    fallen = [replace(run, rows={"train_success": 0.1}) for run in mastered]
    for name, failed in (("low", low), ("fallen", fallen)):
        frames = make_frames(tmp_path / name, *failed, *(_make_baseline_run(seed) for seed in range(3)), levels=300)
        assert get_row(frames, "0.1")["outcome"] == "stopped"
        assert find_run_ends(frames)["is_collapse"].sum() == 3


def test_a_verdict_says_if_another_scoring_of_stopped_runs_changes_it(tmp_path: Path) -> None:
    """One of five runs is stopped high: with its value the arm is better, with 0 it is not."""
    ends = {"0": (0.40, 0.405, 0.41, 0.405, 0.40), "0.1": (0.55, 0.555, 0.56, 0.555, 0.55)}
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm, values in ends.items() for seed, end in enumerate(values)]
    runs[-1] = replace(runs[-1], status="early_stopped", steps=55, stop=MASTERED)
    row = get_row(make_frames(tmp_path, *runs, levels=512), "0.1")
    assert row["outcome"] == "better"
    assert row["other_scoring"] == "open with the stopped runs of all arms scored 0"
    assert row["notes"].endswith("; it would be open with the stopped runs of all arms scored 0")
    runs[-1] = replace(runs[-1], status="completed", steps=60, stop=None)
    assert get_row(make_frames(tmp_path / "all", *runs, levels=512), "0.1")["other_scoring"] == ""


COPIED_RUNS = [
    FakeRun(arm, seed, success=(0.35, end + 0.02 * seed))
    for arm, end in (("0", 0.6), ("0.1", 0.5), ("0.3", 0.4))
    for seed in range(3)
]


@pytest.fixture
def copied_frames(tmp_path: Path) -> StudyFrames:
    """Three arms of three seeds, of which 0.1 has the numbers of the baseline."""
    frames = make_frames(tmp_path / "copied", *COPIED_RUNS)
    return replace(frames, **{name: _copy_arm(getattr(frames, name)) for name in ("trials", "steps")})


def test_a_single_equal_seed_of_several_is_no_copy(copied_frames: StudyFrames) -> None:
    trials = copied_frames.trials
    baseline_of_two = trials[(trials["arm"] != "0") | (trials["seed"] < 2)]
    assert get_row(replace(copied_frames, trials=baseline_of_two), "0.1")["outcome"] != "no effect"
    # An arm of fewer seeds than the baseline is one.
    arm_of_one = trials[(trials["arm"] != "0.1") | (trials["seed"] < 1)]
    row = get_row(replace(copied_frames, trials=arm_of_one), "0.1")
    assert (row["outcome"], row["difference"]) == ("no effect", 0.0)


def test_without_late_validations_or_levels_an_interval_or_the_floor_is_left_out(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed) for arm in ("0", "0.1") for seed in range(3)]
    folder = write_study(tmp_path, runs, FakeStudy(levels=40))
    assert tables.summarize_arms(read_study(folder))["levels_low"].notna().sum() == 1
    levels = folder / "runs" / runs[-1].run_id / "levels.jsonl"
    levels.write_bytes(levels.read_bytes().split(b"\n")[0] + b"\n")  # the validation before training alone
    summary = tables.summarize_arms(read_study(folder))
    assert summary["levels_low"].isna().all()
    assert summary["difference_low"].notna().sum() == 1
    for run in runs:
        (folder / "runs" / run.run_id / "levels.jsonl").unlink()
    frames = read_study(folder)
    assert compare.estimate_evaluation_variances(frames) == {}
    late = frames.trials.pivot_table(index="seed", columns="arm", values="late_val_success")
    assert get_row(frames, "0.1")["p"] == pytest.approx(scipy_stats.ttest_rel(late["0.1"], late["0"]).pvalue)


def test_the_interval_for_levels_adds_their_variance(
    three_seed_frames: StudyFrames, three_seed_summary: pd.DataFrame
) -> None:
    """The variance by literal loops: classes of levels, and what neither seeds nor levels explain."""
    row = get_row(three_seed_summary, "0.1")
    levels = three_seed_frames.levels
    late = levels[(levels["split"] == "val") & (levels["mode"] == "sampled") & (levels["step"] >= 45)]
    wide = late.astype({"success": float, "arm": str}).pivot_table(
        index=["arm", "seed"], columns="level", values="success"
    )
    d = (wide.loc["0.1"] - wide.loc["0"]).to_numpy()
    classes = late.drop_duplicates("level").sort_values("level")["cluster"].to_numpy()
    members = [np.flatnonzero(classes == number) for number in sorted(set(classes))]
    sums = [sum(d[:, k].mean() - d.mean() for k in cut) for cut in members]
    left = [sum(d[s, k] - d[:, k].mean() - d[s].mean() + d.mean() for k in cut) for cut in members for s in range(3)]
    factor = len(members) / (len(members) - 1) / d.shape[1] ** 2
    variance = factor * (sum(x**2 for x in sums) - sum(x**2 for x in left) / 6)
    half = scipy_stats.t.ppf(0.975, row["df"]) * math.sqrt(row["se"] ** 2 + max(variance, 0.0))
    assert row["levels_low"] == pytest.approx(row["difference"] - half)
    assert row["levels_high"] == pytest.approx(row["difference"] + half)


def _copy_arm(table: pd.DataFrame) -> pd.DataFrame:
    """Give the arm 0.1 the numbers of the arm 0."""
    copies = table[table["arm"] == "0"].assign(arm="0.1").astype(table.dtypes)
    copies["run_id"] = copies["run_id"].str.replace("arm0-", "arm01-").astype(table["run_id"].dtype)
    return pd.concat([table[table["arm"] == "0"], copies, table[table["arm"] == "0.3"]], ignore_index=True)


def test_an_arm_with_the_rows_of_the_baseline_has_no_effect(copied_frames: StudyFrames, tmp_path: Path) -> None:
    frames, summary = copied_frames, tables.summarize_arms(copied_frames)
    row = get_row(summary, "0.1")
    assert (row["outcome"], row["difference"], row["equal_rows"]) == ("no effect", 0.0, True)
    assert row[["se", "difference_low", "levels_low"]].isna().all()
    assert row["notes"] == "every row equals the baseline's"
    assert math.isnan(row["p_holm"])
    assert "0.1" not in list_open_arms(frames)  # no look is spent on the arm
    assert "the same in every row (no effect in these runs) for arm 0.1" in findings.format_headline(summary)
    # A copy says nothing of the noise, and is no test that others are corrected for.
    single = get_row(make_frames(tmp_path / "single", *COPIED_RUNS[:3], *COPIED_RUNS[6:]), "0.3")
    names = ["se", "df", "p_holm", "difference_low"]
    assert get_row(summary, "0.3")[names].to_list() == single[names].to_list()
    # Times aside, one digit in one row is an effect.
    steps = frames.steps.copy()
    steps["seconds_step"] = np.arange(len(steps))
    assert get_row(replace(frames, steps=steps), "0.1")["outcome"] == "no effect"
    # So is what one arm measures alone, such as the KL to a reference that the baseline does not have.
    steps["kl_to_reference"] = np.where(steps["arm"] == "0.1", 0.1, math.nan)
    assert get_row(replace(frames, steps=steps), "0.1")["outcome"] == "no effect"
    row_of_arm = steps.index[steps["arm"] == "0.1"][20]
    steps.loc[row_of_arm, "entropy"] = np.nextafter(steps.loc[row_of_arm, "entropy"], 9.0)
    assert get_row(replace(frames, steps=steps), "0.1")["outcome"] in ("open", "equal")


def test_an_open_verdict_says_what_would_have_been_missed(tmp_path: Path) -> None:
    ends = {"0": 0.6, "0.1": 0.62, "1": 0.58}
    runs = [FakeRun(arm, seed, success=(0.35, end)) for arm, end in ends.items() for seed in range(3)]
    row = get_row(make_frames(tmp_path, *runs, levels=20), "1")
    assert row["outcome"] == "open"
    assert row["notes"] == f"differences smaller than about {row['detectable']:.3f} would probably be missed"
    hopeless = {**row, "arm": "1", "detectable": 1.7}
    assert verdicts.describe_verdict(hopeless) == "any difference would probably be missed"


def test_no_run_at_all_and_several_studies(tmp_path: Path, six_arm_frames: StudyFrames) -> None:
    frames = make_frames(tmp_path)
    assert tables.summarize_arms(frames).empty
    assert tables.make_dose_response(frames, tables.summarize_arms(frames)).empty
    assert tables.make_run_outcomes(frames).empty
    assert math.isnan(tables.compute_trend(frames, np.random.default_rng(0)).value)
    frames = six_arm_frames
    twice = StudyFrames(frames.trials, frames.steps, frames.levels, [*frames.studies, *frames.studies])
    with pytest.raises(ValueError, match=r"contain 2 studies \(.*\)\. Select one: frames\.select_study\(NAME\)"):
        tables.summarize_arms(twice)


@pytest.mark.parametrize(
    ("values", "expected"),
    [(("0.01", "0", "-0.1", "nofilter", "1", "none"), [2, 1, 0, 4, 3, 5]), (("0.1",), [0]), (("nofilter",), [0])],
)
def test_positions_on_the_axis(tmp_path: Path, values: tuple[str, ...], expected: list[float]) -> None:
    runs = (FakeRun(value, status="", steps=0) for value in values)
    frames = make_frames(tmp_path, *runs, values=values, setting="actor.entropy_coeff")
    assert tables.compute_axis_positions(frames) == expected


def test_dose_response_has_the_numbers_of_the_figure(six_arm_frames: StudyFrames, summary: pd.DataFrame) -> None:
    table = tables.make_dose_response(six_arm_frames, tables.summarize_arms(six_arm_frames))
    assert table["arm"].to_list() == summary["arm"].to_list() == ["0", "0.01", "0.03", "0.1", "0.3", "1"]
    assert table["success"].to_list() == summary["late_val_success"].to_list()
    assert table["base"].nunique() == 1
    assert table["early_stopped"].to_list() == [0, 0, 0, 0, 1, 0]
    assert table["low"].isna().all()  # one seed
    outcomes = tables.make_run_outcomes(six_arm_frames)
    assert outcomes["x"].to_list() == table["x"].to_list()


def test_a_trend_leaves_words_out(three_seed_frames: StudyFrames, six_arm_frames: StudyFrames) -> None:
    assert tables.compute_trend(three_seed_frames, np.random.default_rng(0)).n == 9
    trend = tables.compute_trend(six_arm_frames, np.random.default_rng(0))
    assert (trend.n, trend.value < 0) == (6, True)


def test_a_trend_has_its_direction_only_where_it_is_clear() -> None:
    clear, unclear = Estimate(-0.83, n=6, p=0.012), Estimate(0.5, n=6, p=0.31)
    plain, words_and_stops = (
        pd.DataFrame({"is_word": [is_word], "early_stopped": [n]}) for is_word, n in ((0, 0), (1, 2))
    )
    assert findings.describe_trend(clear, plain, "actor.kl_loss_coef") == (
        "Success tends to fall as actor.kl_loss_coef grows (rank correlation −0.83, p 0.012 over 6 runs)."
    )
    assert findings.describe_trend(unclear, words_and_stops) == (
        "Success has no clear trend over the axis (rank correlation +0.50, p 0.31 over 6 runs). Arms named by words "
        "are left out. A stopped run counts with its last value."
    )
    unknown = Estimate(n=2)
    assert findings.describe_trend(unknown, plain).startswith("A trend needs at least three scored runs")
    assert findings.describe_trend(unknown, words_and_stops) == ""


@pytest.mark.parametrize(("largest", "is_named"), [(0.2, True), (0.06, True), (0.05, False), (None, False)])
def test_a_sampler_that_differs_from_its_trainer_is_named(
    tmp_path: Path, largest: float | None, is_named: bool
) -> None:
    rows: list[dict[str, float | None]] = [{"engine_mismatch_mean": value} for value in (None, 0.01, largest)]
    runs = [FakeRun("0", seed, rows=columns) for seed, columns in enumerate(rows)]
    frames = make_frames(tmp_path, *runs)
    remarks = [line for line in findings.list_caveats(frames, tables.summarize_arms(frames)) if "sampler and" in line]
    assert bool(remarks) == is_named
    if is_named:
        assert "In 1 of 3 runs the log-probs of sampler and trainer differed by more than 0.05 nats" in remarks[0]
        assert f"by up to {largest:g}, in arm 0, seed 2, step 1." in remarks[0]

"""Tests of `noise-floor`: its numbers against a computation by hand, and what it refuses."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis.data.load import load
from tests.fakes.command_line import assert_refused, get_output, type_words
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.trainable.sources.logs import write_json_lines, write_verl_run

SUCCESSES = (0.20, 0.23, 0.28, 0.21, 0.26)


def write_logs(folder: Path, successes: Sequence[float]) -> list[Path]:
    return [write_verl_run(folder / f"{seed}.log", [value], seed) for seed, value in enumerate(successes)]


def read_floors(*words: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(get_output(type_words("noise-floor", *words, "--json")))
    return answer


def compute_power_by_hand(difference: float, deviation: float, num_seeds: int) -> float:
    """The probability that a paired t test of two arms resolves a true difference, in the right direction."""
    df, scale = num_seeds - 1, deviation * math.sqrt(2 / num_seeds)
    return float(stats.nct.sf(stats.t.ppf(0.975, df), df, difference / scale))


@pytest.fixture
def floors(tmp_path: Path) -> dict[str, Any]:
    return read_floors(*write_logs(tmp_path, SUCCESSES))


def test_numbers_are_those_of_a_computation_by_hand(floors: dict[str, Any]) -> None:
    n, std = len(SUCCESSES), float(np.std(SUCCESSES, ddof=1))
    assert [run["value"] for run in floors["runs"]] == pytest.approx(SUCCESSES)
    assert (floors["mean"], floors["std"]) == pytest.approx((np.mean(SUCCESSES), std))
    bounds = [std * math.sqrt((n - 1) / stats.chi2.ppf(quantile, n - 1)) for quantile in (0.975, 0.025)]
    assert (floors["std_low"], floors["std_high"]) == pytest.approx(bounds)
    assert [row["seeds"] for row in floors["floors"]] == [2, 3, 5, 8, 10, 20]
    assert floors["floors"][0] == {"seeds": 2, "difference": None, "low": None, "high": None}
    for row in floors["floors"][1:]:
        # The formula of the plan is simulated, so the power is not exact.
        for name, deviation in zip(("difference", "low", "high"), (std, *bounds), strict=True):
            assert compute_power_by_hand(row[name], deviation, row["seeds"]) == pytest.approx(0.8, abs=0.02)


def test_a_study_has_the_noise_of_its_baseline_or_of_another_arm(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=4) for arm in ("0", "0.1") for seed in range(3)]
    runs.append(FakeRun("0", 3, steps=2, status="failed"))
    folder = write_study(tmp_path, runs, FakeStudy(levels=20, total_steps=4, values=("0", "0.1")))
    trials = load(folder).trials
    ended = trials[trials["status"] == "completed"]
    for words, arm in (((), "0"), (("--arm", "0.10"), "0.1")):
        floors = read_floors(folder, *words)
        assert floors["arm"] == arm
        values = ended.loc[ended["arm"] == arm, "late_val_success"]
        assert [run["value"] for run in floors["runs"]] == pytest.approx(values.to_list())
    assert_refused(type_words("noise-floor", folder, "--arm", "7"), "There is no arm 7")
    assert_refused(type_words("noise-floor", folder, tmp_path / "a.log"), "is the folder of a study: type it alone")


def test_the_table_has_a_row_per_number_of_seeds(tmp_path: Path) -> None:
    lines = get_output(type_words("noise-floor", *write_logs(tmp_path, SUCCESSES))).splitlines()
    assert lines[0].startswith("5 runs of arm all, late_val_success: mean 0.236, standard deviation 0.0336 [0.0201, ")
    assert [line.split()[0] for line in lines[2:8]] == ["2", "3", "5", "8", "10", "20"]
    assert "no verdict below 3 seeds" in lines[2]


def test_logs_without_settings_are_of_one_setting(tmp_path: Path) -> None:
    paths = [
        write_json_lines(tmp_path / f"{number}.jsonl", [{"step": 1, "reward": 0.1, "eval/accuracy": value}])
        for number, value in enumerate(SUCCESSES)
    ]
    words = ("--column", "val_success=eval/accuracy")
    assert read_floors(*paths, *words)["std"] == pytest.approx(np.std(SUCCESSES, ddof=1))


def test_runs_that_say_nothing_about_noise_are_refused(tmp_path: Path) -> None:
    first, second = write_logs(tmp_path, (0.5, 0.5))
    assert_refused(type_words("noise-floor", first), "One run says nothing about noise: type two or more logs")
    assert_refused(type_words("noise-floor", first, second), "All 2 runs have a `late_val_success` of 0.5")
    other = write_verl_run(tmp_path / "other.log", [0.6], 2, kl_loss_coef=0.1)
    text = assert_refused(type_words("noise-floor", first, second, other), "of several settings", "type --arm with one")
    assert "actor_rollout_ref.actor.kl_loss_coef" in text
    assert_refused(type_words("noise-floor", tmp_path / "none.log"), "cannot be read")

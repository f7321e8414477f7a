"""Tests of the factors of a grid: spreads, their comparison, coverage of its interval, contrasts, and the page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.grid import factors, layout
from analysis.grid.factors import FactorGrid
from analysis.report import grid as sections
from analysis.report import pages
from analysis.report.results import SweepResults
from analysis.report.section import say
from analysis.sweep.contrasts import compute_contrasts
from search_spaces.declaration.study import make_grid_axis, make_grid_contrasts, make_grid_interactions
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

FACTORS = {"actor.lr": ("1e-4", "1e-3"), "algorithm.adv_estimator": ("gae", "grpo")}
EFFECTS = {"1e-4": 0.0, "1e-3": 0.3, "gae": 0.0, "grpo": 0.05}


def write_frames(folder: Path, num_seeds: int, without: tuple[str, int] | None = None) -> StudyFrames:
    axis = make_grid_axis(FACTORS)
    runs = [
        FakeRun(
            arm,
            seed,
            steps=20,
            status="failed" if (arm, seed) == without else "completed",
            success=(0.3, 0.4 + sum(EFFECTS[str(each)] for each in settings.values()) + 0.02 * (seed + number) % 0.05),
            settings=settings,
        )
        for number, (arm, settings) in enumerate(axis.named_settings.items())
        for seed in range(num_seeds)
    ]
    entry = {"setting": axis.setting, "option": axis.option, "values": list(axis.named_settings)}
    effects, interactions = make_grid_contrasts(FACTORS), make_grid_interactions(FACTORS)
    contrasts: list[dict[str, Any]] = [{"name": name, "pairs": pairs} for name, pairs in effects.items()]
    contrasts += [{"name": name, "pairs": pairs, "needs_all_pairs": True} for name, pairs in interactions.items()]
    extra = {"axis": {**entry, "factors": list(axis.factors)}, "contrasts": contrasts}
    study = FakeStudy(baseline=next(iter(axis.named_settings)), total_steps=20, levels=40, extra=extra)
    return load(write_study(folder, runs, study))


def list_success_contrasts(frames: StudyFrames) -> list[dict[str, Any]]:
    return [row for row in to_records(compute_contrasts(frames)) if row["column"] == "late_val_success"]


def test_a_spread_has_no_part_that_noise_alone_gives() -> None:
    rng = np.random.default_rng(0)
    estimates = [factors.estimate_squared_spread(rng.standard_normal((3, 4))) for _ in range(20_000)]
    assert np.mean(estimates) == pytest.approx(0, abs=4 * np.std(estimates) / np.sqrt(len(estimates)))
    exact = np.array([0.1, 0.4, 0.7])
    assert factors.estimate_squared_spread(np.tile(exact, (5, 1))) == pytest.approx(exact.var())
    assert np.isnan(factors.estimate_squared_spread(exact[None]))


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("levels", [(2, 2), (3, 2)])
@pytest.mark.parametrize("effects", [(0.0, 0.0), (0.1, 0.05), (0.3, 0.1)])
def test_the_interval_of_a_comparison_covers_the_difference(
    n: int, levels: tuple[int, int], effects: tuple[float, float]
) -> None:
    rng = np.random.default_rng(1)
    means = [effect * np.linspace(-0.5, 0.5, count) for effect, count in zip(effects, levels, strict=True)]
    truth = means[0].var() - means[1].var()
    covered = 0
    for _ in range(400):
        noise = 0.03 * rng.standard_normal((n, *levels)) + 0.02 * rng.standard_normal((n, 1, 1))
        grid = FactorGrid(
            ("a", "b"), tuple(tuple(range(count)) for count in levels), means[0][:, None] + means[1] + noise
        )
        (row,) = factors.compare_factors(grid)
        covered += row["low"] <= truth <= row["high"]
    # .93, and three standard errors of a share of 1,500.
    assert covered / 400 >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / 400)


@pytest.mark.long
def test_the_stronger_factor_is_named(tmp_path: Path) -> None:
    frames = write_frames(tmp_path, num_seeds=4)
    grid = factors.make_factor_grid(frames)
    assert (grid.settings, grid.outcomes.shape) == (tuple(FACTORS), (4, 2, 2))
    rows = factors.list_factors(grid)
    assert [row["factor"] for row in rows] == ["learning rate", "advantage"]
    low_mean, high_mean = (entry["mean"] for entry in rows[0]["means"])
    assert rows[0]["spread"] == pytest.approx((high_mean - low_mean) / 2, abs=0.01)
    (row,) = factors.compare_factors(grid)
    assert row["low"] > 0
    assert factors.describe_comparison(row).startswith("learning rate matters more than advantage: spreads of 0.")
    assert factors.describe_comparison(row) in pages.conclude(frames).sentences
    flipped = grid._replace(settings=grid.settings[::-1], outcomes=grid.outcomes.transpose(0, 2, 1))
    assert factors.describe_comparison(factors.compare_factors(flipped)[0]).startswith("learning rate matters more")
    results = SweepResults(frames)
    (means,) = sections.FACTORS.tables(results)
    assert [row["factor"] for row in means.rows] == ["learning rate", "advantage"]
    cells = [column.cell(means.rows[0]) for column in means.columns]
    assert cells[0] == "learning rate"
    assert cells[2] == "; ".join(f"{entry['value']}: {entry['mean']:.3f}" for entry in means.rows[0]["means"])
    assert "over 4 seeds with a scored run of every arm" in say(sections.FACTORS.explanation, results)
    assert "lr 1e-3 x adv_estimator grpo" in set(results.contrasts["contrast"])


def test_seeds_without_every_arm_do_not_count_and_three_are_needed(tmp_path: Path) -> None:
    arm = next(iter(make_grid_axis(FACTORS).named_settings))
    grid = factors.make_factor_grid(write_frames(tmp_path, num_seeds=3, without=(arm, 1)))
    assert len(grid.outcomes) == 2
    (row,) = factors.compare_factors(grid)
    assert np.isnan(row["p"])
    assert factors.describe_comparison(row).endswith(
        "that needs 3 seeds with a scored run of every arm, and there are 2."
    )


def test_main_effects_and_interactions_are_contrasts_of_the_arms(tmp_path: Path) -> None:
    frames = write_frames(tmp_path, num_seeds=3)
    values = frames.trials.groupby("arm")["late_val_success"].mean()
    rows = list_success_contrasts(frames)
    low_gae, low_grpo, high_gae, high_grpo = (values[arm] for arm in make_grid_axis(FACTORS).named_settings)
    expected = {
        "lr 1e-3 against 1e-4": (high_gae - low_gae + high_grpo - low_grpo) / 2,
        "adv_estimator grpo against gae": (low_grpo - low_gae + high_grpo - high_gae) / 2,
        "lr 1e-3 x adv_estimator grpo": ((high_grpo - low_grpo) - (high_gae - low_gae)) / 2,
    }
    assert {row["contrast"]: row["difference"] for row in rows} == pytest.approx(expected, abs=1e-9)


def test_three_factors_have_all_effects_and_a_part_is_named_without_its_digest() -> None:
    three_factors = {"x.a": ("1", "2", "3"), "x.b": ("1", "2"), "x.c": ("1", "2")}
    contrasts, interactions = make_grid_contrasts(three_factors), make_grid_interactions(three_factors)
    assert (len(contrasts), len(interactions)) == (2 + 1 + 1, 2 + 2 + 1)
    assert {len(pairs) for pairs in contrasts.values()} == {4, 6}
    assert {len(pairs) for pairs in interactions.values()} == {2 * 2, 2 * 3}
    arms = make_grid_axis(three_factors).named_settings
    for declared in (contrasts, interactions):
        assert {arm for pairs in declared.values() for pair in pairs for arm in pair} == set(arms)
    assert layout.label_value("my.py:soft#0123456789abcdef") == "my.py:soft"
    assert layout.label_value("#0123456789abcdef") == "#0123456789abcdef"
    axis = make_grid_axis({"actor.lr": ("1e-4", "1e-3"), "actor.policy_loss": ("ppo_clip", "parts/my.py:soft")})
    assert axis.grids["laptop"][:2] == ("lr1e-4-policy_lossppo_clip", "lr1e-4-policy_losssoft")
    assert axis.named_settings["lr1e-4-policy_losssoft"]["actor.policy_loss"] == "parts/my.py:soft"


@pytest.mark.long
def test_an_interaction_is_over_seeds_that_have_all_of_its_arms(tmp_path: Path) -> None:
    arms = list(make_grid_axis(FACTORS).named_settings)
    name = "lr 1e-3 x adv_estimator grpo"
    whole, lacking = (
        next(row for row in list_success_contrasts(write_frames(tmp_path / folder, 4, lost)) if row["contrast"] == name)
        for folder, lost in (("a", None), ("b", (arms[3], 1)))
    )
    # The effects add up: without the rule, a missing arm would put half a main effect into the mean.
    assert abs(whole["difference"]) < 0.03
    assert abs(lacking["difference"]) < 0.03
    assert (whole["seeds"], lacking["seeds"]) == (4, 3)
    assert lacking["excluded_runs"] == f"{arms[3]} failed: seed 1"
    assert {whole["verdict"], lacking["verdict"]} <= {"open", "equal", "lower", "higher"}


def test_without_all_combinations_there_are_no_factors_and_one_may_have_the_value_null(tmp_path: Path) -> None:
    frames = write_frames(tmp_path, num_seeds=3)
    arm = frames.trials["arm"].iloc[-1]
    fewer_arms = replace(frames, trials=frames.trials[frames.trials["arm"] != arm])
    assert factors.make_factor_grid(fewer_arms) is None
    # All runs of one value failed: the others do not form a grid either.
    failed = frames.trials.assign(status=frames.trials["status"].mask(frames.trials["arm"] == arm, "failed"))
    assert factors.make_factor_grid(replace(frames, trials=failed)) is None
    rates = frames.trials["config/actor.lr"]
    grid = factors.make_factor_grid(
        replace(frames, trials=frames.trials.assign(**{"config/actor.lr": rates.where(rates > 5e-4)}))
    )
    assert grid.values[0] == ("null", 1e-3)

"""Tests of the report on k1 as a loss: it follows the runs in both directions, and says nothing without them."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.grid import kl_anchoring
from tests.fakes.grid_folders import write_grid
from tests.strategies.examples import draw_examples

FALLS, RISES, MIXED = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]


def describe(table: pd.DataFrame) -> str:
    trends = kl_anchoring.summarize_anchoring(table, np.random.default_rng(0))
    return " ".join(kl_anchoring.describe_anchoring(trends, kl_anchoring.compare_to_k1(table)))


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """Two forms at 16 points each. One run of k1 failed and one never ran."""
    return load(write_grid(tmp_path_factory.mktemp("anchor"), {"kl": ("5",), "mse": ("5",)}, levels=20))


@pytest.fixture(scope="module")
def kl_table(frames: StudyFrames) -> pd.DataFrame:
    return kl_anchoring.make_kl_table(frames)


def test_the_table_has_the_measured_runs_and_their_correlations(kl_table: pd.DataFrame) -> None:
    assert kl_table.groupby("form").size().to_dict() == {"kl": 14, "mse": 16}
    assert kl_table["match"].nunique() == 4  # one per entropy coefficient
    collapsed = kl_table[kl_table["status"] == "early_stopped"]
    assert len(collapsed) == 8
    assert set(collapsed["last_step"]) == {15}  # of 20 steps, those that all matching runs have
    assert set(kl_table.loc[kl_table["status"] == "completed", "last_step"]) == {20}
    assert set(kl_table.loc[kl_table["last_step"] == 20, "first_step"]) == {16}
    rhos = kl_anchoring.compute_correlations(kl_table).set_index(["form", "match"])["rho"]
    for (form, match), runs in kl_table.groupby(["form", "match"]):
        if len(runs) >= 3:
            assert rhos[form, match] == pytest.approx(stats.spearmanr(runs["coefficient"], runs["kl"]).statistic)
        else:
            assert (form, match) not in rhos.index


def test_the_fake_grid_shows_that_k1_does_not_anchor(kl_table: pd.DataFrame) -> None:
    trends = kl_anchoring.summarize_anchoring(kl_table, np.random.default_rng(0)).set_index("form")
    assert trends.loc["mse", "rho"] == -1
    assert trends.loc["mse", "p"] < 0.001
    assert trends.loc["mse", "runs"] == 16
    assert trends.loc["mse", "kl_largest"] == pytest.approx(0.001, rel=1e-2, abs=1e-4)
    assert trends.loc["kl", "p"] > 0.05
    words = describe(kl_table)
    assert "does not anchor the policy to the reference" in words
    assert "Whether k1 and mse differ is open: the rank correlation" in words


def test_nothing_is_claimed_without_runs_of_k1(frames: StudyFrames, kl_table: pd.DataFrame) -> None:
    assert describe(kl_table[kl_table["form"] == "mse"]) == ""
    k1_alone = describe(kl_table[kl_table["form"] == "kl"])
    assert "No other KL loss has matching runs in this study" in k1_alone
    unmeasured = kl_anchoring.make_kl_table(replace(frames, steps=frames.steps.assign(kl_to_reference=math.nan)))
    assert unmeasured.empty
    assert describe(unmeasured) == ""


def make_table(rhos: dict[str, list[list[float]]], sets_per_seed: int = 1) -> pd.DataFrame:
    """Make a table of the measured KL (nats) of each form, with one list per set, over rising coefficients."""
    rows = [
        (f"{form}{match}{index}", form, 10.0**index, match, match // sets_per_seed, kl)
        for form, sets in rhos.items()
        for match, kls in enumerate(sets)
        for index, kl in enumerate(kls)
    ]
    table = pd.DataFrame(rows, columns=["run_id", "form", "coefficient", "match", "seed", "kl"])
    return table.assign(status="completed", first_step=1, last_step=4)


def test_runs_that_have_not_ended_are_left_out(frames: StudyFrames) -> None:
    # As when a study is stopped before the first run with a KL loss has ended.
    trials = frames.trials.assign(status="interrupted")
    assert kl_anchoring.make_kl_table(replace(frames, trials=trials)).empty


def test_the_difference_is_paired_and_signed() -> None:
    table = kl_anchoring.compare_to_k1(make_table({"kl": [RISES, RISES, MIXED], "mse": [FALLS, FALLS, FALLS]}))
    (row,) = table.to_dict("records")
    assert (row["form"], row["sets"]) == ("mse", 3)
    assert row["difference"] == pytest.approx((2 + 2 + 1.8) / 3)
    assert 0 < row["low"] < row["difference"] <= row["high"] <= 2
    assert "and k1 does not" in describe(make_table({"kl": [RISES, RISES, MIXED], "mse": [FALLS, FALLS, FALLS]}))
    per_seed = np.array([2, 2, 1.8])
    assert row["low"] == pytest.approx(per_seed.mean() - 4.302653 * per_seed.std(ddof=1) / np.sqrt(3))
    table_of_two_seeds = make_table({"kl": [RISES, MIXED], "mse": [FALLS, FALLS]})
    assert np.isnan(kl_anchoring.compare_to_k1(table_of_two_seeds)["low"].iloc[0])
    assert "Whether k1 and mse differ is open: the rank correlation" in describe(table_of_two_seeds)


def test_sets_of_one_seed_are_not_independent() -> None:
    """Twelve sets of one seed have no interval, and twelve of three seeds have that of three numbers."""
    forms = {"kl": [RISES] * 4 + [MIXED] * 4 + [RISES, MIXED] * 2, "mse": [FALLS] * 12}
    (row,) = kl_anchoring.compare_to_k1(make_table(forms, sets_per_seed=12)).to_dict("records")
    assert (row["sets"], row["seeds"], np.isnan(row["low"])) == (12, 1, True)
    (row,) = kl_anchoring.compare_to_k1(make_table(forms, sets_per_seed=4)).to_dict("records")
    per_seed = np.array([2, 1.8, 1.9])
    assert (row["sets"], row["seeds"]) == (12, 3)
    assert row["high"] == pytest.approx(min(2, per_seed.mean() + 4.302653 * per_seed.std(ddof=1) / np.sqrt(3)))
    trends = kl_anchoring.summarize_anchoring(make_table(forms, 12), np.random.default_rng(0)).set_index("form")
    assert np.isnan(trends.loc["kl", "rho_low"])
    # The permutations of runs within sets need no interval over seeds.
    assert trends.loc["mse", "p"] < 0.001
    assert "(no interval with fewer than three seeds that differ)" in describe(make_table(forms, 12))


def test_anchoring_is_claimed_only_where_kl_falls_with_the_form_and_not_with_k1() -> None:
    less = [1.0, 3.0, 4.0, 2.0]
    text_of_rising = describe(make_table({"kl": [RISES] * 12, "mse": [MIXED, less] * 6}))
    text_of_falling = describe(make_table({"kl": [MIXED[::-1], less[::-1]] * 6, "mse": [FALLS] * 12}))
    for text in (text_of_rising, text_of_falling):
        assert "and k1 does not" not in text
        assert "lower under mse than under k1, which alone does not show anchoring" in text
    assert "and k1 does not" in describe(make_table({"kl": [RISES, MIXED] * 6, "mse": [FALLS] * 12}))


@draw_examples(25)
@given(st.lists(st.permutations([1.0, 2.0, 3.0, 4.0]), min_size=3, max_size=6), st.floats(0.1, 100))
def test_units_do_not_matter_and_a_reversed_order_flips_the_sign(sets: list[list[float]], unit: float) -> None:
    variants = sets, [[unit * kl for kl in kls] for kls in sets], [kls[::-1] for kls in sets]
    trends, scaled_trends, reversed_trends = (
        kl_anchoring.summarize_anchoring(make_table({"kl": kls}), np.random.default_rng(0)) for kls in variants
    )
    assert scaled_trends["rho"].iloc[0] == pytest.approx(trends["rho"].iloc[0])
    assert scaled_trends["p"].iloc[0] == trends["p"].iloc[0]
    assert reversed_trends["rho"].iloc[0] == pytest.approx(-trends["rho"].iloc[0])


def test_a_setting_that_is_null_in_some_runs_tells_them_apart(frames: StudyFrames) -> None:
    without = kl_anchoring.make_kl_table(frames)
    is_first = frames.trials.index < len(frames.trials) / 2
    trials = frames.trials.assign(**{"config/trainer.ref_model_sync_steps": np.where(is_first, 10.0, np.nan)})
    table = kl_anchoring.make_kl_table(replace(frames, trials=trials))
    assert len(table) == len(without)
    assert table["match"].nunique() == 2 * without["match"].nunique()

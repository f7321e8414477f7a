"""k1 as a loss: what a grid says of it follows the runs, in both directions, and is silent without them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.grid import kl_anchoring
from tests.fakes.grid_folders import Anchor, compute_anchored_kl, make_runs, make_study
from tests.fakes.run_folders import write_study

GROUPS = {"kl": ("5",), "mse": ("5",)}


def grid_of(folder: Path, groups: Mapping[str, tuple[str, ...]], made: Anchor = compute_anchored_kl) -> StudyFrames:
    return load(write_study(folder, make_runs(groups, anchor=made), make_study(levels=20)))


def told(table: pd.DataFrame) -> str:
    trends = kl_anchoring.summarize_anchoring(table, np.random.default_rng(0))
    return " ".join(kl_anchoring.describe_anchoring(trends, kl_anchoring.compare_to_k1(table)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Two forms at 16 points each; of k1, one run failed and one never ran."""
    return kl_anchoring.make_kl_table(grid_of(tmp_path_factory.mktemp("anchor"), GROUPS))


def test_what_is_measured_and_what_matches(made: pd.DataFrame) -> None:
    assert made.groupby("form").size().to_dict() == {"kl": 14, "mse": 16}
    assert made["match"].nunique() == 4  # one an entropy coefficient
    collapsed = made[made["status"] == "early_stopped"]
    assert len(collapsed) == 8
    assert set(collapsed["last_step"]) == {15}  # of 20: the steps that all matching runs have
    assert set(made.loc[made["status"] == "completed", "last_step"]) == {20}
    assert set(made.loc[made["last_step"] == 20, "first_step"]) == {16}


def test_correlations_are_those_of_scipy(made: pd.DataFrame) -> None:
    found = kl_anchoring.compute_correlations(made).set_index(["form", "match"])["rho"]
    for (form, match), runs in made.groupby(["form", "match"]):
        if len(runs) >= 3:
            assert found[form, match] == pytest.approx(stats.spearmanr(runs["coefficient"], runs["kl"]).statistic)
        else:
            assert (form, match) not in found.index


def test_the_made_grid_shows_that_k1_does_not_anchor(made: pd.DataFrame) -> None:
    trends = kl_anchoring.summarize_anchoring(made, np.random.default_rng(0)).set_index("form")
    assert trends.loc["mse", "rho"] == -1
    assert trends.loc["mse", "p"] < 0.001
    assert trends.loc["mse", "runs"] == 16
    assert trends.loc["mse", "kl_largest"] == pytest.approx(0.001, rel=1e-2, abs=1e-4)
    assert trends.loc["kl", "p"] > 0.05
    words = told(made)
    assert "does not anchor the policy to the reference" in words
    assert "Under the loss kl, KL to the reference neither clearly falls nor clearly rises" in words
    assert "Under the loss mse, KL to the reference falls with the coefficient" in words


def test_a_k1_that_held_the_policy_would_be_told_so(tmp_path: Path) -> None:
    """Made the other way round, the sentences turn: the report repeats its data, not its theory."""
    table = kl_anchoring.make_kl_table(
        grid_of(tmp_path, GROUPS, lambda form, at: compute_anchored_kl("kl" if form == "mse" else "mse", at))
    )
    words = told(table)
    assert "Under the loss kl, KL to the reference falls with the coefficient" in words
    assert "pulls the policy toward the reference and k1 does not" not in words


def test_nothing_is_claimed_without_runs_of_k1(tmp_path: Path) -> None:
    assert told(kl_anchoring.make_kl_table(grid_of(tmp_path / "mse", {"mse": ("5",)}))) == ""
    only = told(kl_anchoring.make_kl_table(grid_of(tmp_path / "kl", {"kl": ("5",)})))
    assert "No other KL loss has matching runs in this study" in only
    unmeasured = grid_of(tmp_path / "none", {"kl": ("5",)}, lambda *_: float("nan"))
    assert kl_anchoring.make_kl_table(unmeasured).empty
    assert told(kl_anchoring.make_kl_table(unmeasured)) == ""


def points(rhos: dict[str, list[list[float]]]) -> pd.DataFrame:
    """Measured KL (nats) of each form: a list a set, over rising coefficients."""
    rows = [
        {
            "run_id": f"{form}{match}{at}",
            "form": form,
            "coefficient": 10.0**at,
            "match": match,
            "status": "completed",
            "first_step": 1,
            "last_step": 4,
            "kl": kl,
        }
        for form, sets in rhos.items()
        for match, kls in enumerate(sets)
        for at, kl in enumerate(kls)
    ]
    return pd.DataFrame(rows)


def test_the_difference_is_paired_and_signed() -> None:
    falls, rises, mixed = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]
    table = kl_anchoring.compare_to_k1(points({"kl": [rises, rises, mixed], "mse": [falls, falls, falls]}))
    (row,) = table.to_dict("records")
    assert (row["form"], row["sets"]) == ("mse", 3)
    assert row["difference"] == pytest.approx((2 + 2 + 1.8) / 3)
    assert 0 < row["low"] < row["difference"] <= row["high"] <= 2
    assert "and k1 does not" in told(points({"kl": [rises, rises, mixed], "mse": [falls, falls, falls]}))
    two = kl_anchoring.compare_to_k1(points({"kl": [rises, mixed], "mse": [falls, falls]}))
    assert np.isnan(two["low"].iloc[0])  # below three sets there is no interval, and nothing is resolved
    assert "There is no clear difference between k1 and mse" in told(
        points({"kl": [rises, mixed], "mse": [falls, falls]})
    )


def test_anchoring_is_claimed_only_where_kl_falls_with_the_form_and_not_with_k1() -> None:
    rises, nearly = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]
    both_rise = told(points({"kl": [rises] * 12, "mse": [nearly] * 12}))
    both_fall = told(points({"kl": [nearly[::-1]] * 12, "mse": [rises[::-1]] * 12}))
    for said in (both_rise, both_fall):
        assert "and k1 does not" not in said
        assert "lower under mse than under k1, which alone does not show anchoring" in said
    assert "and k1 does not" in told(points({"kl": [rises] * 12, "mse": [rises[::-1]] * 12}))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.permutations([1.0, 2.0, 3.0, 4.0]), min_size=3, max_size=6), st.floats(0.1, 100))
def test_units_do_not_matter_and_a_turned_order_flips_the_sign(sets: list[list[float]], unit: float) -> None:
    generator = np.random.default_rng
    here = kl_anchoring.summarize_anchoring(points({"kl": sets}), generator(0))
    scaled = kl_anchoring.summarize_anchoring(points({"kl": [[unit * kl for kl in kls] for kls in sets]}), generator(0))
    turned = kl_anchoring.summarize_anchoring(points({"kl": [kls[::-1] for kls in sets]}), generator(0))
    assert scaled["rho"].iloc[0] == pytest.approx(here["rho"].iloc[0])
    assert scaled["p"].iloc[0] == here["p"].iloc[0]
    assert turned["rho"].iloc[0] == pytest.approx(-here["rho"].iloc[0])

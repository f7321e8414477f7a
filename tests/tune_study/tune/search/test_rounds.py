"""Tests of the draws of a search: inside the space, the same at every start, and toward better points."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.search.points import COMPLETE
from tests.fakes.plans import plan_search
from tune_study.plan.errors import PlanError
from tune_study.plan.search import DEFAULT_POINT, FIRST_POINTS
from tune_study.plan.study_plan import StudyPlan, set_points
from tune_study.tune.search import rounds
from tune_study.tune.search.rounds import draw_first_points

BEST_RATE, MAX_RATE = 1e-3, 2e-3
RATE = ("actor.lr=1e-5:1e-1:log",)


def make_search_plan(output: Path, texts: tuple[str, ...] = (), seed: int = 0) -> StudyPlan:
    return plan_search(output, space=texts, seed=seed)


def make_table(plan: StudyPlan, best_rate: float = BEST_RATE, max_rate: float = MAX_RATE) -> pd.DataFrame:
    """Make the outcomes of a made-up study: best at one learning rate, and a collapse above another."""
    rates = [float(dict(point).get("actor.lr", 3e-4)) for point in plan.points.values()]
    return pd.DataFrame(
        {
            "arm": list(plan.points),
            "number": range(len(rates)),
            "state": COMPLETE,
            "seeds": 1,
            "violations": [int(rate > max_rate) for rate in rates],
            "is_feasible": [rate <= max_rate for rate in rates],
            "success": [-abs(math.log10(rate / best_rate)) for rate in rates],
            "values": [{"actor.lr": rate} if number else {} for number, rate in enumerate(rates)],
        }
    )


def draw_next(plan: StudyPlan, is_higher_better: bool = True, **outcomes: float) -> StudyPlan:
    count = plan.search.points_per_round
    drawn = rounds._draw_points(plan, plan.search, make_table(plan, **outcomes), is_higher_better, count)
    return set_points(plan, {**plan.points, **drawn})


def draw_all(plan: StudyPlan, is_higher_better: bool = True, **outcomes: float) -> StudyPlan:
    plan = draw_first_points(plan)
    while plan.has_next_round:
        plan = draw_next(plan, is_higher_better, **outcomes)
    return plan


def list_rates(plan: StudyPlan, first: int = 1) -> np.ndarray:
    return np.array([float(str(point["actor.lr"])) for point in list(plan.points.values())[first:]])


def test_points_are_inside_the_space_and_have_the_settings_whose_condition_they_meet(tmp_path: Path) -> None:
    plan = draw_first_points(make_search_plan(tmp_path))
    assert list(plan.points)[:2] == [DEFAULT_POINT, "point-1"]
    assert len(plan.points) == FIRST_POINTS
    for point in list(plan.points.values())[1:]:
        for dimension in plan.search.space:
            is_met = not dimension.condition or point.get(dimension.condition[0]) == dimension.condition[1]
            others = [other for other in plan.search.space if other.setting == dimension.setting and other != dimension]
            if not is_met:
                assert others or dimension.setting not in point
            elif dimension.values:
                assert point[dimension.setting] in dimension.values
            else:
                assert dimension.low * 0.99 <= float(str(point[dimension.setting])) <= dimension.high * 1.01
    strategies = {point["filter.rollout_filter_strategy"] for point in list(plan.points.values())[1:]}
    assert strategies == {"top_p", "top_k"}


def test_equal_seeds_draw_equal_points_and_others_do_not(tmp_path: Path) -> None:
    first, again, other = (draw_first_points(make_search_plan(tmp_path, seed=seed)).points for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_search_that_begins_again_in_the_middle_draws_the_same_points(tmp_path: Path) -> None:
    plan = draw_next(draw_next(draw_first_points(make_search_plan(tmp_path))))
    points = list(plan.points.items())
    resumed = set_points(make_search_plan(tmp_path), dict(points[: FIRST_POINTS + 4]))
    assert draw_next(resumed).points == plan.points


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_later_points_are_better_and_where_less_is_better_the_draws_go_the_other_way(tmp_path: Path, seed: int) -> None:
    plan = make_search_plan(tmp_path, RATE, seed=seed)
    up, down = (make_table(draw_all(plan, is_higher_better)).iloc[-20:] for is_higher_better in (True, False))
    # An even draw would be 1 power of ten from the best rate on average.
    assert up["success"].mean() > -0.6
    assert down["success"].mean() < up["success"].mean() - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_points_keep_out_of_the_region_where_runs_collapse_even_if_it_is_the_best(tmp_path: Path, seed: int) -> None:
    plan = make_search_plan(tmp_path, RATE, seed=seed)
    bounded, unbounded = (
        np.median(list_rates(draw_all(plan, best_rate=1e-2, max_rate=max_rate), -20)) for max_rate in (MAX_RATE, 1.0)
    )
    assert bounded < 1.5 * MAX_RATE  # half of them are drawn up to a little beyond the edge
    assert unbounded > 4 * MAX_RATE


@pytest.mark.long
@pytest.mark.parametrize(
    ("texts", "count"),
    [
        # Two values times two, of which the default is one.
        (("actor.use_kl_loss=True,False", "actor.ppo_epochs=1:2"), 4),
        # Two points with top_p, whose values exclude top_k_abs, and the default.
        (("filter.rollout_filter_strategy=top_p,top_k_abs", "filter.rollout_filter_value=0.5,0.75"), 3),
    ],
)
def test_a_space_without_further_points_ends_the_search(tmp_path: Path, texts: tuple[str, ...], count: int) -> None:
    plan = draw_first_points(make_search_plan(tmp_path, texts))
    assert len(plan.points) == count
    assert rounds._draw_points(plan, plan.search, None, True, 4) == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [("algorithm.lam=0.999:0.9999", 100), ("algorithm.lam=0.999:0.9999:log", 100), ("actor.lr=1e-6:1e-2", 300)],
)
def test_values_are_rounded_on_the_scale_of_their_interval(tmp_path: Path, text: str, count: int) -> None:
    plan = make_search_plan(tmp_path, (text,))
    (dimension,) = plan.search.space
    shares = np.linspace(0, 1, 1001)
    low, high = dimension.low, dimension.high
    values = low * (high / low) ** shares if dimension.is_log else low + (high - low) * shares
    texts = [rounds._round_within(float(value), dimension) for value in values]
    assert len(set(texts)) > count
    assert all(len(shown) <= 9 for shown in texts)
    for value, shown in zip(values, texts, strict=True):
        assert low <= float(shown) <= high
        width = value * math.log(high / low) if dimension.is_log else high - low
        assert abs(float(shown) - value) <= width / 300


def test_points_whose_settings_exclude_each_other_are_drawn_again(tmp_path: Path) -> None:
    # A count of groups must be whole, so that no point of the second strategy can be trained.
    texts = ("filter.rollout_filter_strategy=top_p,top_k_abs", "filter.rollout_filter_value=0.41:0.99")
    plan = draw_first_points(make_search_plan(tmp_path, texts))
    assert len(plan.points) == FIRST_POINTS
    assert {point["filter.rollout_filter_strategy"] for point in list(plan.points.values())[1:]} == {"top_p"}


def test_a_space_of_which_no_point_can_be_trained_is_refused(tmp_path: Path) -> None:
    plan = make_search_plan(tmp_path, ("filter.rollout_filter_value=0.41:0.99",))
    base = plan.base_config.model_copy(
        update={"filter": plan.ppo_config.filter.model_copy(update={"rollout_filter_strategy": "top_k_abs"})}
    )
    with pytest.raises(PlanError, match="No point of the space can be trained"):
        draw_first_points(replace(plan, base_config=base))

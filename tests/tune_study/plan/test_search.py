"""Tests of the space of a search, of the study of its points, and of its record in the folder."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.catalog import STUDIES
from search_spaces.language_model.family import PPO
from tests.fakes.plans import plan_search
from tests.fakes.run_folders import make_study_record
from trainable.config.run_config import ConfigError, apply_overrides
from trainable.runs.study_record import Dimension
from tune_study.commands.searching import plan_confirmation
from tune_study.folder.outputs import write_study
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.search import DEFAULT_POINT, Search, describe_space, format_dimension, make_space
from tune_study.plan.study_plan import StudyPlan, make_base_config

BASE = make_base_config(STUDIES["kl"], "laptop")
POINTS: Mapping[str, Mapping[str, object]] = {
    "point-1": {"actor.lr": "0.001", "actor.use_kl_loss": "True", "actor.kl_loss_coef": "0.1"}
}


def make_search_plan(
    output: Path, points: Mapping[str, Mapping[str, object]] | None = None, **options: Any
) -> StudyPlan:
    return plan_search(output, points, seeds=2, **{"num_points": 12, **options})


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("actor.lr=1e-5:1e-3", Dimension("actor.lr", 1e-5, 1e-3, is_log=True)),
        ("actor.lr=1e-4:5e-4", Dimension("actor.lr", 1e-4, 5e-4)),  # less than a power of ten: linear
        ("lr=1e-5:1e-3:linear", Dimension("actor.lr", 1e-5, 1e-3)),
        ("actor.entropy_coeff=0:0.1", Dimension("actor.entropy_coeff", 0.0, 0.1)),
        ("actor.ppo_epochs=1:4", Dimension("actor.ppo_epochs", 1, 4, is_integer=True)),
        ("algorithm.adv_estimator=gae,grpo", Dimension("algorithm.adv_estimator", values=("gae", "grpo"))),
    ],
)
def test_a_dimension_is_parsed_with_its_scale(text: str, dimension: Dimension) -> None:
    if text.startswith("lr"):
        with pytest.raises(ConfigError):  # both actor and critic have one
            make_space(PPO, BASE, [text])
        text = f"actor.{text}"
    assert make_space(PPO, BASE, [text]) == (dimension,)


@pytest.mark.parametrize("dimension", make_space(PPO, BASE, ()))
def test_a_printed_dimension_can_be_typed_again(dimension: Dimension) -> None:
    texts = [format_dimension(dimension)]
    if dimension.condition:
        setting, value = dimension.condition
        texts.insert(0, f"{setting}={value},{'top_f' if 'filter' in setting else 'False'}")
    parsed = make_space(PPO, BASE, texts)[-1]
    assert (parsed.low, parsed.high) == pytest.approx((dimension.low, dimension.high))
    assert replace(parsed, low=dimension.low, high=dimension.high) == dimension


@pytest.mark.parametrize("preset", ["laptop", "stress", "paper"])
def test_the_default_space_is_relative_to_the_preset_and_can_be_trained_at_its_corners(preset: str) -> None:
    base = make_base_config(STUDIES["kl"], preset)
    space = make_space(PPO, base, ())
    rate = next(dimension for dimension in space if dimension.setting == "actor.lr")
    default = apply_overrides(base, {}).actor.lr
    assert (rate.low, rate.high, rate.is_log) == (pytest.approx(default / 10), pytest.approx(default * 10), True)
    for dimension in space:
        for value in dimension.values or (dimension.low, dimension.high):
            condition = dict([dimension.condition]) if dimension.condition else {}
            apply_overrides(base, {**condition, dimension.setting: value})


def test_a_setting_alone_brings_those_on_which_it_depends() -> None:
    names = [
        dimension.name for dimension in make_space(PPO, BASE, ["filter.rollout_filter_value", "actor.kl_loss_coef"])
    ]
    assert names == [
        "filter.rollout_filter_strategy",
        "filter.rollout_filter_value if filter.rollout_filter_strategy=top_p",
        "filter.rollout_filter_value if filter.rollout_filter_strategy=top_k",
        "actor.use_kl_loss",
        "actor.kl_loss_coef if actor.use_kl_loss=True",
    ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["actor.lr"] * 2 + ["actor.lr=1e-4:1e-2"], "has actor.lr twice"),
        (["actor.lr=1e-3:1e-4"], "is not an interval"),
        (["actor.lr=0:1e-3:log"], "a log scale has no 0"),
        (["actor.lr=1e-4"], "neither an interval nor two different values"),
        (["algorithm.adv_estimator"], "only these settings have some of their own: actor.lr"),
        (["seed=0:3"], "Seeds are not searched"),
        (
            ["actor.lr=1e-4:1e-3", "actor.use_kl_loss=True,False", "actor.lr=1e-3:1e-2 if actor.use_kl_loss=True"],
            "both",
        ),
        (["actor.entropy_coeff if actor.use_kl_loss=True"], "has a condition and lacks a value"),
        (["actor.kl_loss_coef=1e-3:1 if actor.use_kl_loss=True"], "can never be met: type a --vary actor.use_kl_loss"),
        (["actor.use_kl_loss=True,False", "actor.kl_loss_coef=1e-3:1 if actor.use_kl_loss=yes"], "its values are True"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_space(PPO, BASE, texts)


@pytest.mark.parametrize(
    "text", ["actor.lr=-1:1", "actor.ppo_epochs=1:2.5", "algorithm.adv_estimator=gae,gea", "actor.nothing=1:2"]
)
def test_a_value_that_a_setting_does_not_take_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        make_space(PPO, BASE, [text])


def test_a_search_survives_its_record() -> None:
    search = Search(make_space(PPO, BASE, ()), ("success", "cost"), 24, 4, 7, 5, 10)
    entry = {**asdict(search), "a_later_key": 1}
    assert make_study_record(search=entry).search == search


def test_the_arms_of_a_search_have_the_settings_of_its_points(tmp_path: Path) -> None:
    plan = make_search_plan(tmp_path, POINTS)
    configs = {spec.arm: spec.ppo_config for spec in plan.runs}
    assert plan.baseline == DEFAULT_POINT
    assert configs[DEFAULT_POINT].actor == plan.ppo_config.actor
    assert (configs["point-1"].actor.lr, configs["point-1"].actor.kl_loss_coef) == (0.001, 0.1)
    assert configs["point-1"].critic == plan.ppo_config.critic
    assert plan.folder.name.startswith("search_kl_")


def test_a_search_in_a_folder_is_continued_with_its_points(tmp_path: Path) -> None:
    plan = make_search_plan(tmp_path, POINTS)
    write_study(plan)
    read = plan_from_folder(plan.folder)
    assert (read.search, read.points, read.runs) == (plan.search, plan.points, plan.runs)
    again = merge_with_folder(make_search_plan(tmp_path), extend=False)  # the same command, which knows no point
    assert (again.search, again.points, again.runs) == (plan.search, plan.points, plan.runs)
    longer = merge_with_folder(make_search_plan(tmp_path, num_points=20), extend=False)
    assert longer.search.num_points == 20
    with pytest.raises(PlanError, match="--trials 1 is less than the 2 points"):
        merge_with_folder(make_search_plan(tmp_path, num_points=1), extend=False)


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    plan = make_search_plan(tmp_path, POINTS)
    write_study(plan)
    for change, message in (
        ({"seed": 1}, "--search-seed: 0 -> 1"),
        ({"objectives": ("success", "cost")}, "--objective: success -> success,cost"),
        ({"points_per_round": 2}, "--points-per-round: 4 -> 2"),
        ({"grace_steps": 5}, "--asha: None -> 5"),
        ({"space": plan.search.space[:1]}, "--vary: "),
    ):
        other = replace(make_search_plan(tmp_path), search=replace(plan.search, **change))
        with pytest.raises(PlanError, match="contains a search with other options") as error:
            merge_with_folder(other, extend=False)
        assert message in str(error.value)


def test_the_confirmation_of_a_point_has_its_settings_and_fresh_seeds(tmp_path: Path) -> None:
    plan = make_search_plan(tmp_path, {**POINTS, "point-2": {"actor.lr": "0.002"}})
    write_study(plan)
    confirmation = plan_confirmation(str(plan.folder), "point-1", None, 3, None, extend=False)
    assert confirmation.search is None
    assert confirmation.points == {DEFAULT_POINT: {}, **POINTS}
    assert (confirmation.values, confirmation.seeds) == ((DEFAULT_POINT, "point-1"), (2, 3, 4))
    write_study(confirmation)
    read = plan_from_folder(confirmation.folder)
    assert (read.runs, read.search, read.confirms) == (confirmation.runs, None, confirmation.confirms)


def test_the_space_is_described_as_it_can_be_typed() -> None:
    space = make_space(PPO, BASE, ["actor.lr=1e-5:1e-3", "algorithm.adv_estimator=gae,grpo"])
    assert describe_space(space) == "actor.lr=1e-05:0.001:log; algorithm.adv_estimator=gae,grpo"

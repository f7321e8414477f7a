"""Schedules of settings: their values, their bounds, and their way through dumps and hashes."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import make_grid_axis
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_field_names
from trainable.config.schedules import (
    INTERPOLATIONS,
    SCHEDULABLE_SETTINGS,
    Schedule,
    parse_controller,
    parse_schedule,
    shorten_schedule,
    split_values,
)
from trainable.config.setting_types import flatten_settings
from tune_study.plan.own_study import parse_factors
from tune_study.plan.study_plan import find_changed_settings, make_plan
from tune_study.plan.typed_settings import parse_values

NUMBERS = st.floats(-10, 10)
SCHEDULES = st.builds(
    lambda kind, first, later: Schedule(kind, ((1, first), *sorted(later.items()))),
    st.sampled_from(sorted(INTERPOLATIONS)),
    NUMBERS,
    st.dictionaries(st.integers(2, 999), NUMBERS, min_size=1, max_size=4),
)


def configure(**settings: object) -> RunConfig:
    return apply_overrides(RunConfig(), {name.replace("__", "."): value for name, value in settings.items()})


def make_torch_rates(kind: str, first: float, last: float, steps: int) -> list[float]:
    """The learning rates of torch's scheduler, from `first` in step 1 to `last` in step `steps`."""
    largest = max(first, last)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=largest if kind == "linear" else first)
    scheduler: Any
    if kind == "linear":  # its factors are at most 1
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, first / largest, last / largest, steps - 1)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 1, last)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("first", "last"), [(1e-3, 1e-4), (1e-4, 1e-3)])
def test_values_equal_those_of_the_schedulers_of_torch(kind: str, first: float, last: float) -> None:
    schedule = parse_schedule(f"{kind}({first}, {last}@7)")
    values = [schedule.compute_value(step) for step in range(1, 8)]
    assert values == pytest.approx(make_torch_rates(kind, first, last, 7), rel=1e-12)
    assert values[0] == first
    assert [schedule.compute_value(step) for step in (7, 8, 1000)] == [last] * 3


def test_several_points_are_warmup_and_decay() -> None:
    schedule = parse_schedule(" linear( 0,1 @ 3 , 0.5@5) ")
    assert [schedule.compute_value(step) for step in range(1, 8)] == [0, 0.5, 1, 0.75, 0.5, 0.5, 0.5]
    jumps = parse_schedule("steps(0.1, 0.01@3, 0@5)")
    assert [jumps.compute_value(step) for step in range(1, 7)] == [0.1, 0.1, 0.01, 0.01, 0, 0]


@given(SCHEDULES, st.integers(1, 1100))
def test_values_stay_between_those_of_the_points(schedule: Schedule, step: int) -> None:
    values = [value for _, value in schedule.points]
    assert min(values) - 1e-12 <= schedule.compute_value(step) <= max(values) + 1e-12
    assert all(schedule.compute_value(point) == value for point, value in schedule.points)


@given(SCHEDULES)
def test_a_text_is_parsed_to_the_same_schedule(schedule: Schedule) -> None:
    assert parse_schedule(schedule.text) == schedule
    assert split_values(f"1, {schedule.text},none") == ("1", schedule.text, "none")
    assert not set(shorten_schedule(schedule.text)) & set(" ,()/")


@given(SCHEDULES)
def test_values_are_whole_if_the_checked_ones_are(schedule: Schedule) -> None:
    whole = schedule._replace(points=tuple((step, float(round(value))) for step, value in schedule.points))
    if all(whole.compute_value(step).is_integer() for step in whole.checked_steps):
        assert all(math.isclose(value, round(value)) for value in map(whole.compute_value, range(1, 1000)))


# ---------------------------------------------------------------------------- in a configuration


def test_each_of_them_is_a_number_of_a_run() -> None:
    defaults = flatten_settings(RunConfig().model_dump())
    assert set(SCHEDULABLE_SETTINGS) <= set(list_field_names(RunConfig))
    for name in SCHEDULABLE_SETTINGS:
        assert isinstance(defaults[name], float)
        config = apply_overrides(RunConfig(), {name: f"steps({defaults[name]}, {defaults[name] * 0.9 or 0.5}@9)"})
        assert [*config.schedules] == [name]
        for step, value in ((8, defaults[name]), (9, defaults[name] * 0.9 or 0.5)):
            assert flatten_settings(config.at_step(step).model_dump())[name] == value


def test_a_setting_holds_its_first_value_and_a_dump_the_text() -> None:
    config = configure(actor__kl_loss_coef="linear(0,1e-1@11)", algorithm__kl_ctrl__kl_coef="cosine(0.1, 0@20)")
    assert config.actor.kl_loss_coef == 0
    assert config.at_step(6).actor.kl_loss_coef == 0.05
    assert config.at_step(6).schedules == {}
    dump = config.model_dump(mode="json")
    assert dump["actor"]["kl_loss_coef"] == "linear(0, 0.1@11)"
    assert dump["algorithm"]["kl_ctrl"]["kl_coef"] == "cosine(0.1, 0@20)"
    for copy in (RunConfig.model_validate(dump), RunConfig(**dump), pickle.loads(pickle.dumps(config))):
        assert copy == config
        assert copy.model_dump() == config.model_dump()
    assert config.model_copy(update={"seed": 1}).schedules == config.schedules
    # A first value that equals the default is a change, too.
    first = RunConfig().actor.kl_loss_coef
    changed = configure(actor__kl_loss_coef=f"linear({first}, 0@9)")
    assert changed.model_dump(exclude_defaults=True) == {"actor": {"kl_loss_coef": f"linear({first}, 0@9)"}}
    assert changed != RunConfig()


def test_a_controller_is_parsed_with_its_defaults_and_dumped_in_full() -> None:
    entropy = configure(actor__entropy_coeff=" target_entropy( .3,0.01 )")
    assert (entropy.actor.entropy_coeff, entropy.at_step(9, {"actor.entropy_coeff": 0.5}).actor.entropy_coeff) == (
        0,
        0.5,
    )
    config = configure(actor__use_kl_loss=True, actor__kl_loss_coef="target_kl(0.1, 0.02)")
    assert (config.actor.kl_loss_coef, config.at_step(9).actor.kl_loss_coef, config.actor.use_kl_loss) == (
        0.02,
        0.02,
        True,
    )
    assert config.at_step(9).controllers == {}
    dumps = [entropy.model_dump(mode="json"), config.model_dump(mode="json")]
    assert dumps[0]["actor"]["entropy_coeff"] == "target_entropy(0.3, 0.01, 0, 1)"
    assert dumps[1]["actor"]["kl_loss_coef"] == "target_kl(0.1, 0.02, 10000)"
    for copy in (RunConfig.model_validate(dumps[1]), pickle.loads(pickle.dumps(config))):
        assert copy == config
        assert [*copy.controllers] == ["actor.kl_loss_coef"]
    assert parse_controller("target_kl(0.1, 0.02)", "actor.kl_loss_coef") == config.controllers["actor.kl_loss_coef"]
    # A coefficient that starts at a number is another run than that number.
    assert configure(actor__use_kl_loss=True, actor__kl_loss_coef=0.02).compute_hash() != config.compute_hash()
    assert configure(actor__entropy_coeff=0).compute_hash() != entropy.compute_hash()


def test_a_constant_schedule_is_the_constant() -> None:
    constant = configure(actor__lr="linear(1e-4, 1e-4@60)")
    assert constant == configure(actor__lr=1e-4)
    assert constant.compute_hash() == configure(actor__lr=1e-4).compute_hash()
    assert constant.at_step(7) is constant


def test_the_hash_depends_on_the_schedule_and_a_longer_run_is_the_same_run() -> None:
    schedules = ["linear(1e-4, 1e-5@60)", "cosine(1e-4, 1e-5@60)", "linear(1e-4, 1e-5@61)", "1e-4"]
    configs = [configure(actor__lr=schedule) for schedule in schedules]
    assert len({config.compute_hash() for config in configs}) == len(schedules)
    longer = configure(actor__lr=schedules[0], trainer__total_training_steps=1000)
    assert longer.is_same_run(configs[0])
    assert configs[0].compute_hash() == configure(actor__lr=" linear(0.0001,1e-5@60)").compute_hash()


def test_a_zero_in_a_schedule_leaves_the_kl_loss_on() -> None:
    for schedule in ("linear(0, 0.1@9)", "steps(0.1, 0@9)"):
        config = configure(actor__use_kl_loss=True, actor__kl_loss_coef=schedule)
        assert all(config.at_step(step).actor.use_kl_loss for step in (1, 9, 20))
    assert not configure(actor__use_kl_loss=True, actor__kl_loss_coef=0).actor.use_kl_loss


def test_a_setting_is_read_if_one_of_the_values_makes_it_so() -> None:
    name = "filter.rollout_filter_type"
    assert name in configure(filter__rollout_filter_value=1).find_unread_settings()
    assert name not in configure(filter__rollout_filter_value="steps(1, 0.5@9)").find_unread_settings()
    assert name not in configure(filter__rollout_filter_value="steps(0.5, 1@9)").find_unread_settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actor.kl_loss_coef": "linear(0.1, -1@10)"}, r"actor.kl_loss_coef=-0.02\d*: must be greater than or equal"),
        ({"algorithm.lam": "steps(1, 0.9@5, 1.5@9)"}, "algorithm.lam=1.5: must be less than or equal to 1"),
        ({"actor.lr": "linear(0, 1e-5@10)"}, "actor.lr=0.0: must be greater than 0"),
        ({"actor.lr": "linear(1e-5, 1e39@10)"}, "number of float32|must be at most"),
        (
            {"filter.rollout_filter_strategy": "top_k_abs", "filter.rollout_filter_value": "linear(8, 1@10)"},
            "filter.rollout_filter_value=7.2.*whole number",
        ),
        ({"filter.rollout_filter_value": "linear(0.5, 2@10)"}, r"must be in \(0, 1\] for top_p"),
        ({"actor.lr": "linear(0.1, 0, 60)"}, r"actor.lr=linear\(0.1, 0, 60\): must be .* such as linear\(0.1, 0@60\)"),
        ({"actor.lr": "linear(0.1)"}, "such as linear"),
        ({"actor.lr": "linear(nan, 1@5)"}, "such as linear"),
        ({"actor.lr": "steps(1e-6, 1e-5@20, 1e-6@10)"}, "increasing steps"),
        ({"actor.lr": "linear(1e-6, 1e-5@1)"}, "increasing steps from 2"),
        ({"actor.lr": "quadratic(1e-6, 1e-5@9)"}, "valid number"),
        ({"actor.lr": "target_kl(0.1)"}, r"actor.lr=target_kl\(0.1\): target_kl is for actor.kl_loss_coef only"),
        ({"actor.kl_loss_coef": "target_entropy(0.2)"}, "target_entropy is for actor.entropy_coeff only"),
        ({"trainer.test_freq": "target_kl(0.1)"}, "one value for all steps"),
        *(
            (
                {"actor.entropy_coeff": f"target_entropy({numbers})"},
                r"must be target_entropy\(TARGET, DELTA, MIN, MAX\)",
            )
            for numbers in ("", "0.2, 0", "0.2, 0.1, 0.5, 0.4", "0.2, 0.1, -1", "0.2, 0.1, 0, 1, 2")
        ),
        *(
            ({"actor.kl_loss_coef": f"target_kl({numbers})"}, r"must be target_kl\(TARGET, START, HORIZON\)")
            for numbers in ("0", "-0.1", "0.1, 0", "0.1, 0.1, 0", "0.1 0.2", "0.1, 0.1@5", "1e999")
        ),
        (
            {"actor.use_kl_loss": True, "actor.kl_loss_coef": "target_kl(0.1, 0.01, 1)"},
            "the horizon must be above 0.2 times",
        ),
        (
            {
                "rollout.name": "vllm",
                "rollout.recompute_logprobs": False,
                "actor.entropy_coeff": "target_entropy(0.2)",
            },
            "target_entropy reads them",
        ),
        ({"trainer.test_freq": "linear(1, 5@9)"}, "trainer.test_freq=.* one value for all steps.*actor.lr, critic.lr"),
        ({"env.max_turn": "steps(1, 5@9)"}, "one value for all steps"),
        ({"actor.use_kl_loss": "steps(0, 1@9)"}, "one value for all steps"),
        (
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.kl_coef": "linear(0.1, 0.2@5)",
            },
            "algorithm.kl_ctrl.type=adaptive adjusts",
        ),
    ],
)
def test_a_value_out_of_bounds_and_another_setting_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), settings)


def test_a_whole_number_may_go_down_in_steps() -> None:
    groups = {"filter__rollout_filter_strategy": "top_k_abs", "filter__rollout_filter_value": "linear(8, 2@7)"}
    assert [configure(**groups).at_step(step).filter.rollout_filter_value for step in (1, 2, 9)] == [8, 7, 2]


def test_a_sandbox_has_no_schedules() -> None:
    with pytest.raises(ConfigError, match="No setting of this study can have one"):
        apply_overrides(UpdateRuleConfig.model_validate({}), {"lr": "linear(0.1, 0@9)"})


def test_an_arm_may_be_a_schedule() -> None:
    values = parse_values("0, linear(0.1, 0@60), 0.1", "--kl-values")
    plan = make_plan(STUDIES["kl"], "laptop", "a test", {}, values, 1, Path("out"))
    assert [spec.arm for spec in plan.runs] == ["0", "linear(0.1, 0@60)", "0.1"]
    spec = plan.runs[1]
    assert "linear-01-0@60" in spec.run_id
    assert find_changed_settings(spec.config)["actor.kl_loss_coef"] == "linear(0.1, 0@60)"
    controllers = parse_values("0, target_entropy(0.2, 0.005)", "--entropy-values")
    arms = make_plan(STUDIES["entropy"], "laptop", "a test", {}, controllers, 1, Path("out")).runs
    assert [spec.arm for spec in arms] == ["0", "target_entropy(0.2, 0.005)"]
    assert "target_entropy-02-0005" in arms[1].run_id
    assert spec.ppo_config.at_step(60).actor.kl_loss_coef == 0
    assert spec.ppo_config.actor.use_kl_loss
    grid = make_grid_axis({"actor.lr": ("1e-4", "linear(1e-4, 1e-5@9)"), "actor.ppo_epochs": ("1",)})
    assert list(grid.named_settings) == ["lr1e-4-ppo_epochs1", "lrlinear-1e-4-1e-5@9-ppo_epochs1"]
    assert parse_factors(["actor.lr=1e-4,linear(1e-4, 1e-5@9)"]) == {"actor.lr": ("1e-4", "linear(1e-4, 1e-5@9)")}

"""The properties that are declared for named choices hold for the functions with those names."""

import pytest
import torch

from tests.fakes.scripted import make_small_config
from trainable.algo.filters import parse_rule, select_groups
from trainable.algo.losses import KL_FORMULAS
from trainable.algo.names import KL_KINDS
from trainable.config.choices import FILTER_STRATEGIES, POLICY_LOSSES
from trainable.config.run_config import RunConfig
from trainable.config.sections import ActorConfig, FilterConfig
from trainable.ppo.phases import plan_step


def test_every_formula_can_be_set_and_settings_of_a_choice_belong_to_its_section() -> None:
    assert set(KL_FORMULAS) == set(KL_KINDS.values())
    for choices, section in ((POLICY_LOSSES, ActorConfig), (FILTER_STRATEGIES, FilterConfig)):
        assert {setting for choice in choices.values() for setting in choice.settings} <= section.model_fields.keys()


@pytest.mark.parametrize("name", FILTER_STRATEGIES)
def test_a_strategy_counts_groups_where_its_rule_does(name: str) -> None:
    num_kept = int(select_groups(torch.ones(3), parse_rule(name, 1)).sum())  # 1 is a group, or else all of something
    assert (num_kept == 1) == FILTER_STRATEGIES[name].counts_groups


ANALYSIS = {
    f"trainer__gradient_analysis_{name}": value for name, value in (("mode", True), ("only", True), ("every", 1))
}


@pytest.mark.parametrize(
    ("settings", "step", "due_phases"),
    [
        ({}, 1, {"critic", "policy", "values"}),
        ({"trainer__test_freq": 2}, 2, {"critic", "policy", "values", "validation"}),
        ({"trainer__critic_warmup": 3}, 2, {"critic", "values"}),
        ({"algorithm__adv_estimator": "grpo"}, 1, {"policy"}),
        ({"critic__shared_trunk": True}, 1, {"policy", "values"}),
        (ANALYSIS, 1, {"values", "analysis"}),
    ],
)
def test_the_plan_of_a_step_has_the_due_phases(settings: dict[str, object], step: int, due_phases: set[str]) -> None:
    config: RunConfig = make_small_config(**{"trainer__total_training_steps": 9, "trainer__test_freq": 0, **settings})
    assert {name for name, is_due in plan_step(step, config)._asdict().items() if is_due} == due_phases

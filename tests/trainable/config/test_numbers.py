"""Numbers and sizes that no run can use are refused with the settings, before anything starts."""

import math
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from trainable.algo.batching import adjust_copy
from trainable.algo.losses import adapt_kl_coef
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.config.setting_types import MAX_EPISODES, MAX_FLOAT, MAX_INTEGER, MIN_FLOAT

FAMILIES = (RunConfig, UpdateRuleConfig)


def contains(annotation: Any, wanted: type) -> bool:
    return annotation is wanted or any(contains(entry, wanted) for entry in typing.get_args(annotation))


def list_fields(section: type[BaseModel], wanted: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List the dotted names of all fields of a configuration that hold a number of type `wanted`, and their types."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from list_fields(field.annotation, wanted, f"{prefix}{name}.")
        elif contains(field.annotation, wanted):
            yield prefix + name, field.annotation


OUT_OF_RANGE: dict[type, list[float]] = {float: [1e300, -1e-60], int: [MAX_INTEGER + 1, -(10**18)]}
"""Numbers that float32 cannot hold, and integers that no size can have."""
FIELDS = [
    pytest.param(config_class, name, kind, annotation, id=f"{config_class.__name__}.{name}-{kind.__name__}")
    for config_class in FAMILIES
    for kind in OUT_OF_RANGE
    for name, annotation in list_fields(config_class, kind)
]


def explain_refusal(config_class: type[BaseRunConfig], **overrides: object) -> str:
    """Return the message with which the settings are refused, and "" if they are not."""
    try:
        apply_overrides(config_class.model_validate({}), {key.replace("__", "."): overrides[key] for key in overrides})
    except ConfigError as error:
        return str(error)
    return ""


def test_the_bounds_are_those_of_float32() -> None:
    assert float(np.finfo(np.float32).max) == MAX_FLOAT
    assert float(np.finfo(np.float32).smallest_normal) == MIN_FLOAT


@pytest.mark.parametrize(("config_class", "name", "kind", "annotation"), FIELDS)
def test_a_number_out_of_range_is_refused(
    config_class: type[BaseRunConfig], name: str, kind: type, annotation: Any
) -> None:
    for value in OUT_OF_RANGE[kind]:
        is_pair = typing.get_origin(annotation) is tuple
        message = explain_refusal(config_class, **{name: [0.9, value] if is_pair else value})
        assert name in message, value
        assert "must be " in message, value


@pytest.mark.parametrize("section", ["actor", "critic"])
@pytest.mark.parametrize("beta", [0.0, 0.9, 1 - 2**-53])
def test_a_learning_rate_has_a_first_step_size_in_float32(section: str, beta: float) -> None:
    settings = {f"{section}.betas": [beta, 0.999]}
    assert explain_refusal(RunConfig, **settings, **{f"{section}.lr": MAX_FLOAT * (1 - beta) * 0.999}) == ""
    largest = min(MAX_FLOAT, MAX_FLOAT * (1 - beta) * 1.001)
    message = explain_refusal(RunConfig, **settings, **{f"{section}.lr": largest})
    assert (f"{section}.lr=" in message) == (beta > 0)


sizes = st.integers(1, 40)


@given(groups=sizes, group_size=sizes, mini_batch=sizes)
def test_the_largest_batch_of_a_step_is_that_of_a_step_without_a_filter(
    groups: int, group_size: int, mini_batch: int
) -> None:
    batch_sizes = {"actor.ppo_mini_batch_size": mini_batch, "actor.ppo_micro_batch_size_per_gpu": 1}
    config = apply_overrides(RunConfig(), {"env.env_groups": groups, "env.group_size": group_size, **batch_sizes})
    multiple = math.lcm(groups, mini_batch)
    assert config.max_batch_size == len(adjust_copy(groups * group_size, multiple, torch.Generator().manual_seed(0)))
    # An adaptive coefficient stays positive with every horizon that is allowed, and would not with the largest refused.
    settings = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    bound = 0.2 * config.max_batch_size
    with pytest.raises(ConfigError, match=r"algorithm.kl_ctrl.horizon=.*: must be above 0.2 times"):
        apply_overrides(config, {**settings, "algorithm.kl_ctrl.horizon": bound})
    allowed = apply_overrides(config, {**settings, "algorithm.kl_ctrl.horizon": bound * 1.001}).algorithm.kl_ctrl
    for horizon, is_positive in ((allowed.horizon, True), (bound * 0.999, False)):
        factor = 1 - 0.2 * config.max_batch_size / horizon
        assert (factor > 0) == is_positive
    assert adapt_kl_coef(0.1, 0.0, 0.1, config.max_batch_size, allowed.horizon) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(
            (
                {"actor__entropy_coeff": value},
                f"actor.entropy_coeff={float(value)}: must be a number of float32, in size from 1.2e-38 to 3.4e+38 "
                "(the default is 0.0).",
            )
            for value in ("-1e39", "5e-324", math.nextafter(MAX_FLOAT, math.inf), math.nextafter(MIN_FLOAT, 0))
        ),
        ({"env__env_groups": 1_000_001}, "env.env_groups=1000001: must be less than or equal to 1000000."),
        ({"env__env_groups": 2_501}, "env.env_groups=2501 takes 1000400 training levels in 400 steps"),
        ({"env__group_size": 125_001}, "env.group_size=125001: env_groups=8 groups of that size are 1000008 episodes"),
        ({"env__val_group_size": 1_954}, "env.val_group_size=1954: val_env_groups=512 groups"),
        ({"env__max_actions_per_turn": 1_001}, "env.max_actions_per_turn=1001: must be less than or equal to 1000."),
        ({"actor__ppo_mini_batch_size": 1_000_004}, "actor.ppo_mini_batch_size=1000004: the batch of a step"),
        ({"actor__ppo_epochs": 1_001}, "actor.ppo_epochs=1001: must be less than or equal to 1000."),
        (
            {"trainer__gradient_analysis_env_groups": 1_000, "trainer__gradient_analysis_group_size": 1_001},
            "trainer.gradient_analysis_group_size=1001: gradient_analysis_env_groups=1000 groups",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_allowed(settings: dict[str, object], words: str) -> None:
    assert explain_refusal(RunConfig, **settings).startswith(words)


@pytest.mark.parametrize(
    "settings",
    [
        *({"actor__entropy_coeff": value} for value in (MAX_FLOAT, -MAX_FLOAT, MIN_FLOAT, -MIN_FLOAT, 0.0)),
        {"env__env_groups": 2_500, "env__group_size": 1, "actor__ppo_mini_batch_size": 4},
        {"env__group_size": MAX_EPISODES // 8},
        {"env__val_group_size": 1_953},
        {"trainer__gradient_analysis_env_groups": 1_000, "trainer__gradient_analysis_group_size": 1_000},
    ],
)
def test_what_just_fits_is_not_refused(settings: dict[str, object]) -> None:
    assert explain_refusal(RunConfig, **settings) == ""

"""Runs with an extreme number in each setting: refused before the start, trained, or non-finite with step and name.

The settings come from the configurations, so that a new one is covered without a change here. The normal suite runs a
sample of the cases; `make test-all` runs all of them.
"""

import random
import re
from collections.abc import Mapping

import pytest

from tests.fakes.trainers import make_quiet_trainer
from tests.trainable.config.test_numbers import list_fields
from trainable.config.run_config import ConfigError, RunConfig
from trainable.config.setting_types import MAX_FLOAT, MIN_FLOAT
from trainable.rollout.engine import EngineMismatchError
from trainable.runs.failures import NonFiniteError

SAMPLE_SIZE = 4
Settings = Mapping[str, object]
SIZES = (MAX_FLOAT, 1e30, 1e9, 1.0, 1e-9, 1e-30, MIN_FLOAT)
EXTREMES = (0.0, *SIZES, *(-size for size in SIZES), 1e300, 1e-60)
READERS: Mapping[str, Settings] = {
    # Settings with which a run reads others, whose names begin like the key.
    "actor.kl_loss": {"actor.use_kl_loss": True, "actor.kl_loss_type": "low_var_kl"},
    "actor.cppo": {"actor.policy_loss": "cppo", "actor.ppo_epochs": 2},
    "actor.stapo": {"actor.stapo_tau_p": 0.5},
    "actor.tpo_eta": {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill"},
    "algorithm.kl_ctrl": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.1,
    },
    "algorithm.high_level_gamma": {"algorithm.bi_level_gae": True},
    "filter.": {"filter.rollout_filter_value": 0.9},
    "model.lora_alpha": {"model.lora_rank": 2},
}
NAMED = re.compile(r"(logits|rewards|loss|gradient|weight|log-probs|scores|KL)")


def list_ppo_cases() -> list[Settings]:
    cases: list[Settings] = []
    for name, _ in list_fields(RunConfig, float):
        default = {}
        for beginning, readers in READERS.items():
            default |= readers if name.startswith(beginning) else {}
        for value in EXTREMES:
            # Both betas of AdamW are one setting.
            number = (value, 0.999) if name.endswith(".betas") else value
            others = {key: setting for key, setting in default.items() if key != name}
            cases.append({**others, name: number})
    return cases


PPO_CASES = list_ppo_cases()
"""The setting that is tested comes last in a case."""


def check_refusal(message: str, name: str) -> None:
    assert name in message, message


def check_message(message: str, step: int) -> None:
    assert re.search(rf"\bstep {step}\b", message), message
    assert NAMED.search(message), message


def check_ppo_run(settings: Settings) -> None:
    try:
        overrides = {key.replace(".", "__"): value for key, value in settings.items()}
        trainer = make_quiet_trainer(trainer__nonfinite_patience=1, **overrides)
    except ConfigError as error:
        check_refusal(str(error), list(settings)[-1])
        return
    except EngineMismatchError:  # so much noise that the sampler is not the policy any more
        if list(settings)[-1] != "rollout.weight_noise":
            raise
        return
    try:
        for _ in range(2):
            trainer.step()
        trainer.evaluate("val", "sampled")
    except NonFiniteError as error:
        check_message(str(error), trainer.step_index)


@pytest.mark.parametrize("settings", random.Random(1).sample(PPO_CASES, SAMPLE_SIZE), ids=str)
def test_a_run_with_an_extreme_setting_ends_well(settings: Settings) -> None:
    check_ppo_run(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in list_fields(RunConfig, float)])
def test_every_run_with_an_extreme_setting_ends_well(name: str) -> None:
    for settings in PPO_CASES:
        if list(settings)[-1] == name:
            check_ppo_run(settings)

"""Runs with an extreme number in each setting: refused before the start, trained, or non-finite with step and name.

The settings come from the configurations, so that a new one is covered without a change here. The normal suite runs a
sample of the cases; `make test-all` runs all of them.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest

from sandboxes.update_rules.config.rules import RULES
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import make_trainer
from tests.fakes.trainers import make_quiet_trainer
from tests.trainable.config.test_numbers import list_fields
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
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


def list_sandbox_cases() -> Iterator[Settings]:
    names = [name for name, _ in list_fields(UpdateRuleConfig, float) if not name.startswith("trainer.")]
    for method in RULES:
        yield from ({"method": method, name: value} for name in names for value in EXTREMES)


def draw_sample(cases: Sequence[Settings], seed: int) -> list[Settings]:
    return random.Random(seed).sample(cases, SAMPLE_SIZE)


def make_params(cases: Sequence[Settings]) -> list[object]:
    ids = [" ".join(f"{key}={value}" for key, value in settings.items()) for settings in cases]
    return [pytest.param(settings, id=id_) for settings, id_ in zip(cases, ids, strict=True)]


PPO_CASES, SANDBOX_CASES = list_ppo_cases(), list(list_sandbox_cases())
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


@pytest.mark.parametrize("settings", make_params(draw_sample(PPO_CASES, seed=1)))
def test_a_run_with_an_extreme_setting_ends_well(settings: Settings) -> None:
    check_ppo_run(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in list_fields(RunConfig, float)])
def test_every_run_with_an_extreme_setting_ends_well(name: str) -> None:
    for settings in PPO_CASES:
        if list(settings)[-1] == name:
            check_ppo_run(settings)


SMALL_SANDBOX: Settings = {
    "batch_size": 8,
    "group_size": 4,
    "hidden": 8,
    "seq_len": 3,
    "d_model": 8,
    "nhead": 1,
    "num_layers": 1,
    "trainer.total_training_steps": 2,
    "trainer.test_freq": 1,
}
TASKS: tuple[Settings, ...] = (
    # At least one of them suits each rule.
    {"task": "token_reversal", "inner_epochs": 2},
    {"task": "token_reversal", "inner_epochs": 2, "binary_reward": True},
    {"task": "token_reversal", "replay_capacity": 2},
    {"task": "mnist", "inner_epochs": 2},
    {"task": "mnist"},
)


def make_sandbox_config(method: str) -> UpdateRuleConfig:
    refusals = []
    for task in TASKS:
        try:
            return apply_overrides(UpdateRuleConfig(), {**SMALL_SANDBOX, **task, "method": method})
        except ConfigError as error:
            refusals.append(str(error))
    raise AssertionError(f"no task suits {method}: {refusals}")


def check_sandbox_run(settings: Settings) -> None:
    (method, name) = settings
    base = make_sandbox_config(str(settings[method]))
    try:
        config = apply_overrides(base, {name: settings[name]})
    except ConfigError as error:
        check_refusal(str(error), name)
        return
    trainer, failures = make_trainer(config, [0, 1]), {}
    while trainer.seeds:
        step = trainer.step_index
        new_failures = trainer.step().failures
        for message in new_failures.values():
            check_message(message.replace("values of ", ""), step)
        failures |= new_failures
    assert set(failures) | set(trainer.final_states) == {0, 1}
    for state in trainer.final_states.values():
        assert bool(state.tensors["adam/weights"].isfinite().all())


@pytest.mark.parametrize("settings", make_params(draw_sample(SANDBOX_CASES, seed=1)))
def test_a_sandbox_with_an_extreme_setting_ends_well(settings: Settings) -> None:
    check_sandbox_run(settings)


@pytest.mark.slow
@pytest.mark.parametrize("method", RULES)
def test_every_sandbox_with_an_extreme_setting_ends_well(method: str) -> None:
    for settings in SANDBOX_CASES:
        if settings["method"] == method:
            check_sandbox_run(settings)

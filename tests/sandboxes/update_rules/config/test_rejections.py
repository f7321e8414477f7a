"""Tests that invalid configurations are refused with a reason, and that published ones are accepted."""

from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from sandboxes.toys.settings import RunnerConfig
from sandboxes.update_rules.config.settings import (
    BANDIT_TASKS,
    CHAIN_TASKS,
    SEQUENCE_NOISE_MODES,
    SEQUENCE_TASKS,
    SHARED_NOISE_MODES,
    TASKS,
    UpdateRuleConfig,
)
from tests.oracles.update_rules import CANDIDATE, CLIPPED, DELIGHT, GROUPED, SEQUENCE_ONLY, TARGET
from tests.strategies.update_rules import REQUIRED_SETTINGS
from trainable.config.run_config import format_validation_error

SEQUENCE = {"task": "token_reversal"}
NOISE = {"reward_noise": 0.2, "reward_noise_mode": "label_flip"}
Case = tuple[dict[str, object], str]


def make_cases(names: tuple[str, ...], settings: Mapping[str, object], words: str) -> list[Case]:
    return [({**SEQUENCE, **REQUIRED_SETTINGS.get(name, {}), "method": name, **settings}, words) for name in names]


NUMBER_CASES: list[Case] = [
    ({"kondo_keep": 1.5}, "kondo_keep=1.5: must be "),
    ({"reward_noise": -0.1}, "reward_noise=-0.1"),
    ({"trainer": {"total_training_steps": 0}}, "total_training_steps=0"),
    ({"trainer": {"test_freq": 0}}, "test_freq=0"),
    *make_cases(DELIGHT, {"eta": 0}, "set eta=1"),
    *make_cases(("PMDMean",), {"eta": 0}, "set eta=1"),
    *make_cases(TARGET, {"tpo_eta": 0}, "set tpo_eta=1"),
    ({"delay": 1000}, "set num_steps above 1000"),
    *make_cases(CLIPPED, {"clip_low": 1.0}, "set clip_low=0.2"),
]
SHAPE_CASES: list[Case] = [
    ({"d_model": 64, "nhead": 3}, "nhead=3 does not divide d_model=64: set nhead=1, or another divisor"),
    ({"delay": 4, "replay_capacity": 4}, "set replay_capacity above 4, or delay=0"),
    ({"delay": 4, "replay_capacity": 1}, "replay_capacity=1 drops every batch before delay=4"),
    ({"task": "chain_arithmetic", "seq_len": 1}, "set seq_len=2 or more"),
    ({"task": "format_answer", "seq_len": 1}, "set seq_len=2 or more"),
    ({"task": "masked_reversal", "seq_len": 4, "score_len": 5}, "score_len=5 scores more positions than seq_len=4"),
    *(({"task": task, "binary_reward": True}, "set binary_reward=false") for task in CHAIN_TASKS),
]
NOISE_CASES: list[Case] = [
    ({"reward_noise": 0.2}, "reward_noise=0.2 with reward_noise_mode=none: set"),
    ({"reward_noise_mode": "label_flip"}, "reward_noise=0.0 with reward_noise_mode=label_flip: set"),
    *(
        ({"task": task, "reward_noise": 0.2, "reward_noise_mode": mode}, "set reward_noise_mode=false_positive_action0")
        for task in BANDIT_TASKS
        for mode in SEQUENCE_NOISE_MODES
    ),
]
REGIME_CASES: list[Case] = [
    *make_cases((*GROUPED, *CANDIDATE), {"group_size": 1}, "set group_size=2 or more"),
    *make_cases(GROUPED, {"batch_size": 100, "group_size": 8}, "set batch_size=96"),
    *(case for task in BANDIT_TASKS for case in make_cases(SEQUENCE_ONLY, {"task": task}, "set task=token_reversal")),
    *(
        case
        for task in CHAIN_TASKS
        for case in make_cases(
            (*CANDIDATE, "DGToken"), {"task": task}, "set task=token_reversal or task=masked_reversal"
        )
    ),
    *(case for task in BANDIT_TASKS for case in make_cases(CANDIDATE, {"task": task}, "or task=masked_reversal")),
    *make_cases((*CANDIDATE, "DGToken"), {"binary_reward": True}, "masked_reversal, binary_reward=false"),
    *make_cases((*CANDIDATE, "DGToken"), NOISE, "binary_reward=false reward_noise=0 reward_noise_mode=none"),
    *make_cases(CANDIDATE, {"delay": 1}, "set delay=0 replay_capacity=0"),
    *make_cases(CANDIDATE, {"replay_capacity": 2}, "set delay=0 replay_capacity=0"),
    *(
        case
        for measure in ("diagnostics", "entropy_diagnostics", "oracle_fit")
        for case in make_cases(
            CANDIDATE, {measure: True}, "set diagnostics=false entropy_diagnostics=false oracle_fit=false"
        )
    ),
    ({"method": "ReplayDG"}, "set replay_capacity=5, or method=DG"),
    ({"method": "ReplayDG", "delay": 4}, "set replay_capacity=5, or method=DG"),
    ({"method": "FreshDG"}, "set replay_capacity=5 or delay=4, or method=DG"),
    *(({"method": "LogGrowth", "task": task}, "set task=mnist") for task in SEQUENCE_TASKS),
    *make_cases(("LogGrowth", "DAPO", "DAPOLite"), {"task": "lm_bandit", "kl_weight": 0.1}, "set kl_weight=0"),
    *make_cases(("LogGrowth", "MaxRL", "TPOFullAction"), NOISE, "noise breaks that: set reward_noise=0"),
    *(({"method": "MaxRL", "task": task}, "set task=token_reversal binary_reward=true") for task in SEQUENCE_TASKS),
    ({"method": "MaxRL", "task": "lm_bandit", "kl_weight": 0.1}, "or kl_weight=0 with task=lm_bandit"),
    *(({"method": "TPOFullAction", "task": task}, "set task=mnist") for task in TASKS if task != "mnist"),
    *make_cases(("TPOFullAction",), {"delay": 1}, "set delay=0 replay_capacity=0 inner_epochs=1"),
    *make_cases(("TPOFullAction",), {"replay_capacity": 1}, "set delay=0 replay_capacity=0 inner_epochs=1"),
    *make_cases(("TPOFullAction",), {"inner_epochs": 2}, "set delay=0 replay_capacity=0 inner_epochs=1"),
]
REFUSED_CASES = [*NUMBER_CASES, *SHAPE_CASES, *NOISE_CASES, *REGIME_CASES]


def get_rejection(settings: Mapping[str, object]) -> str:
    with pytest.raises(ValidationError) as refusal:
        UpdateRuleConfig.model_validate(settings)
    return format_validation_error(refusal.value)


@pytest.mark.parametrize(("settings", "words"), REFUSED_CASES, ids=str)
def test_a_rejection_says_what_to_set(settings: dict[str, object], words: str) -> None:
    text = get_rejection(settings)
    assert words in text
    assert text.endswith(".")
    assert "{" not in text
    if ": must be " not in text:
        assert "set " in text


def test_every_rejection_has_a_case() -> None:
    """Each is the first that applies to one of the cases, so that none is out of reach."""
    first_places: set[int] = set()
    for settings, _ in (*NUMBER_CASES, *SHAPE_CASES, *NOISE_CASES, *REGIME_CASES):
        trainer_config = RunnerConfig.model_construct(**settings.get("trainer", {}))
        config = UpdateRuleConfig.model_construct(**{**settings, "trainer": trainer_config})
        rejections = list(config.list_rejections().values())
        first_places |= {rejections.index(True)} if True in rejections else set()
    assert first_places == set(range(len(rejections)))


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        *((task, mode) for task in TASKS for mode in SHARED_NOISE_MODES),
        *(("token_reversal", mode) for mode in SEQUENCE_NOISE_MODES),
    ],
)
def test_shared_noise_suits_every_task_and_sequences_have_their_own(task: str, mode: str) -> None:
    UpdateRuleConfig.model_validate({"task": task, "reward_noise": 0.2, "reward_noise_mode": mode})

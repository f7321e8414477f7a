"""Tests that a member of an ensemble has the same update as alone, for every rule on a real task, and learns."""

from typing import Any

import pytest
import torch

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.update_rules.config.rules import METHODS, RULES
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import UPDATE_RULES, make_task, make_task_trainer, make_trainer
from tests.sandboxes.update_rules.tabular import train_to_next_rows
from tests.strategies.examples import thin_out

SEEDS = (0, 1, 2)
TINY = {"d_model": 16, "num_layers": 2, "seq_len": 4, "batch_size": 12, "hidden": 8}
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "LogGrowth": {"task": "mnist"},
    "TPOFullAction": {"task": "mnist"},
    "MaxRL": {"binary_reward": True, "seq_len": 2},
    "ReplayDG": {"replay_capacity": 3},
    "FreshDG": {"replay_capacity": 3},
}


def make_config(method: str, steps: int = 6, **settings: Any) -> UpdateRuleConfig:
    group_settings = (
        {"group_size": 4, "inner_epochs": 2} if RULES[method].has_groups or RULES[method].has_candidates else {}
    )
    trainer_settings = {"total_training_steps": steps, "test_freq": steps}
    task_settings = {
        "task": "token_reversal",
        **TINY,
        **group_settings,
        **REQUIRED_SETTINGS.get(method, {}),
        **settings,
    }
    return UpdateRuleConfig(method=method, trainer=trainer_settings, **task_settings)


def train_until(trainer: EnsembleTrainer, last_step: int) -> EnsembleTrainer:
    while trainer.step_index < last_step:
        trainer.step()
    return trainer


@pytest.mark.parametrize("method", thin_out(METHODS, 9))
def test_one_update_of_a_member_is_the_one_that_it_takes_alone(method: str) -> None:
    settings = make_config(method)
    task, rule = make_task(settings), UPDATE_RULES[method]
    ensemble = train_until(make_task_trainer(settings, SEEDS, task, rule), 4)
    states = {seed: ensemble.get_state(seed) for seed in SEEDS}
    train_until(ensemble, 5)
    assert ensemble.seeds == SEEDS
    for seed in SEEDS:
        single = make_task_trainer(settings, (seed,), task, rule)
        single.load_states([states[seed]])
        train_until(single, 5)
        weights = single.get_state(seed).tensors["adam/weights"]
        assert not torch.equal(weights, states[seed].tensors["adam/weights"])
        torch.testing.assert_close(ensemble.get_state(seed).tensors["adam/weights"], weights, rtol=0, atol=1e-5)


@pytest.mark.long
def test_cross_entropy_learns_to_reverse() -> None:
    trainer = make_trainer(make_config("CE", steps=100, lr=3e-3, batch_size=32, seq_len=3), (0, 1))
    first, last = train_to_next_rows(trainer).rows, train_to_next_rows(trainer).rows
    for seed in (0, 1):
        assert first[seed]["test_error"] > 0.3
        assert last[seed]["test_error"] < 0.02


@pytest.mark.parametrize("task", ["token_reversal", "lm_bandit"])
def test_a_real_task_has_every_measure(task: str) -> None:
    measures = {"diagnostics": True, "entropy_diagnostics": True, "oracle_fit": True, "context_len": 16}
    row = train_to_next_rows(make_trainer(make_config("DG", task=task, **measures), (0, 1))).rows[1]
    for name in ("cos_method_ce", "grad_norm", "batch_delta_entropy", "oracle_fit_delight_correlation"):
        assert isinstance(row[name], float), name
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["clip_frac"] == 0

"""Members side by side and alone: the same update, for every rule, on a real task; and that they learn."""

from typing import Any

import pytest
import torch

from tests.trainable.sandbox.tabular import next_rows
from trainable.sandbox.config.rules import METHODS, RULES
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.catalog import UPDATE_RULES
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.training.make import make_trainer
from trainable.sandbox.training.trainer import UpdateRuleTrainer

SEEDS = (0, 1, 2)
TINY = {"d_model": 16, "num_layers": 2, "seq_len": 4, "batch_size": 12, "hidden": 8}
NEEDS: dict[str, dict[str, Any]] = {
    "LogGrowth": {"task": "mnist"},
    "TPOFullAction": {"task": "mnist"},
    "MaxRL": {"binary_reward": True, "seq_len": 2},
    "ReplayDG": {"replay_capacity": 3},
    "FreshDG": {"replay_capacity": 3},
}


def config(method: str, steps: int = 6, **settings: Any) -> UpdateRuleConfig:
    groups = {"group_size": 4, "inner_epochs": 2} if RULES[method].has_groups or RULES[method].has_candidates else {}
    runner = {"total_training_steps": steps, "test_freq": steps}
    chosen = {"task": "token_reversal", **TINY, **groups, **NEEDS.get(method, {}), **settings}
    return UpdateRuleConfig(method=method, trainer=runner, **chosen)


def at_step(trainer: UpdateRuleTrainer, step: int) -> UpdateRuleTrainer:
    while trainer.step_index < step:
        trainer.step()
    return trainer


@pytest.mark.parametrize("method", METHODS)
def test_one_update_of_a_member_is_the_one_that_it_takes_alone(method: str) -> None:
    settings = config(method)
    task, rule = make_task(settings), UPDATE_RULES[method]
    together = at_step(UpdateRuleTrainer(settings, SEEDS, task, rule), 4)
    before = {seed: together.get_state(seed) for seed in SEEDS}
    at_step(together, 5)
    assert together.seeds == SEEDS
    for seed in SEEDS:
        alone = UpdateRuleTrainer(settings, (seed,), task, rule)
        alone.load_states([before[seed]])
        at_step(alone, 5)
        weights = alone.get_state(seed).tensors["adam/weights"]
        assert not torch.equal(weights, before[seed].tensors["adam/weights"])
        torch.testing.assert_close(together.get_state(seed).tensors["adam/weights"], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["DG", "GRPO", "TPOToken"])
def test_a_run_from_its_first_step_is_the_one_alone_as_long_as_rounding_allows(method: str) -> None:
    together = at_step(make_trainer(config(method), SEEDS), 3)
    for seed in SEEDS:
        alone = at_step(make_trainer(config(method), (seed,)), 3)
        rows = [trainer.get_state(seed).tensors["adam/weights"] for trainer in (together, alone)]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-4)


def test_cross_entropy_learns_to_reverse() -> None:
    trainer = make_trainer(config("CE", steps=100, lr=3e-3, batch_size=32, seq_len=3), (0, 1))
    first, last = next_rows(trainer).rows, next_rows(trainer).rows
    for seed in (0, 1):
        assert first[seed]["test_error"] > 0.3
        assert last[seed]["test_error"] < 0.02


@pytest.mark.parametrize("task", ["token_reversal", "lm_bandit"])
def test_every_measure_is_there_on_a_real_task(task: str) -> None:
    measures = {"diagnostics": True, "entropy_diagnostics": True, "oracle_fit": True, "context_len": 16}
    row = next_rows(make_trainer(config("DG", task=task, **measures), (0, 1))).rows[1]
    for name in ("cos_method_ce", "grad_norm", "batch_delta_entropy", "oracle_fit_delight_correlation"):
        assert isinstance(row[name], float), name
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["clip_frac"] == 0

"""Tests of the trainer on real tasks: every measure has a value, and a policy learns."""

from typing import Any

import pytest

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import make_trainer
from tests.fakes.ensembles import run_ensemble

TINY = {"d_model": 16, "num_layers": 2, "seq_len": 4, "batch_size": 12}


def make_config(task: str, steps: int, **settings: Any) -> UpdateRuleConfig:
    trainer_settings = {"total_training_steps": steps, "test_freq": steps}
    return UpdateRuleConfig(**{**TINY, "task": task, "trainer": trainer_settings, **settings})


@pytest.mark.long
def test_cross_entropy_learns_to_reverse() -> None:
    config = make_config("token_reversal", 100, method="CE", lr=3e-3, batch_size=32, seq_len=3)
    for first, last in run_ensemble(make_trainer(config, (0, 1))).values():
        assert first["test_error"] > 0.3
        assert last["test_error"] < 0.02


@pytest.mark.parametrize("task", ["token_reversal", "lm_bandit"])
def test_a_real_task_has_every_measure(task: str) -> None:
    measures = {"diagnostics": True, "entropy_diagnostics": True, "oracle_fit": True, "context_len": 16}
    row = make_trainer(make_config(task, 6, **measures), (0, 1)).step().rows[1]
    for name in ("cos_method_ce", "grad_norm", "batch_delta_entropy", "oracle_fit_delight_correlation"):
        assert isinstance(row[name], float), name
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["clip_frac"] == 0

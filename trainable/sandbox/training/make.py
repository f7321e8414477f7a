"""Make the trainer of a configuration; the only module that looks up tasks and update rules by name."""

from collections.abc import Sequence

from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.catalog import UPDATE_RULES
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.training.trainer import UpdateRuleTrainer


def make_trainer(config: UpdateRuleConfig, seeds: Sequence[int]) -> UpdateRuleTrainer:
    """A trainer of `config` with one member per seed."""
    return UpdateRuleTrainer(config, seeds, make_task(config), UPDATE_RULES[config.method])

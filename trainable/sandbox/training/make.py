"""From settings to a trainer: the one place that looks tasks and update rules up by name."""

from collections.abc import Sequence

from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.catalog import UPDATE_RULES
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.training.trainer import UpdateRuleTrainer


def make_trainer(config: UpdateRuleConfig, seeds: Sequence[int]) -> UpdateRuleTrainer:
    """A trainer of `config` with a member for each of `seeds`."""
    return UpdateRuleTrainer(config, seeds, make_task(config), UPDATE_RULES[config.method])

"""From settings to a trainer: the one place that looks tasks and update rules up by name."""

from collections.abc import Sequence

from trainable.sandbox.config import UpdateRuleConfig
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.trainer import UpdateRuleTrainer
from trainable.sandbox.update_rules import UPDATE_RULES


def make_trainer(config: UpdateRuleConfig, seeds: Sequence[int]) -> UpdateRuleTrainer:
    """A trainer of `config` with a member for each of `seeds`."""
    return UpdateRuleTrainer(config, seeds, make_task(config), UPDATE_RULES[config.method])

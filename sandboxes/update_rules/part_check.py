"""Try an update rule of the user on a small example."""

from contextlib import suppress
from typing import Any

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import make_trainer
from trainable.config.run_config import ConfigError, apply_overrides
from trainable.part_checks import PartTrial


def check_update_rule(trial: PartTrial, rule: Any, config: UpdateRuleConfig) -> None:
    """Train with the rule until it has learned from a batch. Raises OwnPartError that says what is wrong with it."""
    with suppress(ConfigError):  # a batch of age 0, so that the first step trains
        config = apply_overrides(config, {"delay": 0})
    try:
        trainer = make_trainer(config, (0,))
    except Exception:  # of the task, such as a file that is not here; what needs it says so
        return
    for _ in range(config.delay + 1):
        trial.call(f"{trial.name}(rollouts, log_probs, config)", trainer.step)

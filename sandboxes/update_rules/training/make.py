"""Make the trainer of a configuration. Only this module looks up tasks and update rules by name."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.update_rules.config.rules import RULES
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts, Task
from sandboxes.update_rules.rules.rule import RuleLoss, UpdateRule, make_rule_loss
from sandboxes.update_rules.tasks.classification import ClassificationTask
from sandboxes.update_rules.tasks.lm_bandit import LanguageModelBandit
from sandboxes.update_rules.tasks.sequences import SequenceTask
from sandboxes.update_rules.training.algorithm import UpdateRuleAlgorithm
from trainable.config.own_parts import get_part
from trainable.config.run_config import ConfigError, apply_overrides
from trainable.runs.training import TrainerFamily

UPDATE_RULES: dict[str, UpdateRule] = {
    name: resolve_name(f"sandboxes.update_rules.rules.{rule.formula}") for name, rule in RULES.items()
}


def make_task(config: UpdateRuleConfig) -> Task:
    """Make the task of `config`. Raises ValueError, with what to do, if its data or model is missing."""
    if config.task == "mnist":
        return ClassificationTask(config)
    if config.task == "lm_bandit":
        return LanguageModelBandit(config)
    return SequenceTask(config)


def make_trainer(config: UpdateRuleConfig, seeds: Sequence[int]) -> EnsembleTrainer:
    """Make a trainer of `config` with one member per seed."""
    rule = UPDATE_RULES[config.method] if config.method in UPDATE_RULES else wrap_own_rule(get_part(config.method))
    return make_task_trainer(config, seeds, make_task(config), rule)


def make_task_trainer(config: UpdateRuleConfig, seeds: Sequence[int], task: Task, rule: UpdateRule) -> EnsembleTrainer:
    """Make a trainer of `config` with one member per seed, on this task and by this rule."""
    return EnsembleTrainer(config, seeds, partial(UpdateRuleAlgorithm, task=task, objective=rule))


def wrap_own_rule(function: Callable[[Rollouts, Tensor, UpdateRuleConfig], Tensor]) -> UpdateRule:
    """Wrap a plug-in update rule: a function that returns only the loss [E]."""

    def rule(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
        loss = function(rollouts, log_probs, config)
        members = len(rollouts.rewards)
        if not isinstance(loss, Tensor) or tuple(loss.shape) != (members,):
            shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"an update rule returns the loss of each member, [{members}], and this is {shape}")
        return make_rule_loss(rollouts, loss)

    return rule


TRAINER = TrainerFamily(make_trainer)


def check_update_rule(rule: Any, config: UpdateRuleConfig) -> None:
    """Train with the rule until it has learned from a batch; see `trainable.part_checks`."""
    with suppress(ConfigError):  # with a batch of age 0, the first step already trains
        config = apply_overrides(config, {"delay": 0})
    try:
        trainer = make_trainer(config, (0,))
    except Exception:  # from the task, such as a missing file, which is reported elsewhere
        return
    for _ in range(config.delay + 1):
        trainer.step()

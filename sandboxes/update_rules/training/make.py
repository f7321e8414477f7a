"""Make the trainer of a configuration; the only module that looks up tasks and update rules by name."""

from collections.abc import Callable, Sequence

from torch import Tensor

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.catalog import UPDATE_RULES
from sandboxes.update_rules.rules.rule import RuleLoss, UpdateRule, make_rule_loss
from sandboxes.update_rules.tasks.make import make_task
from sandboxes.update_rules.tasks.task import Task
from sandboxes.update_rules.training.update_rule import UpdateRuleAlgorithm
from trainable.config.own_parts import get_part
from trainable.runs.training import TrainerFamily


def make_trainer(config: UpdateRuleConfig, seeds: Sequence[int]) -> EnsembleTrainer:
    """A trainer of `config` with one member per seed."""
    rule = UPDATE_RULES[config.method] if config.method in UPDATE_RULES else wrap_own_rule(get_part(config.method))
    return make_task_trainer(config, seeds, make_task(config), rule)


def make_task_trainer(config: UpdateRuleConfig, seeds: Sequence[int], task: Task, rule: UpdateRule) -> EnsembleTrainer:
    """A trainer of `config` with one member per seed, on this task and by this rule."""
    return EnsembleTrainer(config, seeds, lambda members: UpdateRuleAlgorithm(config, members, task, rule))


def wrap_own_rule(function: Callable[[Rollouts, Tensor, UpdateRuleConfig], Tensor]) -> UpdateRule:
    """The update rule of a function of the user, which returns the loss [E] alone."""

    def rule(rollouts: Rollouts, log_probs: Tensor, config: UpdateRuleConfig) -> RuleLoss:
        loss = function(rollouts, log_probs, config)
        members = len(rollouts.rewards)
        if not isinstance(loss, Tensor) or tuple(loss.shape) != (members,):
            shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"an update rule returns the loss of each member, [{members}], and this is {shape}")
        return make_rule_loss(rollouts, loss)

    return rule


TRAINER = TrainerFamily(make_trainer)

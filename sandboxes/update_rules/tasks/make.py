"""Make the task of a configuration."""

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.tasks.classification import ClassificationTask
from sandboxes.update_rules.tasks.lm_bandit import LanguageModelBandit
from sandboxes.update_rules.tasks.sequences import SequenceTask
from sandboxes.update_rules.tasks.task import Task


def make_task(config: UpdateRuleConfig) -> Task:
    """The task of `config`. Raises ValueError, with what to do, if its data or model is missing."""
    if config.task == "mnist":
        return ClassificationTask(config)
    if config.task == "lm_bandit":
        return LanguageModelBandit(config)
    return SequenceTask(config)

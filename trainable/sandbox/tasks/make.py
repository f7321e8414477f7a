"""Make the task of a configuration."""

from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.tasks.classification import ClassificationTask
from trainable.sandbox.tasks.lm_bandit import LanguageModelBandit
from trainable.sandbox.tasks.sequences import SequenceTask
from trainable.sandbox.tasks.task import Task


def make_task(config: UpdateRuleConfig) -> Task:
    """The task of `config`. Raises ValueError, with what to do, if its data or model is missing."""
    if config.task == "mnist":
        return ClassificationTask(config)
    if config.task == "lm_bandit":
        return LanguageModelBandit(config)
    return SequenceTask(config)

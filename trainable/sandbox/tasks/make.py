"""From settings to the task that they name."""

from trainable.sandbox.config import UpdateRuleConfig
from trainable.sandbox.methods import SEQUENCE_TASKS
from trainable.sandbox.task import Task
from trainable.sandbox.tasks.sequences import SequenceTask


def make_task(config: UpdateRuleConfig) -> Task:
    """The task of `config`."""
    if config.task in SEQUENCE_TASKS:
        return SequenceTask(config)
    raise NotImplementedError(config.task)

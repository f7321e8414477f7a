"""The Trainable of this sandbox, in a separate module because it imports Ray."""

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from trainable.trial import PPO


class UpdateRules(PPO):
    """Runs of update rules on toy tasks: all seeds of an arm side by side."""

    family, config_class = "sandboxes.update_rules.training.make:TRAINER", UpdateRuleConfig

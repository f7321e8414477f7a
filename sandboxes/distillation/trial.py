"""The Trainable of this sandbox; a module of its own because it imports Ray."""

from sandboxes.distillation.settings import DistillationConfig
from trainable.trial import PPO


class Distillation(PPO):
    """Runs of on-policy distillation."""

    family, config_class = "sandboxes.distillation.algorithm:TRAINER", DistillationConfig

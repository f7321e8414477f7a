"""The Trainable of this sandbox, in a separate module because it imports Ray."""

from sandboxes.distillation.settings import DistillationConfig
from trainable.trial import PPO


class Distillation(PPO):
    """Runs of on-policy distillation."""

    family, config_class = "sandboxes.distillation.algorithm:TRAINER", DistillationConfig

"""The Trainable of this sandbox; a module of its own because it imports Ray."""

from sandboxes.pedagogy.settings import PedagogyConfig
from trainable.trial import PPO


class Pedagogy(PPO):
    """Runs of pedagogical reinforcement learning."""

    family, config_class = "sandboxes.pedagogy.algorithm:TRAINER", PedagogyConfig

"""The Trainable of this sandbox, in a separate module because it imports Ray."""

from sandboxes.pedagogy.settings import PedagogyConfig
from trainable.trial import PPO


class Pedagogy(PPO):
    """Runs of pedagogical reinforcement learning."""

    family, config_class = "sandboxes.pedagogy.algorithm:TRAINER", PedagogyConfig

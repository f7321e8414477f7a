"""The Trainable of this sandbox, in a separate module because it imports Ray."""

from sandboxes.vector_rewards.settings import VectorRewardConfig
from trainable.trial import PPO


class VectorRewards(PPO):
    """Runs of Vector Policy Optimization."""

    family, config_class = "sandboxes.vector_rewards.algorithm:TRAINER", VectorRewardConfig

"""How large should a group be if the number of episodes is fixed, and does the answer change with that number?

The arms of GRPO cross the group size with the number of episodes per step: larger groups estimate the mean of a level
better, more groups cover more levels. The number of updates grows with the episodes, as it would for anyone who buys
more rollouts.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

SIZES = (2, 4, 8, 16, 32, 64)
EPISODES = (64, 128, 256)


def _name_arm(size: int, episodes: int) -> str:
    return f"g{size}-of-{episodes}"


_ARMS: dict[str, Settings] = {
    _name_arm(size, episodes): {"env.group_size": size, "env.env_groups": episodes // size}
    for episodes in EPISODES
    for size in SIZES
}

CONTRASTS: Contrasts = {
    **{
        f"groups of {size} against 16": tuple((_name_arm(size, n), _name_arm(16, n)) for n in EPISODES)
        for size in SIZES
        if size != 16
    },
    **{
        f"groups of {size} against 16, {n} episodes": ((_name_arm(size, n), _name_arm(16, n)),)
        for size in (2, 64)
        for n in EPISODES
    },
}

STUDY = Study(
    name="group-size",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("group size x episodes per step", _ARMS),
    fixed_settings={**PLAIN_SETTINGS, "algorithm.adv_estimator": "grpo"},
    n_seeds=5,
    baseline=_name_arm(16, 128),
    contrasts=CONTRASTS,
)

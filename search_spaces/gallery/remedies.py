"""My run collapses: which of the remedies that are recommended holds it off, and what does it cost?

Each arm adds one remedy to a baseline that is expected to collapse under the preset `stress`, once to PPO with a critic
and once to GRPO. GRPO breaks at lower learning rates than PPO, so it has 0.85 times the preset's. The clip of both
baselines is 0.2 below and 0.28 above, as in DAPO; two arms narrow it.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS, EpisodeShare, Times, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

ALGORITHMS: dict[str, tuple[str, float]] = {"ppo": ("gae", 1.0), "grpo": ("grpo", 0.85)}
"""The advantage estimator of each algorithm, and its learning rate as a multiple of the preset's."""

REMEDIES: dict[str, tuple[Settings, float]] = {
    "none": ({}, 1.0),
    "clip-0.2": ({"actor.clip_ratio_high": 0.2}, 1.0),
    "clip-0.05": ({"actor.clip_ratio_low": 0.05, "actor.clip_ratio_high": 0.05}, 1.0),
    "entropy-bonus": ({"actor.entropy_coeff": 0.01}, 1.0),
    "kl-loss": ({"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.03, "actor.kl_loss_type": "low_var_kl"}, 1.0),
    "kl-reward": (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.03},
        1.0,
    ),
    "lower-rate": ({}, 0.2),
    # The policy makes a single step per batch, so that no sample is stale.
    "one-update": ({"actor.ppo_mini_batch_size": EpisodeShare(1)}, 1.0),
    # As many episodes as before, in half as many groups.
    "larger-groups": ({"env.group_size": 32, "env.env_groups": 4}, 1.0),
    "filter": ({"filter.rollout_filter_value": 0.9, "filter.rollout_filter_include_zero": False}, 1.0),
}
"""The settings that each remedy changes, and its learning rate as a multiple of the algorithm's."""

_ARMS: dict[str, Settings] = {
    f"{algorithm}-{remedy}": {
        **settings,
        "algorithm.adv_estimator": estimator,
        "actor.lr": Times(factor * rate),
    }
    for algorithm, (estimator, factor) in ALGORITHMS.items()
    for remedy, (settings, rate) in REMEDIES.items()
}

CONTRASTS: Contrasts = {
    f"{remedy} against none, {algorithm.upper()}": ((f"{algorithm}-{remedy}", f"{algorithm}-none"),)
    for algorithm in ALGORITHMS
    for remedy in REMEDIES
    if remedy != "none"
}

STUDY = Study(
    name="remedies",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("algorithm x remedy", _ARMS, adapt=resolve_settings),
    fixed_settings=PLAIN_SETTINGS,
    cpu_preset="stress",
    n_seeds=5,
    baseline="ppo-none",
    contrasts=CONTRASTS,
)

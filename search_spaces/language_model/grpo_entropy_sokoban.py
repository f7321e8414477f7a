"""What preserves GRPO's entropy on Sokoban: no std normalization, a tighter clip, or a bounded target?

The arms of GRPO cross its normalization (std divides advantages by the group's standard deviation, nostd does not, as
in Dr. GRPO) with the clip: tight (0.05), standard (0.2), and wide (0.2 below, 0.28 above, as in DAPO). These arms
differ in nothing else and use the same loss aggregation. TPO has neither a clip nor a choice of normalization. Each
mini-batch of TPO consists of two whole groups, while a mini-batch of GRPO may split groups. Four epochs over a batch of
four mini-batches move the ratios away from 1; in a single update no clip could act. The dual clip at 3 stays on in all
arms of GRPO.
"""

from search_spaces.declaration.study import Study, make_arms_axis
from search_spaces.language_model.common import SWEEP_SETTINGS, make_sweep_templates
from search_spaces.language_model.family import PPO
from trainable.families import Settings

CLIPS: dict[str, tuple[float, float]] = {"0.05": (0.05, 0.05), "0.2": (0.2, 0.2), "0.28": (0.2, 0.28)}
"""clip_ratio_low and clip_ratio_high, by the name of the clip."""


ARMS: dict[str, Settings] = {
    **{
        f"{name}-clip{clip}": {
            "actor.policy_loss": "ppo_clip",
            "actor.clip_ratio_low": low,
            "actor.clip_ratio_high": high,
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": is_normalized,
        }
        for name, is_normalized in (("std", True), ("nostd", False))
        for clip, (low, high) in CLIPS.items()
    },
    "tpo": {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill"},
}

STUDY = Study(
    name="grpo-entropy-sokoban",
    family=PPO,
    game="sokoban",
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("std normalization x clip, and TPO", ARMS),
    fixed_settings={
        **SWEEP_SETTINGS,
        "algorithm.adv_estimator": "grpo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.ppo_epochs": 4,
        "actor.use_kl_loss": False,
        "actor.kl_loss_coef": 0.0,
        "actor.entropy_coeff": 0.0,
        "filter.rollout_filter_value": 1.0,
    },
    baseline="std-clip0.2",
    published_templates=make_sweep_templates("grpo_entropy", "GRPO Entropy on Sokoban", "ragen_grpo_entropy"),
    smoke_settings={
        "trainer.total_training_steps": 1,
        "env.env_groups": 2,
        "env.val_env_groups": 8,
        "env.test_env_groups": 0,
    },
)

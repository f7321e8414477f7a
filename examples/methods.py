"""Which of today's methods changes success beside the method that it amends?

A screening: three seeds tell only large differences. Each arm changes what its paper changes, with the paper's numbers
where they carry over, and nothing else: rates, batches and the rest are the preset's, tuned for none of them.

    python -m tune_study run examples/methods.py --preset laptop
    python -m tune_study run examples/methods.py --preset stress
"""

from search_spaces.declaration.study import Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

GRPO: Settings = {"algorithm.adv_estimator": "grpo"}
KL: Settings = {**GRPO, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
NO_ZERO_GROUPS: Settings = {"filter.rollout_filter_include_zero": False}

AMENDMENTS: dict[str, dict[str, Settings]] = {
    "ppo": {
        "vapo-lambda": {"algorithm.lam": 0.95, "algorithm.critic_lam": 1.0},
    },
    "grpo": {
        "ppo": {"algorithm.adv_estimator": "gae"},
        "dr-grpo": {
            **GRPO,
            "algorithm.norm_adv_by_std_in_grpo": False,
            "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        },
        "batch-std": {**GRPO, "algorithm.scale_rewards": "batch"},
        "rloo": {"algorithm.adv_estimator": "rloo"},
        "reinforce-plus-plus": {"algorithm.adv_estimator": "reinforce_plus_plus"},
        "reinforce-plus-plus-baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
        "token-mean-global": {**GRPO, "actor.loss_agg_mode": "token-mean-global"},
        "symmetric-clip": {**GRPO, "actor.clip_ratio_high": 0.2},
        "gspo": {
            **GRPO,
            "actor.policy_loss": "gspo",
            "actor.clip_ratio_low": 3e-4,
            "actor.clip_ratio_high": 4e-4,
            "actor.loss_agg_mode": "seq-mean-token-mean",
        },
        "cispo": {**GRPO, "actor.policy_loss": "cispo", "actor.clip_ratio_low": 1.0, "actor.clip_ratio_high": 4.0},
        "cppo": {**GRPO, "actor.policy_loss": "cppo"},
        "stapo": {**GRPO, "actor.stapo_tau_p": 0.002},
        "tpo": {"algorithm.adv_estimator": "group_skill", "actor.policy_loss": "tpo"},
        "dynamic-sampling": {**GRPO, **NO_ZERO_GROUPS, "filter.max_num_gen_batches": 3},
        "overlong-punishment": {**GRPO, "env.overlong_buffer_len": 6},
        "mask-truncated": {**GRPO, "filter.mask_truncated_completions": True},
        "mask-void-turns": {**GRPO, "filter.mask_void_turns": True},
        "tree-grpo": {"algorithm.adv_estimator": "tree", "rollout.ts_n": 3},
        "kl": KL,
        "entropy-schedule": {**GRPO, "actor.entropy_coeff": "linear(0.01, 0@60)"},
        "target-entropy": {**GRPO, "actor.entropy_coeff": "target_entropy(0.2)"},
    },
    "kl": {
        "kl-schedule": {**KL, "actor.kl_loss_coef": "linear(0.1, 0@60)"},
        "kl-moving-reference": {**KL, "trainer.ref_model_sync_steps": 10, "trainer.ref_model_mixup_alpha": 0.6},
        "kl-reset-reference": {**KL, "trainer.ref_model_sync_steps": 20},
        "kl-reset-by-rule": {
            **KL,
            "trainer.ref_model_reset_kl": 0.05,
            "trainer.ref_model_reset_optimizer": True,
        },
        "target-kl": {**KL, "actor.kl_loss_coef": "target_kl(0.05, 0.1)"},
    },
}
"""The settings of each arm, by the arm that it amends and is compared with."""

STUDY = Study(
    name="methods",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis(
        "method", {"grpo": GRPO, **{arm: settings for arms in AMENDMENTS.values() for arm, settings in arms.items()}}
    ),
    fixed_settings=PLAIN_SETTINGS,
    n_seeds=3,
    baseline="grpo",
    contrasts={f"{arm} against {base}": ((arm, base),) for base, arms in AMENDMENTS.items() for arm in arms},
)

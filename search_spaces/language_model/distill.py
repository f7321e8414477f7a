"""Does a teacher teach faster than the game's rewards, and its whole distribution faster than samples of it?

On-policy distillation: the policy plays, and every token that it sampled is compared with the teacher, which is the
reference of the KL loss. The loss is the reverse KL, KL(policy || teacher), at the policy's tokens. `exact` sums it
over the vocabulary. `sampled` estimates its gradient from the sampled token alone: k2 as a loss has the gradient of a
policy gradient with the reward log teacher - log policy at that token. It is unbiased in the first of the four updates
per batch, when the current policy has sampled the tokens. Neither reads the game's rewards. `ppo` reads nothing else,
and `both` adds the two losses. All arms play the same levels with the same number of rollouts. The number of tokens
changes with the policies, so the report also draws success against tokens.

The teacher of a shipped policy is that policy before it learned its bad habits; it is made on first use.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

EXACT: Settings = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 1.0, "actor.kl_loss_type": "full"}
SAMPLED: Settings = {**EXACT, "actor.kl_loss_type": "mse"}
# Without the game's rewards there is nothing for a critic to learn.
_NO_REWARDS: Settings = {"algorithm.zero_task_advantage": True, "algorithm.adv_estimator": "grpo"}
_REWARDS: Settings = {"algorithm.zero_task_advantage": False, "algorithm.adv_estimator": "gae"}

ARMS: dict[str, Settings] = {
    "ppo": {**_REWARDS, "actor.use_kl_loss": False, "actor.kl_loss_coef": 0.0, "actor.kl_loss_type": "full"},
    "exact": {**_NO_REWARDS, **EXACT},
    "sampled": {**_NO_REWARDS, **SAMPLED},
    "both": {**_REWARDS, **EXACT},
}

CONTRASTS: Contrasts = {
    "Exact reverse KL against PPO": (("exact", "ppo"),),
    "Sampled reverse KL against PPO": (("sampled", "ppo"),),
    "Exact against sampled reverse KL": (("exact", "sampled"),),
    "PPO with the exact reverse KL against the KL alone": (("both", "exact"),),
}

STUDY = Study(
    name="distill",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("signal: rewards, teacher, or both", ARMS),
    # No filter: without rewards, their variance says nothing about a group.
    fixed_settings=PLAIN_SETTINGS,
    presets={
        # The head of a larger Qwen2.5 has different padding, so an exact KL needs a teacher of the same size.
        "paper": {"model.reference_path": "Qwen/Qwen2.5-3B-Instruct", "trainer.measure_val_kl": True},
        "laptop": {"model.reference_path": "sokoban-tiny-teacher"},
        "small": {"model.reference_path": "HuggingFaceTB/SmolLM2-360M-Instruct", "trainer.measure_val_kl": True},
    },
    n_seeds=3,
    baseline="ppo",
    contrasts=CONTRASTS,
    smoke_settings={
        "trainer.total_training_steps": 2,
        "env.env_groups": 2,
        "env.val_env_groups": 8,
        "env.test_env_groups": 0,
    },
)

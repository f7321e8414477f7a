"""What do the gradients of task, KL term and entropy bonus do while a policy collapses, and while it is held?

The arms cross PPO and GRPO with the coefficient of the KL loss: 0, with which the preset `stress` collapses, and 0.1,
which prevents it. Gradients are analyzed by the reward std of the groups, on a separate batch, often enough that some
analyses lie before, at and after the onset of a collapse. The entropy bonus is small and the same in all arms; it is
there so that its gradient is measured.
"""

from search_spaces.declaration.study import Study, make_arms_axis
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO

_ALGORITHMS = {
    "ppo": {"algorithm.adv_estimator": "gae", "actor.loss_agg_mode": "token-mean"},
    "grpo": {"algorithm.adv_estimator": "grpo", "actor.loss_agg_mode": "seq-mean-token-mean"},
}
_ARMS = {
    f"{algorithm}-kl{coefficient}": {
        **settings,
        "actor.use_kl_loss": coefficient != "0",
        "actor.kl_loss_coef": float(coefficient),
    }
    for algorithm, settings in _ALGORITHMS.items()
    for coefficient in ("0", "0.1")
}

STUDY = Study(
    name="collapse-gradients",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("advantage estimator x KL coefficient", _ARMS),
    fixed_settings={
        **SWEEP_SETTINGS,
        "actor.entropy_coeff": 0.001,
        "filter.rollout_filter_value": 1.0,
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_env_groups": 128,
        "trainer.gradient_analysis_group_size": 16,
    },
    # Every analysis of the tiny policy costs as much as three training steps.
    presets={"laptop": {"trainer.gradient_analysis_every": 5, "trainer.gradient_analysis_env_groups": 24}},
    baseline="ppo-kl0",
)

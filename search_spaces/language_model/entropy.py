"""How large can the entropy bonus be before exploration becomes noise?"""

from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.common import SWEEP_SETTINGS, make_sweep_templates
from search_spaces.language_model.family import PPO

STUDY = Study(
    name="entropy",
    family=PPO,
    question=__doc__,
    axis=Axis(
        setting="actor.entropy_coeff",
        option="--entropy-values",
        grids={
            "paper": ("0", "0.001", "0.003", "0.01", "0.03", "0.1"),
            "laptop": ("0", "0.003", "0.01", "0.03", "0.1", "0.3"),
        },
    ),
    fixed_settings={
        **SWEEP_SETTINGS,
        "actor.use_kl_loss": False,
        "actor.kl_loss_coef": 0.0,
        "filter.rollout_filter_value": 1.0,
    },
    baseline="0",
    published_templates=make_sweep_templates(
        "entropy_sweep", "Entropy Sweep", "ragen_release_entropy_sweep", "entropy"
    ),
)

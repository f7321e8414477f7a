"""Does a KL penalty to the initial policy prevent collapse, and at which coefficient does it start to cost success?"""

from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.common import PLAIN_SETTINGS, make_sweep_templates
from search_spaces.language_model.family import PPO

STUDY = Study(
    name="kl",
    family=PPO,
    question=__doc__,
    axis=Axis(
        setting="actor.kl_loss_coef",
        option="--kl-values",
        grids={
            "paper": ("0", "0.001", "0.003", "0.01", "0.03", "0.1"),
            "laptop": ("0", "0.01", "0.03", "0.1", "0.3", "1"),
        },
        extra_settings={"actor.use_kl_loss": True},
    ),
    fixed_settings=PLAIN_SETTINGS,
    baseline="0",
    published_templates=make_sweep_templates("kl_sweep", "KL Sweep", "ragen_release_kl_sweep", "kl"),
)

"""How large can the entropy bonus be before exploration becomes noise?"""

from search_spaces.declaration.study import Axis, NameTemplates, Study
from search_spaces.language_model.common import SWEEP_SETTINGS
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
    published_templates=NameTemplates(
        run="entropy_sweep_{model}",
        experiment="{env}_entropy_sweep_{tag}_{label}-{model}",
        title="Entropy Sweep",
        summary="entropy={arm} | filter={tag} | include_zero={include_zero}",
        wandb_project="ragen_release_entropy_sweep",
        log="{run}/{tag}/{label}/{experiment}.log",
        checkpoints="{run}/{label}/{experiment}",
    ),
)

"""How strong should the reward-variance filter be: which fraction of the groups' reward spread is worth training on?"""

from search_spaces.declaration.study import Axis, NameTemplates, Study
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO

_GRID = ("1.0", "0.98", "0.95", "0.9", "0.8", "0.6", "0.4", "nofilter")

STUDY = Study(
    name="top-p",
    family=PPO,
    question=__doc__,
    axis=Axis(
        setting="filter.rollout_filter_value",
        option="--rollout_filter_value",
        grids={"paper": _GRID, "laptop": _GRID},
        extra_settings={"filter.rollout_filter_include_zero": False},
        named_settings={"nofilter": {"filter.rollout_filter_value": 1.0, "filter.rollout_filter_include_zero": True}},
    ),
    fixed_settings={
        **SWEEP_SETTINGS,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.001,
        "actor.entropy_coeff": 0.001,
    },
    baseline="nofilter",
    published_templates=NameTemplates(
        run="top_p_sweep_{model}",
        experiment="{env}_top_p_{label}-{model}",
        title="Top-p Sweep",
        summary="value={arm} | include_zero={include_zero} | filter_value={filter_value}",
        wandb_project="ragen_release_top_p_sweep",
        log="{run}/{label}/{experiment}.log",
        checkpoints="{run}/{label}/{experiment}",
    ),
)

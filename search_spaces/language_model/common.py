"""Settings that the three published sweeps share, so that each sweep changes one axis only, and their file names."""

from operator import attrgetter
from types import MappingProxyType

from search_spaces.declaration.study import NameTemplates
from trainable.config.base_config import BaseRunConfig
from trainable.families import Settings

SWEEP_SETTINGS: Settings = MappingProxyType(
    {
        "algorithm.adv_estimator": "gae",
        "actor.entropy_from_logits_with_chunking": True,
        "actor.filter_loss_scaling": "none",
        "actor.ppo_mini_batch_size": 32,
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "critic.ppo_mini_batch_size": 32,
        "critic.ppo_micro_batch_size_per_gpu": 4,
        "rollout.log_prob_micro_batch_size_per_gpu": 8,
        "rollout.ref_log_prob_micro_batch_size_per_gpu": 8,
        "filter.rollout_filter_strategy": "top_p",
        "filter.rollout_filter_top_p_prob_mode": "softmax",
        "filter.rollout_filter_type": "largest",
        "filter.rollout_filter_metric": "reward_variance",
        "env.env_groups": 8,
        "env.group_size": 16,
        "env.val_env_groups": 512,
        "env.val_group_size": 1,
        "trainer.val_before_train": True,
    }
)

PLAIN_SETTINGS: Settings = MappingProxyType(
    {**SWEEP_SETTINGS, "actor.entropy_coeff": 0.0, "filter.rollout_filter_value": 1.0}
)
"""The same without entropy bonus and filter; the presets have no KL term."""


class Times(float):
    """A multiple of the value that the study's base configuration has, as the value of a setting of an arm.

    `multiply_settings` resolves it.
    """


def multiply_settings(settings: Settings, base: BaseRunConfig) -> Settings:
    """Replace values `Times(x)` of an arm by x times the value in `base`. See `Axis.adapt`."""
    return {
        # Rounded, since 0.2 times 0.002 is not the float nearest to 0.0004.
        name: type(get_value(base))(round(value * get_value(base), 12)) if isinstance(value, Times) else value
        for name, value in settings.items()
        for get_value in [attrgetter(name)]
    }


def make_sweep_templates(stem: str, title: str, wandb_project: str, value_name: str = "arm") -> NameTemplates:
    """Make the file names of a sweep, as published.

    stem: with which the names of folder and runs begin. value_name: names the value of an arm in the summary log.
    """
    return NameTemplates(
        run=f"{stem}_{{model}}",
        experiment=f"{{env}}_{stem}_{{tag}}_{{label}}-{{model}}",
        title=title,
        summary=f"{value_name}={{arm}} | filter={{tag}} | include_zero={{include_zero}}",
        wandb_project=wandb_project,
        log="{run}/{tag}/{label}/{experiment}.log",
        checkpoints="{run}/{label}/{experiment}",
    )

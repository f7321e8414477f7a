"""Settings that the three published sweeps share, so that each sweep changes one axis only, and their file names."""

from operator import attrgetter
from types import MappingProxyType

from search_spaces.declaration.study import NameTemplates
from trainable.config.run_config import RunConfig
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
    """A multiple of the value that the study's base configuration has, as the value of a setting of an arm."""


class EpisodeShare(float):
    """A share of the episodes of a step of the base configuration, as the value of a mini-batch size of an arm."""


def resolve_settings(settings: Settings, base: RunConfig) -> Settings:
    """Replace values `Times(x)` and `EpisodeShare(x)` of an arm by what they are under `base`. See `Axis.adapt`."""

    def resolve(name: str, value: object) -> object:
        if isinstance(value, EpisodeShare):
            return round(value * base.env.env_groups * base.env.group_size)
        if isinstance(value, Times):
            base_value = attrgetter(name)(base)
            # Rounded, since 0.2 times 0.002 is not the float nearest to 0.0004.
            return type(base_value)(round(value * base_value, 12))
        return value

    return {name: resolve(name, value) for name, value in settings.items()}


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

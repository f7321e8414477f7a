"""The family of studies that fine-tune a language model with PPO: what their names are made of."""

import re

from search_spaces.declaration.family import Family, Shown, value_label
from search_spaces.declaration.presets import DEFAULT_SEEDS, PRESETS
from trainable.config.run_config import RunConfig
from trainable.config.study_config import StudyConfig

TAGS = {True: "nofilter", False: "filter_zero"}
"""The published tag of rollout_filter_include_zero."""

COLLAPSE_TAGS = {(True, True): "ftmt", (True, False): "ft", (False, True): "mt", (False, False): "nocd"}
"""The published tags of collapse diagnostics: of first turns, of all turns."""

STRATEGY_NAMES = {"top_k_abs": "top_k"}
"""Published names of filter strategies that have another one here: in the documents top_k takes a count of groups."""


def model_name(path: str) -> str:
    """The last part of a model's path, which names its runs: Qwen/Qwen2.5-3B -> Qwen2.5-3B."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def words(config: RunConfig) -> dict[str, str]:
    """What every template of a study may use; see `search_spaces.declaration.study.Study`."""
    env, trainer, collapse = config.env, config.trainer, config.collapse_detection
    actor, kept = config.actor, config.filter
    model = model_name(config.model.path)
    size = re.search(r"(?<![\d.])\d+(\.\d+)?B(?![A-Za-z])", model)
    train = f"{env.env_groups}x{env.group_size}"
    groups, rollouts = trainer.gradient_analysis_env_groups, trainer.gradient_analysis_group_size
    return {
        "model": model,
        "size": size.group() if size else model,
        "tag": TAGS[kept.rollout_filter_include_zero],
        "strategy": STRATEGY_NAMES.get(kept.rollout_filter_strategy, kept.rollout_filter_strategy),
        "kl_type": actor.kl_loss_type,
        "collapse": COLLAPSE_TAGS[collapse.first_turn_enabled, collapse.multi_turn_enabled],
        "mass": value_label(f"{kept.rollout_filter_value:g}"),
        "train": train,
        "analysis": f"{groups}x{rollouts}" if groups and rollouts else train,
        "every": str(trainer.gradient_analysis_every),
        "include_zero": str(kept.rollout_filter_include_zero),
        "filter_value": str(kept.rollout_filter_value),
        "share": f"{kept.rollout_filter_value:g}",
        "kl": f"{actor.kl_loss_coef if actor.use_kl_loss else 0:g}",
        "entropy": f"{actor.entropy_coeff:g}",
        "first": str(collapse.first_turn_enabled).lower(),
        "multi": str(collapse.multi_turn_enabled).lower(),
        "samples": str(collapse.num_samples),
    }


def run_config(config: StudyConfig) -> RunConfig:
    """`config`, which a study of this family has; TypeError for one of another family."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"{type(config).__name__} fine-tunes no language model with PPO")
    return config


def loads(config: RunConfig) -> str:
    """The model that every run fine-tunes."""
    return config.model.path


PPO = Family(
    name="ppo",
    trainer="trainable.families:LANGUAGE_MODEL",
    suffix="_{model}",
    fine_tunes=True,
    config=RunConfig,
    presets=PRESETS,
    seeds=DEFAULT_SEEDS,
    words=words,
    loads=loads,
    models=("model.path",),
    shown=(
        Shown("val_success", "success", ".3f", before="base_val_success"),
        Shown("reward_std", "reward std", ".3f"),
        Shown("groups_kept", "groups kept", ".0f"),
        Shown("tokens_per_second", "tokens/s", ".0f"),
    ),
    line=(
        Shown("base_val_success", "base_val_success", ".3f"),
        Shown("base_val_greedy_success", "base_val_greedy_success", ".3f"),
        Shown("train_success", "train_success", ".3f"),
        Shown("reward_std", "reward_std", ".4f"),
        Shown("groups_kept", "groups_kept", ".0f"),
        Shown("val_success", "val_success", ".3f"),
        Shown("val_greedy_success", "val_greedy_success", ".3f"),
        Shown("test_success", "test_success", ".3f"),
        Shown("test_greedy_success", "test_greedy_success", ".3f"),
        Shown("entropy", "entropy", ".3f"),
        Shown("kl_loss", "kl_loss", ".5f"),
        Shown("pg_loss", "pg_loss", ".5f"),
        Shown("tokens_per_second", "tokens_per_second", ".0f"),
        Shown("seconds_step", "seconds", ".2f"),
    ),
)

"""The family of studies that fine-tune a language model with PPO, and the values of their name templates."""

import re
from dataclasses import replace

from search_spaces.declaration.presets import PRESETS
from search_spaces.declaration.study import make_value_label
from trainable.config.base_config import BaseRunConfig
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.games import GAMES
from trainable.config.own_parts import shorten_part_name
from trainable.config.run_config import RunConfig
from trainable.config.sections import EnvConfig
from trainable.families import DisplayColumn, Family, OutcomeColumn
from trainable.runs.records import IMPORTED_COLUMNS, LAST_VALUE_COLUMNS, STEP_COLUMNS, STOP_COLUMNS, TRIAL_COLUMNS
from trainable.runs.study_record import Dimension

DEFAULT_ENVIRONMENT = "sokoban"
"""The game of studies recorded before there were several."""

_FILTER_STRATEGY = "filter.rollout_filter_strategy"

SEARCH_SPACE: tuple[Dimension, ...] = (
    Dimension("actor.lr", 0.1, 10, is_log=True, is_relative=True),
    Dimension("actor.use_kl_loss", values=("False", "True")),
    Dimension("actor.kl_loss_coef", 1e-3, 1, is_log=True, condition=("actor.use_kl_loss", "True")),
    Dimension("actor.entropy_coeff", 1e-4, 0.1, is_log=True),
    Dimension("actor.clip_ratio_high", 0.1, 0.5),
    # Groups with the largest spread of rewards: selected by their share of it, or by number.
    Dimension(_FILTER_STRATEGY, values=("top_p", "top_k")),
    Dimension("filter.rollout_filter_value", 0.4, 1, condition=(_FILTER_STRATEGY, "top_p")),
    Dimension("filter.rollout_filter_value", 0.25, 1, condition=(_FILTER_STRATEGY, "top_k")),
)
"""The settings that a search changes by default: rate, KL, entropy, clip range and filter.

The intervals span one to three powers of ten around the values of published recipes.
"""


def get_model_name(path: str) -> str:
    """Return the last part of a model's path, used in the names of its runs: Qwen2.5-3B for Qwen/Qwen2.5-3B."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def format_rate(rate: float) -> str:
    """Format a learning rate as it is typed: 3e-4 for 0.0003, 1.7e-3 for 0.0017."""
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def make_template_values(config: RunConfig) -> dict[str, str]:
    """Make the values for every template of a study; see `search_spaces.declaration.study.NameTemplates`."""
    env, trainer, collapse = config.env, config.trainer, config.collapse_detection
    actor, filter_config = config.actor, config.filter
    model = get_model_name(config.model.path)
    # The whole number before a B that ends a word: 3B of Qwen2.5-3B-Instruct, 0.5B of Qwen2.5-0.5B.
    size_match = re.search(r"(?<![\d.])\d+(\.\d+)?B(?![A-Za-z])", model)
    train_size = f"{env.env_groups}x{env.group_size}"
    groups, rollouts = trainer.gradient_analysis_env_groups, trainer.gradient_analysis_group_size
    # A model from the hub plays any game, and two games must not share a folder.
    shipped_model = SHIPPED_MODELS.get(config.model.path)
    is_model_of_game = shipped_model is not None and shipped_model.game == env.name
    is_told_by_model = is_model_of_game or env.name == EnvConfig.model_fields["name"].default
    game, strategy = shorten_part_name(env.name), shorten_part_name(filter_config.rollout_filter_strategy)
    return {
        "env": game,
        "model": model if is_told_by_model else f"{model}_{game}",
        "size": size_match.group() if size_match else model,
        "tag": "nofilter" if filter_config.rollout_filter_include_zero else "filter_zero",
        "strategy": "top_k" if strategy == "top_k_abs" else strategy,  # in the documents top_k takes a count of groups
        "kl_type": actor.kl_loss_type,
        "collapse": ("ft" * collapse.first_turn_enabled + "mt" * collapse.multi_turn_enabled) or "nocd",
        "lr": format_rate(actor.lr),
        "mass": make_value_label(f"{filter_config.rollout_filter_value:g}"),
        "train": train_size,
        "analysis": f"{groups}x{rollouts}" if groups and rollouts else train_size,
        "every": str(trainer.gradient_analysis_every),
        "include_zero": str(filter_config.rollout_filter_include_zero),
        "filter_value": str(filter_config.rollout_filter_value),
        "share": f"{filter_config.rollout_filter_value:g}",
        "kl": f"{actor.kl_loss_coef if actor.use_kl_loss else 0:g}",
        "entropy": f"{actor.entropy_coeff:g}",
        "first": str(collapse.first_turn_enabled).lower(),
        "multi": str(collapse.multi_turn_enabled).lower(),
        "samples": str(collapse.num_samples),
    }


def as_run_config(config: BaseRunConfig) -> RunConfig:
    """Return `config` typed as this family's configuration. Raise TypeError if it belongs to another family."""
    if not isinstance(config, RunConfig):
        raise TypeError(
            f"A {type(config).__name__} does not configure the fine-tuning of a language model: use a RunConfig."
        )
    return config


PPO = Family(
    name="ppo",
    trainable="trainable.trial:PPO",
    name_suffix="_{model}",
    search_space=SEARCH_SPACE,
    games=GAMES,
    config_class=RunConfig,
    presets=PRESETS,
    step_columns=STEP_COLUMNS,
    trial_columns=(*TRIAL_COLUMNS, *STOP_COLUMNS, *LAST_VALUE_COLUMNS),
    outcomes=(
        OutcomeColumn("late_val_success", 0.05, "it is the outcome that a setting should improve", is_common=True),
        OutcomeColumn("mean_val_success", 0.05, "it shows whether success came early or lasted"),
        OutcomeColumn(
            "final_val_greedy_success", 0.05, "it shows what the policy knows, without the noise of sampling"
        ),
        OutcomeColumn("test_success", 0.05, "it is success on levels that played no part in training or in any choice"),
        OutcomeColumn("test_greedy_success", 0.05, "it is the same without the noise of sampling"),
    ),
    is_higher_better=True,
    summarize="analysis.data.summaries:summarize_ppo_run",
    report="analysis.report.sweep:SWEEP_REPORT",
    get_environment=lambda settings: str(settings.get("env", {}).get("name", DEFAULT_ENVIRONMENT)),
    has_symptoms=True,
    own_prefixes=("train_", "val_", "base_val_"),
    remarks="tune_study.plan.remarks:PPO_REMARKS",
    make_template_values=make_template_values,
    get_model_path=lambda config: config.model.path,
    progress_columns=(
        DisplayColumn("val_success", "success", ".3f", fallback_column="base_val_success"),
        DisplayColumn("reward_std", "reward std", ".3f"),
        DisplayColumn("groups_kept", "groups kept", ".0f"),
        DisplayColumn("tokens_per_second", "tokens/s", ".0f"),
    ),
    log_columns=(
        DisplayColumn("base_val_success", "base_val_success", ".3f"),
        DisplayColumn("base_val_greedy_success", "base_val_greedy_success", ".3f"),
        DisplayColumn("train_success", "train_success", ".3f"),
        DisplayColumn("reward_std", "reward_std", ".4f"),
        DisplayColumn("groups_kept", "groups_kept", ".0f"),
        DisplayColumn("val_success", "val_success", ".3f"),
        DisplayColumn("val_greedy_success", "val_greedy_success", ".3f"),
        DisplayColumn("test_success", "test_success", ".3f"),
        DisplayColumn("test_greedy_success", "test_greedy_success", ".3f"),
        DisplayColumn("entropy", "entropy", ".3f"),
        DisplayColumn("kl_loss", "kl_loss", ".5f"),
        DisplayColumn("pg_loss", "pg_loss", ".5f"),
        DisplayColumn("tokens_per_second", "tokens_per_second", ".0f"),
        DisplayColumn("seconds_step", "seconds", ".2f"),
    ),
)

IMPORTED = replace(
    PPO,
    name="imported",
    trainable="",
    step_columns=(*STEP_COLUMNS, *IMPORTED_COLUMNS),
    own_prefixes=("",),
    max_own_columns=1_000,
    outcomes=tuple(outcome for outcome in PPO.outcomes if outcome.column in ("late_val_success", "mean_val_success")),
)
"""Runs of other trainers, which `import` has read. Their rows have the trainer's columns beside ours."""

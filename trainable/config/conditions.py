"""Conditions under which a PPO run reads certain settings, from which plans report settings without effect.

A setting whose value makes no difference, such as a threshold that a run of this length cannot reach, counts as not
read. Conditions are functions of a RunConfig, whose module imports this one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from trainable.config.base_config import ReadCondition
from trainable.config.choices import (
    ADVANTAGE_ESTIMATORS,
    FILTER_STRATEGIES,
    POLICY_LOSSES,
    FilterStrategy,
    PolicyLossKind,
)
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.games import GAMES

SMALLEST_CLIP = 1e-3
"""Narrower clip ranges clip rounding errors: float32 log-probs of equal weights may differ by 1e-5 between passes."""


def find_unused_settings(
    choices: Mapping[str, PolicyLossKind] | Mapping[str, FilterStrategy], choice_name: str
) -> frozenset[str]:
    """Find the settings that have no effect under the choice `choice_name`, because only other `choices` read them.

    They are left out of a run's hash, since runs that differ only in them have the same rows. A plug-in reads none.
    """
    all_settings = frozenset(setting for choice in choices.values() for setting in choice.settings)
    return all_settings - {*(choices[choice_name].settings if choice_name in choices else ())}


def derive_conditions(
    selector: str, settings: Mapping[Any, Iterable[str]], advice: str = "it needs {0}={1}", others_read: bool = False
) -> Iterator[ReadCondition]:
    """Make a condition for each setting that only some choices of another setting read.

    selector: the dotted setting that makes the choice. settings: for each choice, regular expressions of the settings
    that it reads, within the section of `selector`. advice: a format string with fields for the selector and for the
    choices. others_read: whether choices that are not in `settings`, such as plug-ins, may read all of them.
    """
    section, dot, _ = selector.rpartition(".")
    for pattern in dict.fromkeys(pattern for patterns in settings.values() for pattern in patterns):
        readers = [choice for choice, patterns in settings.items() if pattern in patterns]

        def is_read(config: Any, readers: list[str] = readers) -> bool:
            choice = attrgetter(selector)(config)
            return choice in readers or (others_read and choice not in settings)

        yield ReadCondition(
            re.escape(section + dot) + pattern, is_read, advice.format(selector, " or ".join(map(str, readers)))
        )


def keeps_all_groups(c: Any) -> bool:
    """Check whether the filter keeps every group that has a score, in steps and in gradient analyses."""
    strategy = c.filter.strategy
    largest = max(c.env.env_groups, c.trainer.gradient_analysis_env_groups or 0) if strategy.counts_groups else 1
    return strategy.can_keep_all and c.filter.rollout_filter_value >= largest


def _updates_policy(c: Any) -> bool:
    trainer = c.trainer
    analyzes_only = trainer.gradient_analysis_only or trainer.exit_after_gradient_analysis
    return trainer.critic_warmup <= trainer.total_training_steps and not (
        trainer.gradient_analysis_mode and analyzes_only
    )


def _has_one_update(c: Any, settings: Any) -> bool:
    """Check whether a step makes a single update with these settings, so that ratios differ from 1 by rounding only."""
    is_one_batch = c.env.kind.has_trees or c.max_batch_size <= settings.ppo_mini_batch_size
    return settings.ppo_epochs == 1 and is_one_batch


PPO_CONDITIONS: tuple[ReadCondition, ...] = (
    # Settings of single choices.
    *derive_conditions("actor.policy_loss", {name: kind.settings for name, kind in POLICY_LOSSES.items()}),
    *derive_conditions(
        "filter.rollout_filter_strategy", {name: kind.settings for name, kind in FILTER_STRATEGIES.items()}
    ),
    *derive_conditions("algorithm.adv_estimator", {name: kind.settings for name, kind in ADVANTAGE_ESTIMATORS.items()}),
    *derive_conditions(
        "env.name",
        {name: (*game.reads, *([rf"{name}\..*"] if game.section else [])) for name, game in GAMES.items()},
        "it needs {0}={1} (type --env {1})",
    ),
    # The model.
    *derive_conditions("model.dtype", {"float16": ("loss_scale",)}),
    ReadCondition(
        r"model\.head_dtype", lambda c: c.model.dtype != "float32", "all logits are float32 with model.dtype=float32"
    ),
    ReadCondition(
        r"model\.lora_(alpha|target_modules)", lambda c: c.model.lora_rank > 0, "it needs model.lora_rank above 0"
    ),
    ReadCondition(
        r"model\.reference_path|trainer\.ref_model_.*",
        lambda c: c.needs_reference,
        "it needs actor.use_kl_loss=True, algorithm.use_kl_in_reward=True or trainer.measure_val_kl=True",
    ),
    ReadCondition(
        r"trainer\.ref_model_mixup_alpha",
        lambda c: c.trainer.ref_model_sync_steps is not None,
        "it needs trainer.ref_model_sync_steps",
    ),
    ReadCondition(
        r"trainer\.ref_model_reset_kl",
        # The first step has no KL, the second one may have the first reset, which changes the third.
        lambda c: c.trains_with_reference and c.trainer.total_training_steps > 2,
        "it needs actor.use_kl_loss=True or algorithm.use_kl_in_reward=True, and three training steps",
    ),
    ReadCondition(
        r"trainer\.ref_model_reset_optimizer",
        lambda c: (
            c.syncs_reference
            and min(c.trainer.ref_model_sync_steps or 2, 2 if c.trainer.ref_model_reset_kl else math.inf)
            < c.trainer.total_training_steps
        ),
        "it needs trainer.ref_model_sync_steps or trainer.ref_model_reset_kl, and a training step afterwards",
    ),
    ReadCondition(
        r"trainer\.ref_model_(sync_steps|mixup_alpha)",
        # Checked by the last step that reads the reference.
        lambda c: (c.trainer.ref_model_sync_steps or 1) < c.trainer.total_training_steps,
        "the run ends before its reference moves: set more trainer.total_training_steps",
    ),
    ReadCondition(
        r"model\.chat_format",
        lambda c: c.model.path not in SHIPPED_MODELS,
        "the shipped policies have no chat template, so their format is ChatML in any case",
    ),
    # The game.
    ReadCondition(
        r"env\.observation_format", lambda c: c.model.prompt_style == "full", "it needs model.prompt_style=full"
    ),
    ReadCondition(
        r"env\.max_actions_per_(turn|traj)",
        lambda c: not c.env.kind.has_trees,
        "a reply has code instead of actions in a game of trees",
    ),
    ReadCondition(
        r"actor\.(loss_agg_mode|ppo_mini_batch_size|ppo_micro_batch_size_per_gpu)",
        lambda c: not c.env.kind.has_trees,
        "the trees of a step are one mini-batch, which algorithm.tree_weighting weights",
    ),
    ReadCondition(
        r"(actor|critic)\.ppo_micro_batch_size_per_gpu",
        lambda c: c.actor.loss_agg_mode != "token-mean-global",
        "actor.loss_agg_mode=token-mean-global takes all tokens of a mini-batch together",
    ),
    ReadCondition(
        r"algorithm\.(tree_weighting|train_children)", lambda c: c.env.kind.has_trees, "it needs --env papers"
    ),
    ReadCondition(
        r"algorithm\.(tree_weighting|train_children)|env\.papers\.max_children_per_call",
        lambda c: c.env.papers.max_children > 0,
        "it needs env.papers.max_children above 0",
    ),
    *derive_conditions("algorithm.train_children", {True: ("tree_weighting",)}),
    *derive_conditions("env.papers.score", {"judge": ("judge_.*",)}),
    ReadCondition(
        r"env\.papers\.num_.*",
        lambda c: c.env.papers.file is None,
        "the questions are those of env.papers.file, which must be null for generated ones",
    ),
    ReadCondition(
        r"env\.overlong_.*", lambda c: not c.env.kind.has_trees, "a tree is scored by its answer, whatever its length"
    ),
    ReadCondition(
        r"env\.overlong_penalty_factor",
        lambda c: c.env.overlong_buffer_len > 0,
        "it needs env.overlong_buffer_len above 0",
    ),
    # The engine.
    *derive_conditions(
        "rollout.name", {"vllm": ("(gpu_memory_utilization|kv_cache_gib|enforce_eager|free_cache_engine)",)}
    ),
    ReadCondition(
        r"rollout\.(logprob_tolerance|recompute_logprobs)|actor\.tis_.*",
        lambda c: c.rollout.has_own_weights,
        "the engine samples from the trainer's own weights, so their log-probs agree: it needs rollout.name=vllm, or "
        "rollout.weight_noise above 0",
    ),
    ReadCondition(
        r"actor\.tis_(mode|imp_ratio_floor)",
        lambda c: c.actor.tis_imp_ratio_cap is not None,
        "it needs a cap of importance weights: type --set actor.tis_imp_ratio_cap=2 as well",
    ),
    ReadCondition(r"rollout\.ts_l", lambda c: c.rollout.ts_n > 0, "it needs rollout.ts_n above 0"),
    # The filter.
    ReadCondition(
        r"filter\.rollout_filter_(type|top_p_prob_mode|selection_eps)",
        lambda c: not keeps_all_groups(c),
        "filter.rollout_filter_value keeps all groups: set a smaller one",
    ),
    ReadCondition(
        r"filter\.(rollout_filter_metric|max_num_gen_batches)|actor\.filter_loss_scaling",
        lambda c: not (keeps_all_groups(c) and c.filter.rollout_filter_include_zero),
        "filter.rollout_filter_value keeps all groups: set a smaller one, or filter.rollout_filter_include_zero=False",
    ),
    ReadCondition(
        r"early_stop\.empty_stop_steps",
        lambda c: c.filter.masks_episodes or not (keeps_all_groups(c) and c.filter.rollout_filter_include_zero),
        "filter.rollout_filter_value keeps all groups: set a smaller one, or filter.rollout_filter_include_zero=False",
    ),
    ReadCondition(
        r"filter\.mask_only_void_turns", lambda c: c.filter.mask_void_turns, "it needs filter.mask_void_turns=True"
    ),
    *derive_conditions("filter.rollout_filter_top_p_prob_mode", {"linear": ("rollout_filter_selection_eps",)}),
    # Losses and advantages.
    ReadCondition(
        r"actor\.stapo_entropy_quantile",
        lambda c: c.actor.stapo_tau_p is not None,
        "it needs a threshold of probabilities: type --set actor.stapo_tau_p=0.002 as well",
    ),
    ReadCondition(
        r"actor\.(clip_ratio_.*|cppo_.*|stapo_.*|filter_loss_scaling)"
        r"|algorithm\.(norm_adv_by_std_in_grpo|scale_rewards)",
        lambda c: not c.algorithm.zero_task_advantage,
        "it needs algorithm.zero_task_advantage=False",
    ),
    ReadCondition(
        r"algorithm\.scale_rewards",
        # `none` counts as read, since it turns the division off.
        lambda c: c.algorithm.norm_adv_by_std_in_grpo or c.algorithm.scale_rewards == "none",
        "it needs algorithm.norm_adv_by_std_in_grpo=True",
    ),
    ReadCondition(
        r"actor\.(clip_ratio|cppo)_.*",
        lambda c: (
            c.model.dtype != "float32"
            or (_updates_policy(c) and not _has_one_update(c, c.actor))
            or c.rollout.trains_from_engine_logprobs
            or min(c.actor.clip_ratio_low, c.actor.clip_ratio_high, c.actor.clip_ratio_c - 1, c.actor.cppo_delta)
            < SMALLEST_CLIP
        ),
        "a step makes one update, whose ratios are 1: set actor.ppo_epochs=2, or a smaller actor.ppo_mini_batch_size",
    ),
    ReadCondition(
        r"actor\.kl_loss_(coef|type)",
        # A coefficient of 0 counts as read, since it turns the KL loss off.
        lambda c: c.actor.use_kl_loss or c.actor.kl_loss_coef == 0,
        "it needs actor.use_kl_loss=True",
    ),
    ReadCondition(
        r"algorithm\.(kl_ctrl\..*|kl_penalty)",
        lambda c: c.algorithm.use_kl_in_reward,
        "it needs algorithm.use_kl_in_reward=True. The coefficient of the KL loss is actor.kl_loss_coef",
    ),
    ReadCondition(
        r"algorithm\.(kl_ctrl\.(type|target_kl|horizon)|kl_penalty)",
        lambda c: c.algorithm.kl_ctrl.kl_coef > 0,
        "it needs algorithm.kl_ctrl.kl_coef above 0",
    ),
    *derive_conditions("algorithm.kl_ctrl.type", {"adaptive": ("(target_kl|horizon)",)}),
    *derive_conditions("algorithm.bi_level_gae", {True: ("high_level_gamma",)}),
    # The critic. An option sets the micro-batch size of actor and critic at once.
    ReadCondition(
        r"critic\.(?!ppo_micro_batch_size_per_gpu).*",
        lambda c: c.algorithm.estimator.needs_critic,
        "it belongs to the critic, which algorithm.adv_estimator=gae alone trains",
    ),
    ReadCondition(
        r"critic\.(betas|weight_decay|grad_clip|ppo_epochs|ppo_mini_batch_size)",
        lambda c: not c.critic.shared_trunk,
        "critic.shared_trunk=True has one update, which reads the setting of `actor`",
    ),
    ReadCondition(
        r"critic\.cliprange_value",
        lambda c: (
            c.model.dtype != "float32"
            or not _has_one_update(c, c.actor if c.critic.shared_trunk else c.critic)
            or c.critic.cliprange_value < SMALLEST_CLIP
        ),
        "a step makes one update, before which no value has moved: set critic.ppo_epochs=2, or a smaller "
        "critic.ppo_mini_batch_size",
    ),
    # Networks that are never updated.
    ReadCondition(
        r"actor\.(lr|betas|weight_decay|grad_clip|ppo_epochs)",
        _updates_policy,
        "no step updates the policy: see trainer.critic_warmup, trainer.gradient_analysis_only and "
        "trainer.exit_after_gradient_analysis",
    ),
    ReadCondition(
        r"critic\.(lr|betas|weight_decay|grad_clip|ppo_epochs|ppo_mini_batch_size)",
        lambda c: not (c.trainer.gradient_analysis_mode and c.trainer.gradient_analysis_only),
        "it needs trainer.gradient_analysis_only=False",
    ),
    # Measurements and the schedule.
    ReadCondition(
        r"(trainer|rollout)\.gradient_analysis_(?!mode).*|trainer\.exit_after_gradient_analysis",
        lambda c: c.trainer.gradient_analysis_mode,
        "it needs trainer.gradient_analysis_mode=True, unless a checkpoint is analyzed later by `probe`",
    ),
    *derive_conditions("rollout.gradient_analysis_bucket_mode", {"quantile": ("gradient_analysis_num_buckets",)}),
    ReadCondition(
        r"trainer\.gradient_analysis_(env_groups|group_size)",
        lambda c: None not in (c.trainer.gradient_analysis_env_groups, c.trainer.gradient_analysis_group_size),
        "it needs both of trainer.gradient_analysis_env_groups and trainer.gradient_analysis_group_size",
    ),
    ReadCondition(
        r"trainer\.gradient_analysis_every",
        lambda c: c.trainer.gradient_analysis_every < c.trainer.total_training_steps,
        "the run ends before its second analysis: set more trainer.total_training_steps",
    ),
    ReadCondition(
        r"trainer\.critic_warmup",
        lambda c: (
            c.trainer.critic_warmup > 1
            and (_updates_policy(c) or c.trainer.critic_warmup > c.trainer.total_training_steps)
        ),
        "step 1 is the first in any case, and a run that only analyzes gradients updates no policy: set 2 or more, and "
        "trainer.gradient_analysis_mode=False",
    ),
    ReadCondition(
        r"trainer\.measure_val_kl",
        lambda c: c.rollout.val_temperature > 0,
        "greedy validations have no sampled tokens: set rollout.val_temperature above 0",
    ),
    ReadCondition(
        r"trainer\.keep_best",
        lambda c: 0 < c.trainer.test_freq < c.trainer.total_training_steps,
        "it needs validations before the last step, which trainer.test_freq sets",
    ),
    ReadCondition(
        r"collapse_detection\.(compute_freq|num_samples|all_quantities)",
        lambda c: c.collapse_detection.first_turn_enabled or c.collapse_detection.multi_turn_enabled,
        "it needs collapse_detection.first_turn_enabled=True or collapse_detection.multi_turn_enabled=True",
    ),
    ReadCondition(
        r"collapse_detection\.compute_freq",
        lambda c: c.collapse_detection.compute_freq <= c.trainer.total_training_steps,
        "the run ends before its second diagnosis: set more trainer.total_training_steps",
    ),
    ReadCondition(
        r"early_stop\.variance_.*",
        lambda c: c.early_stop.variance_baseline_steps + c.early_stop.variance_window <= c.trainer.total_training_steps,
        "the rule needs early_stop.variance_baseline_steps and early_stop.variance_window steps together, and the run "
        "has fewer",
    ),
    ReadCondition(
        r"early_stop\.success_.*",
        lambda c: (
            c.trainer.test_freq > 0
            and c.early_stop.success_patience <= -(-c.trainer.total_training_steps // c.trainer.test_freq)
        ),
        "the rule needs early_stop.success_patience validations, and the run has fewer",
    ),
    ReadCondition(
        r"early_stop\.empty_stop_steps",
        lambda c: c.early_stop.empty_stop_steps <= c.trainer.total_training_steps,
        "the rule needs early_stop.empty_stop_steps steps, and the run has fewer",
    ),
    # Hardware.
    ReadCondition(
        r"trainer\.(zero_stage|offload_.*)",
        lambda c: c.trainer.uses_deepspeed,
        "torch updates on one device. To use DeepSpeed, type --set trainer.strategy=deepspeed, or --gpus-per-exp with "
        "more than one GPU",
    ),
    ReadCondition(
        r"trainer\.swap_to_host",
        lambda c: c.trainer.n_gpus_per_node > 0,
        "a run on the CPU keeps everything in its memory",
    ),
)

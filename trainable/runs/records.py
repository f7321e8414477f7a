"""The columns that a run may write: name, unit and meaning, from which the tables of docs/metrics.md are made.

A row of `steps` is one training step of one run, counted from 1. A row of `trials` is one run.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainable.config.schedules import SCHEDULABLE_SETTINGS


class Column(NamedTuple):
    """One column of a table.

    unit: empty for text and for integers such as `seed`. published_key: the key under which the published system logs
    the same number, or empty.
    """

    name: str
    unit: str
    meaning: str
    published_key: str = ""


QUANTITIES: tuple[Column, ...] = (
    Column("mi_estimate", "nats", "I(X; Z) per token: reasoning_entropy_est - conditional_entropy_est"),
    Column("mi_seq_estimate", "nats", "I(X; Z) per thought: reasoning_entropy_seq_est - conditional_entropy_seq_est"),
    Column("mi_upper_bound", "nats", "log M: upper bound of mi_estimate and of mi_seq_estimate"),
    Column(
        "conditional_entropy_est",
        "nats",
        "H(Z | X) per token: minus the mean over thoughts of the log-prob per token given the thought's own prompt",
    ),
    Column(
        "conditional_entropy_seq_est",
        "nats",
        "H(Z | X) per thought: minus the mean over thoughts of the log-prob of the whole thought given its own prompt",
    ),
    Column(
        "reasoning_entropy_est",
        "nats",
        "H(Z) per token: minus the mean of the log of the mean over prompts of exp(log-prob per token)",
    ),
    Column(
        "reasoning_entropy_seq_est",
        "nats",
        "H(Z) per thought: minus the mean of the log of the mean over prompts of exp(log-prob of the whole thought)",
    ),
    Column(
        "retrieval_accuracy",
        "fraction",
        "thoughts to which their own prompt, or an equal one, gives the highest probability / thoughts",
    ),
    Column(
        "retrieval_chance_level",
        "fraction",
        "mean over thoughts of (number of prompts equal to the thought's own, including itself) / M",
    ),
    Column(
        "retrieval_shuffled",
        "fraction",
        "retrieval_accuracy after shuffling the prompts among the thoughts: mean of 100 shuffles",
    ),
)
"""Of each of the two samples, under the published names; M is the number of prompts in the sample.

Written in every row with a diagnosis: mutual information and entropies per token and per thought, and retrieval.

Retrieval means finding a thought's own prompt among all prompts. `retrieval_chance_level` is its rate by chance.
"""

EXTRA_QUANTITIES: tuple[Column, ...] = (
    Column("mi_estimate_paper", "nats", "I(X; Z) per token: reasoning_entropy_est_paper - conditional_entropy_est"),
    Column("mi_upper_bound_paper", "nats", "mean over thoughts of log M / tokens: upper bound of mi_estimate_paper"),
    Column("matched_log_prob_mean", "nats", "-conditional_entropy_est"),
    Column("marginal_log_prob_mean", "nats", "-reasoning_entropy_est"),
    Column("marginal_log_prob_mean_paper", "nats", "-reasoning_entropy_est_paper"),
    Column(
        "reasoning_entropy_est_paper",
        "nats",
        "H(Z) per token: minus the mean of (the log of the mean over prompts of exp(log-prob of the whole thought)) / "
        "tokens",
    ),
    Column(
        "marginal_std", "nats", "standard deviation (divisor N) over thoughts of the terms of marginal_log_prob_mean"
    ),
    Column("marginal_std_seq", "nats", "as marginal_std, of the terms of reasoning_entropy_seq_est"),
    Column("marginal_std_paper", "nats", "as marginal_std, of the terms of marginal_log_prob_mean_paper"),
    Column("mi_zscore", "1", "mi_estimate / (marginal_std + 1e-3)"),
    Column("mi_zscore_seq", "1", "mi_seq_estimate / (marginal_std_seq + 1e-3)"),
    Column("mi_zscore_paper", "1", "mi_estimate_paper / (marginal_std_paper + 1e-3)"),
    Column("marginal_std_ema", "nats", "moving average of marginal_std: its first value, then 0.9 old + 0.1 new"),
    Column("marginal_std_ema_seq", "nats", "as marginal_std_ema, of marginal_std_seq"),
    Column("marginal_std_ema_paper", "nats", "as marginal_std_ema, of marginal_std_paper"),
    Column("mi_zscore_ema", "1", "mi_estimate / (marginal_std_ema + 1e-3)"),
    Column("mi_zscore_ema_seq", "1", "mi_seq_estimate / (marginal_std_ema_seq + 1e-3)"),
    Column("mi_zscore_ema_paper", "1", "mi_estimate_paper / (marginal_std_ema_paper + 1e-3)"),
    Column(
        "retrieval_accuracy@2",
        "fraction",
        "thoughts with their own prompt, or an equal one, among the 2 that give them the highest probability / "
        "thoughts",
    ),
    Column("retrieval_accuracy@4", "fraction", "as retrieval_accuracy@2, among the 4"),
    Column("retrieval_accuracy@8", "fraction", "as retrieval_accuracy@2, among the 8"),
    Column("retrieval_chance_level@2", "fraction", "min(1, 2 retrieval_chance_level)"),
    Column("retrieval_chance_level@4", "fraction", "min(1, 4 retrieval_chance_level)"),
    Column("retrieval_chance_level@8", "fraction", "min(1, 8 retrieval_chance_level)"),
    Column("retrieval_above_chance", "fraction", "retrieval_accuracy - retrieval_chance_level"),
    Column("retrieval_above_chance@2", "fraction", "retrieval_accuracy_at_2 - retrieval_chance_level_at_2"),
    Column("retrieval_above_chance@4", "fraction", "retrieval_accuracy_at_4 - retrieval_chance_level_at_4"),
    Column("retrieval_above_chance@8", "fraction", "retrieval_accuracy_at_8 - retrieval_chance_level_at_8"),
)
"""Written only if `collapse_detection.all_quantities` is set: other normalizations, spreads, z-scores, retrieval at k.

Reports and stop rules of this project do not use them. They allow comparisons with logs of the published system.
"""


def _make_collapse_columns(quantities: Iterable[Column]) -> tuple[Column, ...]:
    """Make the columns of these quantities for the sample of first turns, then for the sample of trajectories."""
    # The published system does not log quantities with these two suffixes.
    return tuple(
        Column(
            f"collapse_{sample}_{name.replace('@', '_at_')}",
            unit,
            meaning if sample == "first_turn" else f"as collapse_first_turn_{name.replace('@', '_at_')}",
            "" if name.endswith(("_paper", "_shuffled")) else f"collapse_{sample}_sample/{name}",
        )
        for sample in ("first_turn", "trajectory")
        for name, unit, meaning, _ in quantities
    )


DEFAULT_STEP_COLUMNS: tuple[Column, ...] = (
    # The collected episodes: all P x G episodes of the step, before the filter.
    Column("train_success", "fraction", "episodes that ended with success / episodes", "train/CoordSokoban/success"),
    Column(
        "train_pass_at_group", "fraction", "groups with a successful episode / groups", "train/CoordSokoban/pass@16"
    ),
    Column("train_reward", "reward", "mean episode score, penalties included"),
    Column("train_actions", "actions", "mean executed actions per episode", "train/CoordSokoban/num_actions"),
    Column("train_invalid_turns", "fraction", "turns without a valid action / turns"),
    Column("train_children", "children", "papers: mean number of children that a tree asked"),
    Column(
        "train_consistent_guesses",
        "fraction",
        "Mastermind: guesses after the first that all answers before them allow / guesses after the first, mean over "
        "episodes with at least two guesses",
    ),
    Column("train_response_tokens", "tokens", "mean sampled tokens per episode", "train/response_length"),
    Column("train_shared_tokens", "fraction", "tokens that branches copied / sampled; missing without rollout.ts_n"),
    Column(
        "reward_std", "reward", "std (ddof 1) of the scores of a group, mean over groups", "rollout/in_group_reward_std"
    ),
    Column("reward_std_max", "reward", "largest standard deviation of the scores within a group"),
    Column("zero_std_groups", "groups", "groups whose scores have a std of at most 1e-10", "rollout/filter_zero_count"),
    # The groups that the filter kept.
    Column("groups", "groups", "groups collected"),
    Column("groups_kept", "groups", "groups trained on", "rollout/filter_kept_count"),
    Column("kept_ratio", "fraction", "groups_kept / groups", "rollout/filter_kept_ratio"),
    Column(
        "reward_std_kept", "reward", "reward_std over the kept groups; 0 if none", "rollout/chosen_in_group_reward_std"
    ),
    Column("gen_batches", "batches", "batches of levels sampled; missing if it is always one"),
    Column(
        "masked_episodes",
        "episodes",
        "kept episodes that the losses leave out; missing if no setting masks any",
    ),
    Column(
        "consecutive_empty_steps",
        "steps",
        "consecutive steps, up to this one, with nothing to train on",
        "rollout/consecutive_empty_after_filter_steps",
    ),
    # The update. If the filter kept no group, all but the engine's columns are missing.
    Column("batch_size", "sequences", "sequences trained on, including copies", "train/batch_size"),
    Column(
        "engine_mismatch_mean",
        "nats",
        "mean absolute difference between the trainer's and the engine's log-probs over all sampled tokens; missing "
        "if they share weights, and with rollout.recompute_logprobs=False",
    ),
    Column("engine_mismatch_max", "nats", "as engine_mismatch_mean, the largest difference"),
    Column("engine_kl", "nats", "KL(engine || trainer) per token, k3 estimate"),
    Column("engine_ess_fraction", "fraction", "effective sample size of the weights exp(trainer - engine) / tokens"),
    Column(
        "engine_prompt_mismatch",
        "nats",
        "mean absolute difference between the trainer's and the engine's log-probs on a fixed prompt, for the weights "
        "that sampled; missing before the first sync",
    ),
    Column(
        "entropy",
        "nats",
        "token mean of the sampling policy's entropy over the kept episodes; missing with vLLM and "
        "rollout.recompute_logprobs=False",
        "actor/entropy",
    ),
    Column(
        "pg_loss",
        "1",
        "policy loss, aggregated as loss_agg_mode says; near 0 with centered advantages, whatever the gradient is",
        "actor/pg_loss",
    ),
    Column(
        "pg_clipfrac",
        "fraction",
        "trained tokens whose ratio is clipped (cppo: masked)",
        "actor/pg_clipfrac",
    ),
    Column(
        "pg_clipfrac_lower",
        "fraction",
        "trained tokens with a negative advantage that the dual clip clips; ppo_clip only",
        "actor/pg_clipfrac_lower",
    ),
    Column(
        "tis_clipfrac",
        "fraction",
        "trained tokens whose importance weight is truncated or set to 0; missing without actor.tis_imp_ratio_cap",
    ),
    Column(
        "stapo_silenced_fraction",
        "fraction",
        "trained tokens that STAPO silences; missing without actor.stapo_tau_p",
    ),
    Column("ppo_kl", "nats", "token mean of log pi_old - log pi, each clamped to [-20, 20]", "actor/ppo_kl"),
    Column("tpo_target_entropy", "nats", "entropy of TPO's target over a group, mean over groups; missing without TPO"),
    Column(
        "tpo_target_top_prob", "fraction", "largest probability of TPO's target, mean over groups; missing without TPO"
    ),
    Column(
        "entropy_loss",
        "nats",
        "entropy during the update, aggregated as loss_agg_mode says and averaged over mini-batches, without its "
        "coefficient",
        "actor/entropy_loss",
    ),
    Column(
        "kl_loss", "nats", "KL estimator of the loss, as entropy_loss; missing if the KL loss is off", "actor/kl_loss"
    ),
    Column(
        "kl_to_reference",
        "nats",
        "estimate of KL(pi || ref) before the update: token mean over trained tokens of k3 = exp(-d) + d - 1 with d = "
        "log pi - log ref, at most 10 per token; missing if there is no reference pass. With "
        "rollout.recompute_logprobs=False, pi is that of the engine",
    ),
    Column(
        "reference_step",
        "steps",
        "the step after which the policy became the reference of this step's KL, 0: before training; missing if it "
        "never moves",
    ),
    Column(
        "actor_grad_norm", "1", "gradient norm before clipping, mean over applied optimizer steps", "actor/grad_norm"
    ),
    Column("vf_loss", "reward^2", "value loss, mean over micro-batches", "critic/vf_loss"),
    Column("vf_clipfrac", "fraction", "values that the value clip clips", "critic/vf_clipfrac"),
    Column("critic_grad_norm", "1", "as actor_grad_norm, for the critic", "critic/grad_norm"),
    Column("value_mean", "reward", "token mean of the values before the update", "critic/values/mean"),
    Column(
        "explained_variance",
        "1",
        "1 - Var(returns - values) / Var(returns), with the values before the update",
        "critic/vf_explained_var",
    ),
    Column("nonfinite_updates", "optimizer steps", "optimizer steps skipped because a loss or gradient was not finite"),
    Column(
        "kl_in_reward_coef", "1", "coefficient of the KL penalty in the reward; missing if there is no such penalty"
    ),
    # How much thoughts depend on prompts, before the update. These columns are missing in steps without a diagnosis,
    # and for samples that are switched off.
    Column(
        "collapse_valid_thinking_rate",
        "fraction",
        "turns with a valid thought (closed and not blank) / turns",
        "collapse/valid_thinking_rate",
    ),
    Column("collapse_first_turn_num_total", "episodes", "episodes collected", "collapse/first_turn_num_total"),
    Column(
        "collapse_first_turn_num_valid",
        "episodes",
        "episodes with a valid thought in their first turn",
        "collapse/first_turn_num_valid",
    ),
    Column(
        "collapse_first_turn_valid_rate",
        "fraction",
        "collapse_first_turn_num_valid / collapse_first_turn_num_total",
        "collapse/first_turn_valid_rate",
    ),
    *_make_collapse_columns(QUANTITIES),
    # The cost of the step.
    Column("optimizer_steps", "optimizer steps", "optimizer steps of the policy in this step"),
    Column("env_steps", "actions", "actions executed in this step"),
    Column("sampled_tokens", "tokens", "tokens sampled in this step"),
    Column("trained_tokens", "tokens", "sampled tokens in the trained batch, including copies"),
    Column(
        "padding_fraction",
        "fraction",
        "padding in the trained batch: 1 - tokens that a pass needs / (episodes x tokens of the longest episode); "
        "only models that run through transformers compute it",
    ),
    Column("total_optimizer_steps", "optimizer steps", "optimizer_steps so far"),
    Column("total_env_steps", "actions", "env_steps so far"),
    Column("total_sampled_tokens", "tokens", "sampled_tokens so far"),
    Column("total_trained_tokens", "tokens", "trained_tokens so far"),
    # The validation. These columns are missing in steps without one.
    Column(
        "val_success",
        "fraction",
        "successful validation episodes / episodes, sampled at val_temperature",
        "val-env/CoordSokoban/success",
    ),
    Column(
        "val_success_unseen",
        "fraction",
        "val_success over the levels that are in no symmetry class of a training level of the whole run",
    ),
    Column("val_reward", "reward", "mean validation score", "val-env/charts/avg_episode_return"),
    Column("val_invalid_turns", "fraction", "validation turns without a valid action / turns"),
    Column("val_children", "children", "train_children in the validation, sampled"),
    Column("val_consistent_guesses", "fraction", "train_consistent_guesses in the validation, sampled"),
    Column(
        "val_kl_to_reference",
        "nats",
        "as kl_to_reference, after the update: over the sampled tokens of the validation, at val_temperature; missing "
        "without trainer.measure_val_kl",
    ),
    Column("val_greedy_success", "fraction", "as val_success, with greedy decoding; last step only"),
    Column("test_success", "fraction", "successful test episodes / episodes, sampled; last step only"),
    Column("test_greedy_success", "fraction", "as test_success, with greedy decoding; last step only"),
    # The validation before training, recorded in the row of step 1.
    Column("base_val_success", "fraction", "val_success of the policy before training"),
    Column("base_val_success_unseen", "fraction", "val_success_unseen of the policy before training"),
    Column("base_val_reward", "reward", "val_reward of the policy before training"),
    Column("base_val_invalid_turns", "fraction", "val_invalid_turns of the policy before training"),
    Column(
        "base_val_kl_to_reference",
        "nats",
        "val_kl_to_reference before training; missing if the policy is the reference",
    ),
    Column("base_val_children", "children", "val_children of the policy before training"),
    Column("base_val_consistent_guesses", "fraction", "val_consistent_guesses of the policy before training"),
    Column("base_val_greedy_success", "fraction", "val_greedy_success of the policy before training"),
    # Times. Comparisons of rows for equality ignore these columns, because they differ between equal runs.
    Column("seconds_rollout", "s", "collecting episodes", "timing_s/gen"),
    Column("seconds_collapse_first_turn", "s", "scoring thoughts of first turns", "timing_s/collapse_first_turn_step"),
    Column("seconds_collapse_multi_turn", "s", "scoring thoughts of all turns", "timing_s/collapse_multi_turn_step"),
    Column("seconds_values", "s", "value pass of the critic, without gradients", "timing_s/values"),
    Column("seconds_reference", "s", "reference pass", "timing_s/ref"),
    Column("seconds_sync_weights", "s", "synchronizing weights to the sampling engine, if it has its own"),
    Column("seconds_update_critic", "s", "critic update (none with shared_trunk)", "timing_s/update_critic"),
    Column("seconds_update_actor", "s", "policy update", "timing_s/update_actor"),
    Column("seconds_gradient_analysis", "s", "gradient analysis", "timing_s/gradient_analysis"),
    Column("seconds_validation", "s", "validation and test", "timing_s/testing"),
    Column("seconds_step", "s", "the whole step, including validation but not checkpoints", "timing_s/step"),
    Column("cpu_seconds_step", "s", "CPU time of the step in this process, all threads"),
    Column("seconds_total", "s", "sum of seconds_step of this run so far, across restarts", "timing_s/total"),
    Column("peak_flops_per_s", "1/s", "FLOP/s of large matrix products, measured once in the run's process"),
    Column(
        "mfu_rollout",
        "fraction",
        "MFU of seconds_rollout: FLOP/s / (peak_flops_per_s x ranks); the common prompt of a group is counted once, "
        "and that of each child of a tree",
    ),
    Column("mfu_values", "fraction", "MFU of seconds_values"),
    Column("mfu_reference", "fraction", "MFU of seconds_reference"),
    Column(
        "mfu_update_critic", "fraction", "MFU of seconds_update_critic; backward passes count twice, with LoRA once"
    ),
    Column("mfu_update_actor", "fraction", "MFU of seconds_update_actor; recomputed activations are not counted"),
    Column("tokens_per_second", "tokens/s", "sampled_tokens / seconds_rollout"),
)
EXTRA_COLLAPSE_COLUMNS = _make_collapse_columns(EXTRA_QUANTITIES)
"""Measured only if `collapse_detection.all_quantities` is set."""
SCHEDULE_COLUMNS: Mapping[str, Column] = {
    name: Column(
        f"scheduled_{name.replace('.', '_')}",
        "1",
        "the setting's value in this step; missing if it is a number" if number == 0 else "as scheduled_actor_lr",
    )
    for number, name in enumerate(SCHEDULABLE_SETTINGS)
}
"""For each setting that may have a schedule, the column of its values."""
STEP_COLUMNS: tuple[Column, ...] = (*DEFAULT_STEP_COLUMNS, *EXTRA_COLLAPSE_COLUMNS, *SCHEDULE_COLUMNS.values())

IMPORTED_COLUMNS: tuple[Column, ...] = (
    Column("source", "", "kind of log that the row was read from"),
    Column("file", "", "the log, as it was typed"),
    Column("line", "lines", "line of the log on which the row begins"),
    Column("entropy_sampled", "nats", "minus the mean log-prob of sampled tokens: an estimate of the entropy"),
    Column("kl_k1", "nats", "estimate of the KL to the reference by log pi - log ref, which may be negative"),
    Column("kl_estimate", "nats", "KL to the reference by an estimator that the log does not name"),
    Column("engine_probability_mismatch", "1", "mean difference between the trainer's and the engine's probabilities"),
    Column("train_truncated", "fraction", "replies of full length / replies"),
    Column("zero_std_fraction", "fraction", "groups whose rewards are all equal / groups, as the trainer counts them"),
)
"""Measured only by other trainers, in runs that `import` has read."""

# Written by the study, in addition to the columns that the trial reports.
ROW_COLUMNS: tuple[Column, ...] = (
    Column("run_id", "", "name of the run: one configuration with one seed"),
    Column("study", "", "name of the study"),
    Column("arm", "", "label of the arm: the value of the axis as typed"),
    Column("seed", "", "seed of the run; equal seeds pair runs across arms"),
    Column("step", "steps", "training step, from 1"),
)

STOP_COLUMNS: tuple[Column, ...] = (
    Column("stop_rule", "", "rule that stopped the run; empty if none has", "early_stopped/<rule>"),
    Column("stop_value", "as the rule's", "the value that triggered the rule"),
    Column("stop_threshold", "as the rule's", "the threshold of the rule"),
    Column("stop_step", "steps", "the step at which the rule fired"),
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("trial_id", "", "Ray Tune's id of the last trial of the run"),
    Column("config_hash", "", "hash of the configuration without the seed"),
    Column("experiment_name", "", "name in the format of the published documents"),
    Column("status", "", "completed, early_stopped, censored (by a search), failed, interrupted or never_ran"),
    Column("reason", "", "why the run has this status"),
    Column(
        "failure_class",
        "",
        "kind of failure: configuration, non-finite, out of memory, storage, node, process died or error",
    ),
    Column("steps_done", "steps", "training steps with a row"),
    Column("steps_total", "steps", "training steps requested"),
    Column(
        "late_val_success",
        "fraction",
        "mean of val_success over the last 4 planned validations; a stopped run keeps its last value for those that it "
        "missed. Without any, val_success before training",
    ),
    Column(
        "mean_val_success",
        "fraction",
        "area under the curve of val_success over steps (trapezoids between validations, from the one before "
        "training), divided by its length; for a run that a rule stopped the last value counts up to steps_total",
    ),
    Column("final_val_success", "fraction", "val_success of the last validation"),
    Column("final_train_success", "fraction", "train_success of the last step"),
    Column("final_val_success_unseen", "fraction", "val_success_unseen of the last validation"),
    Column("final_val_greedy_success", "fraction", "val_greedy_success at the end"),
    Column(
        "peak_val_success", "fraction", "largest val_success of the run; biased upwards, because the best is selected"
    ),
    Column("started_at", "UTC", "when the run first started"),
    Column("ended_at", "UTC", "when the run ended"),
)

# A row of `gradients` is one component of the loss in one bucket of one analysis batch. It also has run and step.
GRADIENT_COLUMNS: tuple[Column, ...] = (
    Column("source", "", "train: during training; probe: from a restored checkpoint"),
    Column("prefilter", "", "true: the analysis batch before the filter; false: what the filter kept"),
    Column("bucket", "", "bucket_1 (smallest reward spread) to bucket_6, or all"),
    Column("component", "", "task, entropy, kl, value (on a shared trunk), or total, their sum"),
    Column(
        "norm",
        "1",
        "norm of a mini-batch's gradient, including the coefficient, mean over mini-batches; missing for total",
        "grad_norm/<bucket>/<component>",
    ),
    Column("norm_per_sample", "1", "norm / sample_count", "grad_norm/<bucket>/per_sample/<component>"),
    Column("norm_per_token", "1", "norm / token_count", "grad_norm/<bucket>/per_token/<component>"),
    Column("loss", "1", "loss with its coefficient, mean over micro-batches", "grad_norm/<bucket>/loss/<component>"),
    Column("mean_norm", "1", "norm of the bucket's mean gradient over all its tokens; its square is signal + noise"),
    Column("signal", "1", "unbiased estimate of the squared norm of the mean gradient's expectation; may be negative"),
    Column("noise", "1", "unbiased estimate of the summed variance of the mean gradient over draws of prompts"),
    Column("snr", "1", "signal / noise"),
    Column("snr_low", "1", "lower end of the 95 % interval of snr, from a jackknife over folds of prompts"),
    Column("snr_high", "1", "upper end of the 95 % interval of snr"),
    Column("cosine_task", "1", "cosine between the mean gradients of this component and of task"),
    Column("cosine_entropy", "1", "as cosine_task, with entropy; missing if the loss has no entropy bonus"),
    Column("cosine_kl", "1", "as cosine_task, with kl; missing if the KL loss is off"),
    Column(
        "share", "fraction", "signed share in the sampled step (the mean gradient, with its noise); shares sum to 1"
    ),
    Column(
        "signal_share",
        "fraction",
        "signed share in the expected step, from products of different folds; shares sum to 1; "
        "missing if the total has no signal, with all folds or without one of them",
    ),
    Column("signal_share_low", "fraction", "lower end of the 95 % interval of signal_share, as snr_low"),
    Column("signal_share_high", "fraction", "upper end of the 95 % interval of signal_share"),
    Column("weight", "fraction", "weight of the bucket in the batch's mean gradient; weights of buckets sum to 1"),
    Column(
        "fold_count", "folds", "folds of prompts for signal and noise: 8, or one per group if there are fewer groups"
    ),
    Column("sample_count", "sequences", "sequences in the bucket, including copies", "grad_norm/<bucket>/sample_count"),
    Column(
        "sample_pct",
        "percent",
        "percentage of the batch's sequences that are in the bucket, including copies",
        "grad_norm/<bucket>/sample_pct",
    ),
    Column("token_count", "tokens", "trained tokens in the bucket, including copies"),
    Column("group_count", "groups", "groups in the bucket", "grad_norm/<bucket>/group_rv_count"),
    Column("reward_std_mean", "reward", "mean reward std of the groups", "grad_norm/<bucket>/reward_std_mean"),
    Column("reward_std_min", "reward", "smallest reward std of a group", "grad_norm/<bucket>/reward_std_min"),
    Column("reward_std_max", "reward", "largest reward std of a group", "grad_norm/<bucket>/reward_std_max"),
    Column("source_env_groups", "groups", "groups rolled out for the analysis", "grad_analysis/source_env_groups"),
    Column("source_group_size", "episodes", "episodes per rolled-out group", "grad_analysis/source_group_size"),
    Column("source_batch_size", "sequences", "sequences before the filter", "grad_analysis/source_batch_size"),
    Column(
        "adjusted_batch_size", "sequences", "after the filter, including copies", "grad_analysis/adjusted_batch_size"
    ),
    Column(
        "uses_training_batch",
        "",
        "true: the batch of the training step; false: a batch that was rolled out for the analysis",
        "grad_analysis/uses_training_batch",
    ),
    Column("form", "", "task: advantage estimator; kl: form of the KL loss; missing for other components"),
    Column("coefficient", "1", "coefficient of the component's loss in this analysis"),
    Column("bucket_mode", "", "quantile: equally many groups per bucket; fixed_rv: edges at a reward std of 1 to 5"),
    Column(
        "sketch",
        "entries",
        "size of the sketch that replaces each gradient (relative error of a norm: about 1 / sqrt(2 sketch)); missing "
        "if whole gradients were used",
    ),
    Column("overrides", "", "settings of a probe that differ from those of the run; empty if none"),
    Column(
        "empty_after_filter",
        "1",
        "1: the filter kept nothing, so this is a single row without a gradient; otherwise 0",
        "grad_analysis/empty_after_filter",
    ),
    Column(
        "analysis_only", "1", "1: nothing is updated, as in every probe; otherwise 0", "trainer/gradient_analysis_only"
    ),
    Column("source_groups_kept", "groups", "rolled-out groups that the filter kept", "grad_analysis/filter_kept_count"),
    Column(
        "source_kept_ratio", "fraction", "source_groups_kept / source_env_groups", "grad_analysis/filter_kept_ratio"
    ),
    Column(
        "source_zero_std_groups", "groups", "zero_std_groups of rolled-out groups", "grad_analysis/filter_zero_count"
    ),
    Column(
        "source_reward_std", "reward", "mean reward std of the rolled-out groups", "grad_analysis/in_group_reward_std"
    ),
    Column(
        "source_reward_std_kept",
        "reward",
        "mean reward std of the groups that the filter kept; 0 if none",
        "grad_analysis/chosen_in_group_reward_std",
    ),
)

# A row of `gradient_groups` is one group of an analysis batch.
GRADIENT_GROUP_COLUMNS: tuple[Column, ...] = (
    Column("group", "", "index of the group in the analysis batch", "grad_norm/<bucket>/group_rv_table"),
    Column(
        "reward_std", "reward", "standard deviation (ddof 1) of the group's scores", "grad_norm/<bucket>/group_rv_table"
    ),
)

# Columns of `trials` with the run's last value of the step column of the same name.
TRIAL_LAST_VALUES: tuple[str, ...] = (
    "base_val_success",
    "base_val_success_unseen",
    "base_val_greedy_success",
    "test_success",
    "test_greedy_success",
    "total_optimizer_steps",
    "total_env_steps",
    "total_sampled_tokens",
    "total_trained_tokens",
    "seconds_total",
)

TOY_TIME_COLUMNS: tuple[Column, ...] = (
    Column("seconds", "s", "seconds since the last row, shared by all runs of the trial"),
    Column("seconds_total", "s", "seconds since the run started, without pauses"),
)
"""Times of the rows of toy tasks."""

LAST_VALUE_COLUMNS = tuple(column for name in TRIAL_LAST_VALUES for column in STEP_COLUMNS if column.name == name)
COMMON_TRIAL_COLUMNS = tuple(
    column for column in TRIAL_COLUMNS if not column.name.endswith(("_success", "_success_unseen"))
)
"""The trial columns of all families. Only a language model has success rates over levels."""

TIME_COLUMNS: frozenset[str] = frozenset(
    {
        column.name
        for column in STEP_COLUMNS
        if "second" in column.name or column.name.startswith(("mfu_", "peak_flops_per_s"))
    }
    | {"started_at", "ended_at"}
)


STATUSES: tuple[str, ...] = ("completed", "early_stopped", "censored", "failed", "interrupted", "never_ran")


def make_empty_row(*, all_quantities: bool = False, schedules: Iterable[str] = ()) -> dict[str, float | str | None]:
    """Make a row with every step and stop column, without values.

    Tune's csv keeps only the columns of the first reported row, so this row needs all columns. all_quantities: whether
    to include the columns of the setting `collapse_detection.all_quantities`. schedules: the settings with schedules.
    """
    columns = (*DEFAULT_STEP_COLUMNS, *(EXTRA_COLLAPSE_COLUMNS if all_quantities else ()))
    columns += (*(SCHEDULE_COLUMNS[name] for name in schedules), *STOP_COLUMNS)
    row: dict[str, float | str | None] = {column.name: None for column in columns}
    # Empty text means that no rule has fired. Without this key, the study's Stoppers would apply the rules themselves.
    row["stop_rule"] = ""
    return row


CARRIED_KEY = "carried"
"""The key of a result for the names of columns with values of earlier steps, separated by spaces."""


def carry_values(row: Mapping[str, Any], last_values: dict[str, Any]) -> dict[str, Any]:
    """Make a result for Tune: fill columns of `row` that were not measured with earlier values, and list their names.

    The values are from `last_values`, which `row` updates. Before its first measurement, a column has the value of
    `base_<column>`, or else NaN.

    Example:
        >>> carry_values({"step": 1, "base_val_success": 0.25, "val_success": None}, {})
        {'step': 1, 'base_val_success': 0.25, 'val_success': 0.25, 'carried': 'val_success'}
    """
    last_values |= {name: value for name, value in row.items() if value is not None}
    unmeasured = [name for name, value in row.items() if value is None]
    earlier_values = {name: last_values.get(name, last_values.get(f"base_{name}", math.nan)) for name in unmeasured}
    return {**row, **earlier_values, CARRIED_KEY: " ".join(unmeasured)}


def drop_carried(result: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `carry_values`: set columns that were not measured to None. Return other results unchanged."""
    unmeasured = str(result.get(CARRIED_KEY, "")).split()
    return {**result, **dict.fromkeys(unmeasured)}

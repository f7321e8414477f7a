"""The columns that a run may write: name, unit, formula. docs/metrics.md has a line for each; a test compares both.

A row of `steps` is one training step of one run (step 1 is the first). A row of `trials` is one run.
`published` is the key under which the published system logs the same number, where it does.
"""

from collections.abc import Iterable
from typing import NamedTuple

from trainable.runs.collapse_quantities import EXTRA_QUANTITIES, QUANTITIES, Quantity


class Column(NamedTuple):
    """One column: its name, its unit, what the number is, and the published key."""

    name: str
    unit: str
    meaning: str
    published_key: str = ""


def _make_collapse_columns(quantities: Iterable[Quantity]) -> tuple[Column, ...]:
    """The columns of these quantities of the first turns' sample, then of the trajectories'."""
    return tuple(
        Column(
            f"collapse_{sample}_{name.replace('@', '_at_')}",
            unit,
            meaning,
            "" if name.endswith(("_paper", "_shuffled")) else f"collapse_{sample}_sample/{name}",
        )
        for sample in ("first_turn", "trajectory")
        for name, unit, meaning in quantities
    )


DEFAULT_STEP_COLUMNS: tuple[Column, ...] = (
    # What was collected: all P x G episodes of the step, before the filter.
    Column("train_success", "share", "solved episodes / episodes", "train/CoordSokoban/success"),
    Column("train_pass_at_group", "share", "groups with a solved episode / groups", "train/CoordSokoban/pass@16"),
    Column("train_reward", "reward", "mean episode score, penalties included"),
    Column("train_actions", "actions", "mean executed actions of an episode", "train/CoordSokoban/num_actions"),
    Column("train_invalid_turns", "share", "turns with an invalid or no action / turns"),
    Column("train_response_tokens", "tokens", "mean sampled tokens of an episode", "train/response_length"),
    Column(
        "reward_std",
        "reward",
        "mean over groups of the score's standard deviation (ddof 1) in the group",
        "rollout/in_group_reward_std",
    ),
    Column("reward_std_max", "reward", "largest such standard deviation"),
    Column(
        "zero_std_groups",
        "groups",
        "groups whose scores have a standard deviation of at most 1e-10",
        "rollout/filter_zero_count",
    ),
    # What the filter kept.
    Column("groups", "groups", "groups collected"),
    Column("groups_kept", "groups", "groups trained on", "rollout/filter_kept_count"),
    Column("kept_ratio", "share", "groups_kept / groups", "rollout/filter_kept_ratio"),
    Column(
        "reward_std_kept", "reward", "reward_std over kept groups; 0 when none", "rollout/chosen_in_group_reward_std"
    ),
    Column(
        "consecutive_empty_steps",
        "steps",
        "steps up to this one with nothing kept",
        "rollout/consecutive_empty_after_filter_steps",
    ),
    # What the update did. Missing in a step with nothing kept.
    Column("batch_size", "sequences", "sequences trained on, copies included", "train/batch_size"),
    Column(
        "engine_mismatch_mean",
        "nats",
        "mean difference, without sign, of the trainer's and the engine's log-probs of all "
        "sampled tokens; missing where they share weights",
    ),
    Column("engine_mismatch_max", "nats", "largest of these differences"),
    Column("engine_kl", "nats", "KL of the engine's distribution from the trainer's a token, k3 estimate"),
    Column("engine_ess_fraction", "share", "effective sample size of the weights exp(trainer - engine), over tokens"),
    Column("entropy", "nats", "token mean of the sampling policy's entropy over kept episodes", "actor/entropy"),
    Column("pg_loss", "1", "policy loss, mean over micro-batches", "actor/pg_loss"),
    Column("pg_clipfrac", "share", "tokens whose ratio is cut at the clip range", "actor/pg_clipfrac"),
    Column(
        "pg_clipfrac_lower", "share", "tokens with negative advantage cut by the dual clip", "actor/pg_clipfrac_lower"
    ),
    Column("ppo_kl", "nats", "token mean of log pi_old - log pi", "actor/ppo_kl"),
    Column(
        "tpo_target_entropy",
        "nats",
        "entropy of tpo's target over a group's rollouts, mean over groups; missing when off",
    ),
    Column("tpo_target_top_prob", "share", "largest probability of that target, mean over groups; missing when off"),
    Column(
        "entropy_loss", "nats", "token mean of the entropy in the update, before its coefficient", "actor/entropy_loss"
    ),
    Column(
        "kl_loss",
        "nats",
        "token mean of the KL estimator in the loss, before its coefficient; missing when off",
        "actor/kl_loss",
    ),
    Column(
        "kl_to_reference",
        "nats",
        "token mean of k3 = exp(-d) + d - 1, d = log pi - log ref, at the trained tokens, before the update; "
        "KL(pi || ref) estimated; missing when no reference pass is made",
    ),
    Column("actor_grad_norm", "1", "total gradient norm before clipping, mean over optimizer steps", "actor/grad_norm"),
    Column("vf_loss", "reward^2", "value loss, mean over micro-batches", "critic/vf_loss"),
    Column("vf_clipfrac", "share", "values cut by the value clip", "critic/vf_clipfrac"),
    Column("critic_grad_norm", "1", "as actor_grad_norm, of the critic", "critic/grad_norm"),
    Column("value_mean", "reward", "token mean of the values before the update", "critic/values/mean"),
    Column(
        "explained_variance",
        "1",
        "1 - Var(returns - values) / Var(returns), values before the update",
        "critic/vf_explained_var",
    ),
    Column("nonfinite_updates", "optimizer steps", "optimizer steps skipped for a non-finite gradient norm"),
    Column("kl_in_reward_coef", "1", "coefficient of the KL penalty in the reward; missing when off"),
    # How much thoughts depend on prompts, before the update. Missing where not diagnosed, or where a sample is off.
    Column(
        "collapse_valid_thinking_rate",
        "share",
        "turns with a thought that is closed and not blank / turns",
        "collapse/valid_thinking_rate",
    ),
    Column("collapse_first_turn_num_total", "episodes", "episodes collected", "collapse/first_turn_num_total"),
    Column(
        "collapse_first_turn_num_valid",
        "episodes",
        "episodes with such a thought in their first turn",
        "collapse/first_turn_num_valid",
    ),
    Column(
        "collapse_first_turn_valid_rate",
        "share",
        "collapse_first_turn_num_valid / collapse_first_turn_num_total",
        "collapse/first_turn_valid_rate",
    ),
    *_make_collapse_columns(QUANTITIES),
    # What it cost.
    Column("optimizer_steps", "optimizer steps", "of the policy, in this step"),
    Column("env_steps", "actions", "actions executed in this step"),
    Column("sampled_tokens", "tokens", "tokens sampled in this step"),
    Column("trained_tokens", "tokens", "sampled tokens in the trained batch, copies counted"),
    Column(
        "padding_fraction",
        "share",
        "1 - tokens that a pass reads / (episodes x the longest one's tokens), in the trained batch: not computed, but "
        "by models that run through transformers",
    ),
    Column("total_optimizer_steps", "optimizer steps", "optimizer_steps so far"),
    Column("total_env_steps", "actions", "env_steps so far"),
    Column("total_sampled_tokens", "tokens", "sampled_tokens so far"),
    Column("total_trained_tokens", "tokens", "trained_tokens so far"),
    # Validation, in the steps that have one.
    Column(
        "val_success",
        "share",
        "solved validation episodes / episodes, sampled at val_temperature",
        "val-env/CoordSokoban/success",
    ),
    Column(
        "val_success_unseen",
        "share",
        "val_success over levels that share no symmetry class with a training level of the whole run",
    ),
    Column("val_reward", "reward", "mean validation score", "val-env/charts/avg_episode_return"),
    Column("val_invalid_turns", "share", "validation turns with an invalid or no action / turns"),
    Column("val_greedy_success", "share", "as val_success, always taking the likeliest token; last step only"),
    Column("test_success", "share", "solved test episodes / episodes, sampled; last step only"),
    Column("test_greedy_success", "share", "as test_success, greedy; last step only"),
    # Before training; in the row of step 1.
    Column("base_val_success", "share", "val_success of the policy before training"),
    Column("base_val_success_unseen", "share", "val_success_unseen of the policy before training"),
    Column("base_val_reward", "reward", "val_reward of the policy before training"),
    Column("base_val_invalid_turns", "share", "val_invalid_turns of the policy before training"),
    Column("base_val_greedy_success", "share", "val_greedy_success of the policy before training"),
    # Time. Left out of every comparison for equality.
    Column("seconds_rollout", "s", "collecting episodes", "timing_s/gen"),
    Column("seconds_collapse_first_turn", "s", "scoring thoughts of first turns", "timing_s/collapse_first_turn_step"),
    Column("seconds_collapse_multi_turn", "s", "scoring thoughts of all turns", "timing_s/collapse_multi_turn_step"),
    Column("seconds_values", "s", "critic pass without gradients", "timing_s/values"),
    Column("seconds_reference", "s", "reference pass", "timing_s/ref"),
    Column("seconds_sync_weights", "s", "weights to the engine that samples, where it has its own"),
    Column("seconds_update_critic", "s", "critic update (with shared_trunk: none)", "timing_s/update_critic"),
    Column("seconds_update_actor", "s", "policy update", "timing_s/update_actor"),
    Column("seconds_gradient_analysis", "s", "gradient analysis", "timing_s/gradient_analysis"),
    Column("seconds_validation", "s", "validation and test", "timing_s/testing"),
    Column("seconds_step", "s", "the whole step, validation included, checkpoints not", "timing_s/step"),
    Column(
        "cpu_seconds_step",
        "s",
        "processor time of the step in this process, all threads",
    ),
    Column("seconds_total", "s", "seconds_step so far, this run, across restarts", "timing_s/total"),
    Column(
        "peak_flops_per_s", "1/s", "operations a second of large matrix products, measured once in the run's process"
    ),
    Column(
        "mfu_rollout",
        "share",
        "operations of the rollout (openings of a group read once) a second, over peak_flops_per_s and the run's ranks",
    ),
    Column("mfu_values", "share", "the same of seconds_values"),
    Column("mfu_reference", "share", "the same of seconds_reference"),
    Column(
        "mfu_update_critic",
        "share",
        "the same of seconds_update_critic; a backward pass counts as two forward ones, with LoRA as one",
    ),
    Column(
        "mfu_update_actor",
        "share",
        "the same of seconds_update_actor; what is computed a second time is not counted",
    ),
    Column("tokens_per_second", "tokens/s", "sampled_tokens / seconds_rollout"),
)
EXTRA_COLLAPSE_COLUMNS = _make_collapse_columns(EXTRA_QUANTITIES)
"""Measured only with `collapse_detection.all_quantities`."""
STEP_COLUMNS: tuple[Column, ...] = (*DEFAULT_STEP_COLUMNS, *EXTRA_COLLAPSE_COLUMNS)

# Written by the study, beside what the trial reports.
ROW_COLUMNS: tuple[Column, ...] = (
    Column("run_id", "", "name of the run: one configuration with one seed"),
    Column("study", "", "name of the study"),
    Column("arm", "", "label of the arm: the value of the axis as it was typed"),
    Column("seed", "", "seed of the run; equal seeds pair runs across arms"),
    Column("step", "steps", "training step, from 1"),
)

STOP_COLUMNS: tuple[Column, ...] = (
    Column("stop_rule", "", "rule that stopped the run; empty while none has", "early_stopped/<rule>"),
    Column("stop_value", "as the rule's", "the number that broke the rule"),
    Column("stop_threshold", "as the rule's", "the bound that it broke"),
    Column("stop_step", "steps", "the step at which it broke it"),
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("trial_id", "", "Ray Tune's id of the trial that carried the run last"),
    Column("config_hash", "", "name of the configuration, the seed left out"),
    Column("experiment_name", "", "name in the layout of the published documents"),
    Column("status", "", "completed, early_stopped, failed, interrupted or never_ran"),
    Column("reason", "", "why the run ended so"),
    Column(
        "failure_class",
        "",
        "of a failed run: configuration, non-finite, out of memory, storage, process died or error; else empty",
    ),
    Column("steps_done", "steps", "training steps with a row"),
    Column("steps_total", "steps", "training steps asked for"),
    Column("final_val_success", "share", "val_success of the last validation"),
    Column("final_val_success_unseen", "share", "val_success_unseen of the last validation"),
    Column("final_val_greedy_success", "share", "val_greedy_success at the end"),
    Column("peak_val_success", "share", "largest val_success of the run: biased upwards by picking the best"),
    Column("started_at", "UTC", "when the run first started"),
    Column("ended_at", "UTC", "when it ended"),
)

# A row of `gradients` is one component of the loss in one bucket of one analysis batch; run and step name it as well.
GRADIENT_COLUMNS: tuple[Column, ...] = (
    Column("source", "", "train: in the middle of training; probe: of a restored checkpoint"),
    Column("prefilter", "", "true: the analysis batch before the filter; false: what the filter kept"),
    Column("bucket", "", "bucket_1 (smallest reward spread) to bucket_6, or all"),
    Column("component", "", "task, entropy, kl, value (on a shared trunk), or total, their sum"),
    Column("norm", "1", "mean over mini-batches of the norm of each one's gradient, coefficient included; missing for "
           "total", "grad_norm/<bucket>/<component>"),
    Column("norm_per_sample", "1", "norm / sample_count", "grad_norm/<bucket>/per_sample/<component>"),
    Column("norm_per_token", "1", "norm / token_count", "grad_norm/<bucket>/per_token/<component>"),
    Column("loss", "1", "mean over micro-batches of the component's loss, coefficient included",
           "grad_norm/<bucket>/loss/<component>"),
    Column("mean_norm", "1", "norm of the bucket's mean gradient: one gradient over all of its tokens; its square is "
           "signal + noise"),
    Column("signal", "1", "unbiased estimate of the squared norm of the mean gradient's expectation; may be negative"),
    Column("noise", "1", "unbiased estimate of the summed variance of the mean gradient, prompts being the draws"),
    Column("snr", "1", "signal / noise"),
    Column("snr_low", "1", "lower end of its 95 % interval, by a jackknife over folds of prompts"),
    Column("snr_high", "1", "upper end of that interval"),
    Column("cosine_task", "1", "cosine between the mean gradients of this component and of task"),
    Column("cosine_entropy", "1", "the same beside entropy; missing where that is off"),
    Column("cosine_kl", "1", "the same beside kl; missing where that is off"),
    Column("share", "share", "signed share of the sampled step: in the bucket's whole mean gradient, noise included; "
           "shares sum to 1"),
    Column("signal_share", "share", "signed share of the expected step, from products of different folds; shares sum "
           "to 1; missing where the total has no signal, or none without one fold"),
    Column("signal_share_low", "share", "lower end of its 95 % interval, by a jackknife over folds of prompts"),
    Column("signal_share_high", "share", "upper end of that interval"),
    Column("weight", "share", "weight of the bucket's mean gradient in that of the whole batch; the buckets' sum to 1"),
    Column("fold_count", "folds", "folds of prompts behind signal and noise: 8, or one a group where there are fewer"),
    Column("sample_count", "sequences", "sequences in the bucket, copies included", "grad_norm/<bucket>/sample_count"),
    Column("sample_pct", "percent", "of the batch's sequences, copies included", "grad_norm/<bucket>/sample_pct"),
    Column("token_count", "tokens", "trained tokens in the bucket, copies included"),
    Column("group_count", "groups", "groups in the bucket", "grad_norm/<bucket>/group_rv_count"),
    Column("reward_std_mean", "reward", "mean over groups of the reward's std", "grad_norm/<bucket>/reward_std_mean"),
    Column("reward_std_min", "reward", "smallest of them", "grad_norm/<bucket>/reward_std_min"),
    Column("reward_std_max", "reward", "largest of them", "grad_norm/<bucket>/reward_std_max"),
    Column("source_env_groups", "groups", "groups played for the analysis", "grad_analysis/source_env_groups"),
    Column("source_group_size", "episodes", "episodes of each of them", "grad_analysis/source_group_size"),
    Column("source_batch_size", "sequences", "sequences before the filter", "grad_analysis/source_batch_size"),
    Column("adjusted_batch_size", "sequences", "sequences with the copies added", "grad_analysis/adjusted_batch_size"),
    Column("uses_training_batch", "", "true: the step's own batch; false: one played for it",
           "grad_analysis/uses_training_batch"),
    Column("form", "", "task: the advantage's estimator; kl: the loss's form; missing for others"),
    Column("coefficient", "1", "what the component's loss is multiplied with, in this very analysis"),
    Column("bucket_mode", "", "quantile: equally many groups a bucket; fixed_rv: edges at a reward std of 1 to 5"),
    Column("sketch", "entries", "of the sketch that stood for each gradient (relative error of a norm about 1 / sqrt(2 "
           "sketch)); missing where gradients were kept whole"),
    Column("overrides", "", "what a probe has set otherwise than the run; empty where nothing"),
    Column("empty_after_filter", "1", "1: the filter kept nothing, and the line is one row without a gradient; else 0",
           "grad_analysis/empty_after_filter"),
    Column("analysis_only", "1", "1: neither policy nor critic is updated, as in every probe; else 0",
           "trainer/gradient_analysis_only"),
    Column("source_groups_kept", "groups", "groups played that the filter kept", "grad_analysis/filter_kept_count"),
    Column("source_kept_ratio", "share", "source_groups_kept / source_env_groups", "grad_analysis/filter_kept_ratio"),
    Column("source_zero_std_groups", "groups", "groups played whose scores have a standard deviation of at most 1e-10",
           "grad_analysis/filter_zero_count"),
    Column("source_reward_std", "reward", "mean reward std of the groups played", "grad_analysis/in_group_reward_std"),
    Column("source_reward_std_kept", "reward", "the same of the groups kept; 0 when none",
           "grad_analysis/chosen_in_group_reward_std"),
)  # fmt: skip

# A row of `gradient_groups` is one group of an analysis batch.
GRADIENT_GROUP_COLUMNS: tuple[Column, ...] = (
    Column("group", "", "number of the group in the analysis batch", "grad_norm/<bucket>/group_rv_table"),
    Column("reward_std", "reward", "standard deviation (ddof 1) of its scores", "grad_norm/<bucket>/group_rv_table"),
)

# Columns of `trials` that are the run's last value of the step column with the same name.
TRIAL_LAST_VALUES: tuple[str, ...] = (
    "base_val_success", "base_val_success_unseen", "base_val_greedy_success", "test_success", "test_greedy_success",
    "total_optimizer_steps", "total_env_steps", "total_sampled_tokens", "total_trained_tokens", "seconds_total",
)  # fmt: skip

TIME_COLUMNS: frozenset[str] = frozenset(
    {
        column.name
        for column in STEP_COLUMNS
        if "second" in column.name or column.name.startswith(("mfu_", "peak_flops_per_s"))
    }
    | {"started_at", "ended_at"}
)


STATUSES: tuple[str, ...] = ("completed", "early_stopped", "failed", "interrupted", "never_ran")


def make_empty_row(*, all_quantities: bool = False) -> dict[str, float | str | None]:
    """Every step and stop column, with no value: a first row that lacks a key would lose it in Tune's csv.

    all_quantities: those of the collapse diagnostics as well that only this setting asks for.
    """
    columns = STEP_COLUMNS if all_quantities else DEFAULT_STEP_COLUMNS
    row: dict[str, float | str | None] = {column.name: None for column in (*columns, *STOP_COLUMNS)}
    row["stop_rule"] = ""
    return row

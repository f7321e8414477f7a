"""Gradient analysis of a training step: choose the batch, measure its gradients, return lines for gradients.jsonl."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from trainable.algo.filters import compute_group_scores
from trainable.config.seeds import make_rng
from trainable.diagnostics.collapse import diagnose_step
from trainable.diagnostics.gradient_probe import ProbeResult, probe_gradients
from trainable.envs.level_sets import collect_excluded_keys, make_training_levels
from trainable.ppo.targets import PreparedBatch, filter_episodes
from trainable.ppo.trainer import Diagnostics, PPOTrainer
from trainable.rollout.episode import Episode, reshape_by_group
from trainable.runs.run_files import Row

LEVEL_SEED_OFFSET = 500_000
"""Distance from the first seed of training levels to the first seed of analysis levels.

This is half of the seeds of a run (`MAX_LEVELS`). With one seed per group, training reaches the analysis
levels only after 500,000 groups.
"""

FILTER_COLUMNS = ("groups_kept", "kept_ratio", "zero_std_groups", "reward_std", "reward_std_kept")
"""Filter columns of a training step. Rows of an analysis have them with the prefix `source_`."""


def analyze_gradients(
    trainer: PPOTrainer, episodes: list[Episode], source: str = "train", overrides: str | None = None
) -> list[Row]:
    """Analyze the gradients of the trainer's policy, without changing the trainer.

    If both trainer.gradient_analysis_env_groups and trainer.gradient_analysis_group_size are set, a batch is rolled out
    for the analysis. Otherwise it consists of the step's `episodes`. In both cases, values and advantages are
    recomputed with the current critic.

    source: `train`, or `probe` if a command analyzes a run's checkpoint. overrides: settings of a probe that differ
    from the run's settings, as text.

    Returns the lines for gradients.jsonl: one for the batch before the filter (if
    trainer.gradient_analysis_log_prefilter is on), then one for the batch after it. Each has step, source, prefilter,
    rows (`records.GRADIENT_COLUMNS`) and groups (bucket, group, reward_std). If the filter kept nothing, the second
    line has no groups and a single row with `empty_after_filter` 1.
    """
    config = trainer.config
    num_groups, group_size = config.trainer.gradient_analysis_env_groups, config.trainer.gradient_analysis_group_size
    if num_groups is not None and group_size is not None:
        episodes, uses_step_episodes = _roll_out_batch(trainer, num_groups, group_size), False
    else:
        num_groups, group_size, uses_step_episodes = config.env.env_groups, config.env.group_size, True
    stds = compute_group_scores("reward_std", reshape_by_group([episode.score for episode in episodes], group_size))
    selection = filter_episodes(episodes, config.filter, group_size)
    context_columns = {
        "source_env_groups": num_groups,
        "source_group_size": group_size,
        "source_batch_size": num_groups * group_size,
        "uses_training_batch": uses_step_episodes,
        "bucket_mode": config.rollout.gradient_analysis_bucket_mode,
        "sketch": config.trainer.gradient_analysis_sketch,
        "overrides": overrides,
        "empty_after_filter": 0,
        "analysis_only": int(source == "probe" or config.trainer.gradient_analysis_only),
        **{f"source_{name}": selection.columns[name] for name in FILTER_COLUMNS},
    }
    make_line = partial(
        _make_line, trainer, reward_stds=dict(enumerate(stds.tolist())), context_columns=context_columns
    )
    lines = []
    if config.trainer.gradient_analysis_log_prefilter:
        lines.append(make_line(prefilter=True, episodes=episodes, groups_kept=num_groups))
    kept_episodes = [] if selection.is_empty else selection.episodes
    lines.append(make_line(prefilter=False, episodes=kept_episodes, groups_kept=selection.groups_kept))
    return [{"step": trainer.step_index, "source": source, **line} for line in lines]


def _make_line(
    trainer: PPOTrainer,
    prefilter: bool,
    episodes: Sequence[Episode],
    groups_kept: int,
    reward_stds: Mapping[int, float],
    context_columns: Row,
) -> Row:
    """Make the line of one batch: prefilter, rows and groups. context_columns: columns equal in all of its rows."""
    actor = trainer.config.actor
    # Form and coefficient of each component of the loss.
    terms: dict[str, Row] = {
        "task": {"form": trainer.config.algorithm.adv_estimator, "coefficient": 1.0},
        "entropy": {"coefficient": actor.entropy_coeff},
        "kl": {"form": actor.kl_loss_type, "coefficient": actor.kl_loss_coef},
    }
    if not episodes:
        counts = {"sample_count": 0, "group_count": 0, "adjusted_batch_size": 0, "empty_after_filter": 1}
        empty_row = {"bucket": "all", "component": "task", **context_columns, **terms["task"], **counts}
        return {"prefilter": prefilter, "rows": [empty_row], "groups": []}
    rng = make_rng(trainer.config.seed, "gradient_duplicates", trainer.step_index, int(prefilter))
    prepared = trainer.prepare_batch(episodes, groups_kept, int(context_columns["source_env_groups"]), rng)
    result = _probe_batch(trainer, prepared, reward_stds)
    size = len(prepared.batch.lengths)
    context_columns = {**context_columns, "adjusted_batch_size": size, "form": None, "coefficient": None}
    rows = [_replace_nonfinite({**row, **context_columns, **terms.get(row["component"], {})}) for row in result.rows]
    return {"prefilter": prefilter, "rows": rows, "groups": result.groups}


def _roll_out_batch(trainer: PPOTrainer, num_groups: int, group_size: int) -> list[Episode]:
    """Roll out a batch for this analysis, on levels that neither training nor tests use."""
    config, step = trainer.config, trainer.step_index
    # The index of the analysis, from 1, selects its levels. A probe of an untrained policy (step 0) uses the levels of
    # step 1.
    analysis_index = (max(1, step) - 1) // config.trainer.gradient_analysis_every + 1
    first_seed = config.training_level_seeds.start + LEVEL_SEED_OFFSET + num_groups * (analysis_index - 1)
    excluded_keys = collect_excluded_keys(trainer.level_source, trainer.test_levels)
    levels = make_training_levels(trainer.level_source, range(first_seed, first_seed + num_groups), excluded_keys)
    return trainer.roll_out(levels, group_size, "gradient_sampling")


def _probe_batch(trainer: PPOTrainer, prepared: PreparedBatch, reward_stds: Mapping[int, float]) -> ProbeResult:
    config = trainer.config
    seed = int(make_rng(config.seed, "gradient_folds", trainer.step_index).integers(2**62))
    # Use the run's own networks: ranks make different numbers of passes here, while every pass of sharded networks
    # needs all ranks.
    update = replace(trainer.make_actor_update(), model=trainer.model, value_head=trainer.value_head)
    return probe_gradients(
        update,
        prepared.batch,
        prepared.targets,
        reward_stds,
        config.rollout.gradient_analysis_num_buckets,
        config.rollout.gradient_analysis_bucket_mode,
        torch.Generator().manual_seed(seed),
        config.trainer.gradient_analysis_sketch,
        config.model.dtype,
    )


def _replace_nonfinite(row: Row) -> Row:
    """Replace NaN and infinity, for numbers that could not be estimated, by None, since JSON has neither."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


DIAGNOSTICS = Diagnostics(collapse=diagnose_step, gradients=analyze_gradients)
"""The diagnostics of a run's trainer. Each measures only if switched on by the settings."""

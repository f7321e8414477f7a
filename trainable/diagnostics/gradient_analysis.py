"""On which batch gradients are analysed: the step's own, or a larger one that is played for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainable.algo.filters import group_scores
from trainable.config.run_config import RunConfig
from trainable.config.seeds import stream
from trainable.diagnostics.gradient_probe import Findings, probe_gradients
from trainable.envs.sokoban.level_sets import level_keys, training_levels
from trainable.ppo.evaluation import by_group
from trainable.ppo.filtering import filter_episodes
from trainable.rollout.episode import Episode
from trainable.runs.run import Row

if TYPE_CHECKING:
    from trainable.ppo.targets import Prepared
    from trainable.ppo.trainer import PPOTrainer

FIRST_LEVEL = 500_000
"""Levels of analyses lie this far behind a run's first training level: it would train on them after as many groups."""

FILTER_COLUMNS = ("groups_kept", "kept_ratio", "zero_std_groups", "reward_std", "reward_std_kept")
"""What the filter decided of an analysis batch: columns of a step, here with `source_` before them."""


def analyse(
    trainer: "PPOTrainer", episodes: list[Episode], source: str = "train", overrides: str | None = None
) -> list[Row]:
    """Analyse the gradients of the trainer's policy; nothing of the trainer is changed.

    The batch is played for it where trainer.gradient_analysis_env_groups and _group_size are set, else it is the
    step's own `episodes`. Values and advantages are made anew, for both batches by the critic as it is now.
    overrides: what a probe has set otherwise than the run, as text.

    Returns the lines for gradients.jsonl: before the filter (where trainer.gradient_analysis_log_prefilter is on), then
    after it; each has step, source, prefilter, rows (`records.GRADIENT_COLUMNS`) and groups (bucket, group,
    reward_std). Where the filter kept nothing the second has no groups, and one row that says so.
    """
    config = trainer.config
    groups, size = config.trainer.gradient_analysis_env_groups, config.trainer.gradient_analysis_group_size
    if groups is not None and size is not None:
        episodes, is_own = _play(trainer, groups, size), False
    else:
        groups, size, is_own = config.env.env_groups, config.env.group_size, True
    stds = group_scores("reward_std", by_group([episode.score for episode in episodes], size))
    selection = filter_episodes(episodes, config.filter, size)
    about = {
        "source_env_groups": groups, "source_group_size": size, "source_batch_size": groups * size,
        "uses_training_batch": is_own, "bucket_mode": config.rollout.gradient_analysis_bucket_mode,
        "sketch": config.trainer.gradient_analysis_sketch, "overrides": overrides, "empty_after_filter": 0,
        "analysis_only": int(source == "probe" or config.trainer.gradient_analysis_only),
        **{f"source_{name}": getattr(selection.decision, name) for name in FILTER_COLUMNS},
    }  # fmt: skip
    spread, lines = dict(enumerate(stds.tolist())), []
    if config.trainer.gradient_analysis_log_prefilter:
        lines.append(_measured(trainer, True, episodes, groups, spread, about))
    lines.append(_measured(trainer, False, selection.episodes, selection.groups, spread, about))
    return [{"step": trainer.step_index, "source": source, **line} for line in lines]


def _measured(
    trainer: "PPOTrainer", prefilter: bool, episodes: Sequence[Episode], kept_groups: int,
    spread: Mapping[int, float], about: Row,
) -> Row:  # fmt: skip
    """What a line says of one batch: prefilter, rows and groups. about: what all of its rows say of the analysis."""
    terms = _terms(trainer.config)
    if not episodes:
        counts = {"sample_count": 0, "group_count": 0, "adjusted_batch_size": 0, "empty_after_filter": 1}
        nothing = {"bucket": "all", "component": "task", **about, **terms["task"], **counts}
        return {"prefilter": prefilter, "rows": [nothing], "groups": []}
    draws = stream(trainer.config.seed, "gradient_duplicates", trainer.step_index, int(prefilter))
    ready = trainer.prepare(episodes, kept_groups, int(about["source_env_groups"]), draws)
    findings = _probe(trainer, ready, spread)
    about = {**about, "adjusted_batch_size": len(ready.batch.lengths), "form": None, "coefficient": None}
    rows = [_finite({**row, **about, **terms.get(row["component"], {})}) for row in findings.rows]
    return {"prefilter": prefilter, "rows": rows, "groups": findings.groups}


def _terms(config: RunConfig) -> dict[str, Row]:
    """What each component of the loss is, and what it is multiplied with."""
    actor = config.actor
    return {
        "task": {"form": config.algorithm.adv_estimator, "coefficient": 1.0},
        "entropy": {"coefficient": actor.entropy_coeff},
        "kl": {"form": actor.kl_loss_type, "coefficient": actor.kl_loss_coef},
    }


def _play(trainer: "PPOTrainer", groups: int, size: int) -> list[Episode]:
    config, step = trainer.config, trainer.step_index
    number = (max(1, step) - 1) // config.trainer.gradient_analysis_every + 1
    base = config.env.seed_train + FIRST_LEVEL
    levels = training_levels(config.seed, number, groups, base, skip=level_keys(trainer.test_levels))
    return trainer.roll_out(levels, size, stream(config.seed, "gradient_sampling", step))


def _probe(trainer: "PPOTrainer", ready: "Prepared", stds: Mapping[int, float]) -> Findings:
    config = trainer.config
    seed = int(stream(config.seed, "gradient_folds", trainer.step_index).integers(2**62))
    # The run's own networks: ranks make unequally many passes, which twins that are dealt out cannot.
    update = replace(trainer.actor_update(), model=trainer.model, head=trainer.head)
    return probe_gradients(
        update, ready.batch, ready.targets, stds, config.rollout.gradient_analysis_num_buckets,
        config.rollout.gradient_analysis_bucket_mode, torch.Generator().manual_seed(seed),
        config.trainer.gradient_analysis_sketch, config.model.dtype,
    )  # fmt: skip


def _finite(row: Row) -> Row:
    """JSON has no NaN: a number that could not be estimated is missing."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()}  # fmt: skip

"""Estimate the disk space that a study needs, before it starts.

Sizes are in bytes. Messages show them in decimal units, as `df -H` does.
"""

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.runs.episode_lines import MAX_ANSWER_CHARS
from trainable.runs.study_record import ENDED_STATUSES
from tune_study.folder.statuses import read_statuses
from tune_study.placement.memory import ModelShape, compute_moving_reference_bytes, list_trained_tensors
from tune_study.placement.model_files import read_model_shape
from tune_study.plan.errors import MisfitError, PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan

_ROLLING_STATES = 3
"""Rolling checkpoints of a training run: the newest, the previous one, in case the newest is damaged, and the one being
written."""

# The following constants were measured with the laptop preset and rounded up by at least 5 %.
_CHECKPOINT_BYTES, _TENSOR_BYTES = 3_000, 404
"""Bytes of a checkpoint besides weights and moments: JSON files; per tensor four headers and AdamW's step count."""
_STEP_BYTES, _ANALYSIS_BYTES, _RUN_BYTES, _STUDY_BYTES = 21_000, 100_000, 250_000, 2_050_000
"""Bytes per step or evaluation (rows, Tune's results, TensorBoard, logs, tables and report), per gradient analysis of
128 groups, and in addition per run and per study (Tune's experiment state, figures, settings, scripts and pictures)."""
_EPISODE_BYTES, _TURN_BYTES, _TOKEN_BYTES = 1_000, 700, 5
"""Bytes in episodes.jsonl per episode, per turn, and per token of a reply."""


class DiskBudget(NamedTuple):
    """The disk space that the runs of a study that have not ended still need, and the free space, in bytes."""

    needed_bytes: int
    """At most; 0, like scratch_bytes, if the size of a model is unknown."""
    scratch_bytes: int
    """What a run of a study with a storage needs on its node: rolling checkpoints, and one that is being copied."""
    free_bytes: int
    folder: Path
    """The nearest existing parent of --output."""
    unknown_models: Sequence[str] = ()


def compute_checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the size of a run's checkpoint after its first update: weights and AdamW's two moments in float32.

    Frozen networks (reference, base) are loaded from the original model and not saved, unless the reference moves.
    """
    trained = list_trained_tensors(shape, config)
    tensors = [size for sizes in trained.values() for size in sizes]
    reference_bytes = 0
    if config.syncs_reference:  # as many tensors as the policy, without the two moments
        reference_bytes = compute_moving_reference_bytes(shape, config) + len(trained["policy"]) * _TENSOR_BYTES // 3
    return 12 * sum(tensors) + reference_bytes + len(tensors) * _TENSOR_BYTES + _CHECKPOINT_BYTES


def count_occurrences(steps: int, every: int) -> int:
    """Count the events after every `every`-th of `steps` steps and after the last one; 0 if `every` is not positive."""
    return -(-steps // every) if every > 0 else 0


def count_validations(config: RunConfig) -> int:
    """Count a run's validations: sampled and greedy before step 1, sampled every `test_freq` steps, greedy last."""
    trainer = config.trainer
    return 2 * trainer.val_before_train + count_occurrences(trainer.total_training_steps, trainer.test_freq) + 1


def estimate_row_bytes(config: RunConfig) -> int:
    """Estimate a run's bytes without checkpoints: lines, logs, Tune's files, and its share of tables and report."""
    env, trainer, steps = config.env, config.trainer, config.trainer.total_training_steps
    # Per validation, episodes of it and of the step before it are recorded.
    validations, episodes = count_validations(config), min(trainer.log_val_generations, env.val_env_groups)
    episodes += min(trainer.log_train_generations, env.env_groups * env.group_size)
    observation_bytes, answer_bytes = (env.papers.observation_chars, MAX_ANSWER_CHARS) if env.kind.has_trees else (0, 0)
    turn_bytes = _TURN_BYTES + observation_bytes + config.rollout.response_length * _TOKEN_BYTES
    conversation_bytes = answer_bytes + env.max_turn * turn_bytes
    episode_bytes = _EPISODE_BYTES + answer_bytes + env.max_conversations_per_rollout * conversation_bytes
    size = _RUN_BYTES + (steps + validations) * _STEP_BYTES + validations * episodes * episode_bytes
    if trainer.gradient_analysis_mode:  # of step 1 and of every N-th step after it
        size += count_occurrences(steps, trainer.gradient_analysis_every) * _ANALYSIS_BYTES
    return size


def estimate_disk_budget(plan: StudyPlan, resource_plan: ResourcePlan, environ: Mapping[str, str]) -> DiskBudget:
    """Estimate what the remaining runs of `plan` need, without ended runs, which write nothing more."""
    family, statuses = plan.study.family, read_statuses(plan) if plan.folder.exists() else {}
    ended_ids = {run_id for run_id, status in statuses.items() if status.status in ENDED_STATUSES}
    known_runs = [spec for spec in plan.runs if spec.run_id not in ended_ids]
    # Points that a search has yet to draw need as much as the known ones.
    num_further_runs = plan.search.num_points * len(plan.seeds) - len(plan.runs) if plan.search else 0
    runs = [*known_runs, *itertools.islice(itertools.cycle(plan.runs), max(num_further_runs, 0))]
    needed_bytes, checkpoint_sizes = _STUDY_BYTES if runs else 0, []
    # A run of update rules may have no model path (None), since it makes its model itself.
    paths = dict.fromkeys(family.get_model_path(spec.config) for spec in runs)
    shapes = {path: None if path is None else read_model_shape(path, environ) for path in paths}
    for index, spec in enumerate(runs):
        shape, trainer = shapes[family.get_model_path(spec.config)], spec.config.trainer
        if family.estimate_bytes is not None:
            checkpoint_bytes, bytes_per_row = family.estimate_bytes(spec.config, shape.parameters if shape else 0)
            row_bytes = _RUN_BYTES + spec.steps // trainer.test_freq * bytes_per_row
        else:
            checkpoint_bytes = compute_checkpoint_bytes(shape, spec.ppo_config) if shape else 0
            row_bytes = estimate_row_bytes(spec.ppo_config)
        checkpoint_sizes.append(checkpoint_bytes)
        num_kept = count_occurrences(spec.steps, trainer.save_freq) + spec.keeps_best + spec.keeps_last
        folders = (plan.get_run_dir(spec.run_id), plan.output / spec.checkpoint_dir)
        written_bytes = sum(map(count_folder_bytes, folders)) if index < len(known_runs) else 0
        # A run that is larger than estimated would otherwise hide that others lack space.
        needed_bytes += max(num_kept * checkpoint_bytes + row_bytes - written_bytes, 0)
    # A trial may train all seeds of an arm at once. At worst, the runs with the largest checkpoints train together.
    num_rolling = _ROLLING_STATES - any(spec.keeps_last for spec in runs)
    num_concurrent = resource_plan.max_concurrent * plan.max_runs_per_trial
    needed_bytes += num_rolling * sum(sorted(checkpoint_sizes, reverse=True)[:num_concurrent])
    scratch_bytes = (_ROLLING_STATES + 1) * max(checkpoint_sizes, default=0)
    # --output may not exist yet; it will be created on the disk of its nearest existing parent.
    folder = next(folder for folder in (plan.output, *plan.output.parents) if os.path.isdir(folder))
    if unknown_models := [path for path, shape in shapes.items() if path is not None and shape is None]:
        needed_bytes = scratch_bytes = 0
    return DiskBudget(needed_bytes, scratch_bytes, shutil.disk_usage(folder).free, folder, unknown_models)


def check_scratch(place: str, free_bytes: int, n_runs: int, run_bytes: int, remedy: str) -> None:
    """Raise PlanError if a machine lacks disk space for the checkpoints of concurrent runs of a study with a storage.

    place: the machine, for the message. remedy: what to type on it for more space.
    """
    if free_bytes < n_runs * run_bytes:
        raise PlanError(
            f"{place} has {decimal(free_bytes)} free for the checkpoints of up to {n_runs} runs until they are copied "
            f"to the storage, which take {decimal(n_runs * run_bytes)}: {remedy}, or type --max-concurrent with a "
            "smaller number."
        )


def count_folder_bytes(folder: Path) -> int:
    """Sum the sizes of the files below `folder`, without following links; 0 if there is no folder."""
    total = 0
    for path in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(OSError):  # removed since it was listed, by a running study
            total += os.lstat(path).st_size
    return total


def format_disk_line(budget: DiskBudget, storage: str | None) -> str:
    """Format the budget as a line of the plan: the space needed, and the URI of a storage, or the free space."""
    size, verdict = f"needs at most {decimal(budget.needed_bytes)}", " OK."
    if budget.needed_bytes > budget.free_bytes:
        verdict = " NOT ENOUGH."
    if models := " and ".join(budget.unknown_models):
        size, verdict = f"space unknown, because no config.json of a trainable model was found for {models}", ""
    if storage is not None:
        return f"Storage: {storage}, {size}."
    return f"Disk: {size}; {decimal(budget.free_bytes)} free.{verdict}"


def explain_shortage(budgets: Sequence[DiskBudget]) -> str:
    """Explain how much space studies lack together, and what to type; empty if they lack none."""
    needed_bytes = sum(budget.needed_bytes for budget in budgets)
    free_bytes = min((budget.free_bytes for budget in budgets), default=needed_bytes)
    if needed_bytes <= free_bytes:
        return ""
    subject = "The study needs" if len(budgets) == 1 else f"The {len(budgets)} studies together need"
    return (
        f"{subject} up to {decimal(needed_bytes)} more disk space, and {budgets[0].folder} has {decimal(free_bytes)} "
        f"free, {decimal(needed_bytes - free_bytes)} too little: type --output with a folder on a larger disk, "
        "--save-freq -1 or --set trainer.keep_last=false for fewer checkpoints, --max-concurrent 1 for fewer at once, "
        "or free disk space."
    )


def check_budgets(budgets: Sequence[DiskBudget]) -> None:
    """Raise MisfitError if studies, each of which may fit, together need more space than is free."""
    if shortage := explain_shortage(budgets):
        raise MisfitError(shortage)

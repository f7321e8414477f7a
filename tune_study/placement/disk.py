"""Estimate the disk space that a study needs, before it starts.

Sizes are in bytes. Messages show them in decimal units, as `df -H` does.
"""

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.runs.episode_lines import MAX_ANSWER_CHARS
from tune_study.folder.statuses import find_finished_runs
from tune_study.placement import model_size
from tune_study.placement.model_size import ModelShape
from tune_study.plan.errors import MisfitError, PlanError
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan

_HEADER_BYTES, _CHECKPOINT_JSON_BYTES = 100, 3_000
"""Bytes per tensor in the header of a safetensors file, and of a checkpoint's JSON files."""
_ROLLING_STATES = 3
"""Rolling checkpoints of a training run: the newest, the previous one, in case the newest is damaged, and the one being
written."""

# The following constants were measured on laptop studies and rounded up by at least 5 %.
_STEP_BYTES, _RUN_BYTES, _STUDY_BYTES = 21_000, 250_000, 2_050_000
"""Bytes per step (rows, Tune's results, TensorBoard, logs, tables and report), and per run and per study in addition:
Tune's experiment state, figures and settings; scripts, layout and pictures of the report, and tables."""
_ANALYSIS_BYTES = 100_000
"""Bytes per gradient analysis of 128 groups. Fewer groups need less."""
_LEVEL_BYTES, _EVALUATION_BYTES = 18, 150
"""Bytes in levels.jsonl per level of an evaluation, and per evaluation."""
_EPISODE_BYTES, _TURN_BYTES, _TOKEN_BYTES = 1_000, 700, 5
"""Bytes in episodes.jsonl per episode, per turn, and per token of a reply."""


class DiskBudget(NamedTuple):
    """The maximum disk space for the runs of a study that have not ended, and the free space, in bytes."""

    remaining_runs: int
    concurrent_runs: int
    checkpoint_bytes: int | None
    """The largest checkpoint of a run; None, like total_bytes, if the size of a model is unknown."""
    saved_checkpoints: int
    """Maximum number of folders global_step_<N> of a run."""
    last_states: int
    """Rolling checkpoints that are kept after a run's end: 1, or 0 if no run keeps its last one."""
    row_bytes: int
    """Rows, logs, tables and report."""
    total_bytes: int | None
    written_bytes: int
    """What of total_bytes is already on disk."""
    free_bytes: int
    folder: Path
    """The nearest existing parent of --output."""
    unknown_models: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written; 0 if unknown."""
        return 0 if self.total_bytes is None else self.total_bytes - self.written_bytes


def compute_checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the size of a run's checkpoint after its first update: `PPOTrainer.get_state` in float32.

    For every trained tensor, a file has its weight, AdamW's two moments, and AdamW's step count (a scalar). Frozen
    networks (reference, base) are loaded from the original model and not saved.
    """
    tensor_sizes = [size for sizes in model_size.list_trained_tensor_sizes(shape, config).values() for size in sizes]
    elements = 3 * sum(tensor_sizes) + len(tensor_sizes)  # float32
    return 4 * elements + 4 * len(tensor_sizes) * _HEADER_BYTES + _CHECKPOINT_JSON_BYTES


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
    # The test levels are played twice at the end, in two more evaluations.
    validations = count_validations(config)
    levels = validations * env.val_env_groups * env.val_group_size + 2 * env.test_env_groups
    # Sampled validations record episodes, greedy ones do not.
    episodes = (validations - trainer.val_before_train - 1) * (
        min(trainer.log_val_generations, env.val_env_groups)
        + min(trainer.log_train_generations, env.env_groups * env.group_size)
    )
    observation_bytes, answer_bytes = (env.papers.observation_chars, MAX_ANSWER_CHARS) if env.kind.has_trees else (0, 0)
    turn_bytes = _TURN_BYTES + observation_bytes + config.rollout.response_length * _TOKEN_BYTES
    conversation_bytes = answer_bytes + env.max_turn * turn_bytes
    # Step 1 and every N-th step after it are analyzed.
    analyses = count_occurrences(steps, trainer.gradient_analysis_every) if trainer.gradient_analysis_mode else 0
    return (
        _RUN_BYTES
        + steps * _STEP_BYTES
        + analyses * _ANALYSIS_BYTES
        + levels * _LEVEL_BYTES
        + (validations + 2) * _EVALUATION_BYTES
        + episodes * (_EPISODE_BYTES + answer_bytes + env.max_conversations_per_rollout * conversation_bytes)
    )


def estimate_disk_budget(plan: StudyPlan, resource_plan: ResourcePlan, environ: Mapping[str, str]) -> DiskBudget:
    """Estimate the disk budget of the remaining runs of `plan`, without ended runs, which write nothing more."""
    ended_runs = find_finished_runs(plan)
    known_runs = [spec for spec in plan.runs if spec.run_id not in ended_runs]
    runs = list(known_runs)
    if plan.search is not None:  # points to come need as much as the known ones
        num_further_runs = plan.search.num_points * len(plan.seeds) - len(plan.runs)
        runs += itertools.islice(itertools.cycle(plan.runs), max(num_further_runs, 0))
    # A run of update rules may have no model path (None), since it makes its model itself.
    paths = [plan.study.family.get_model_path(spec.config) for spec in runs]
    shapes = {path: model_size.read_model_shape(path, environ) for path in dict.fromkeys(paths) if path is not None}
    sizes = [_estimate_run_bytes(plan, spec, shapes.get(path or "")) for spec, path in zip(runs, paths, strict=True)]
    saved_counts = [count_occurrences(spec.steps, spec.config.trainer.save_freq) + spec.keeps_best for spec in runs]
    last_states = int(any(spec.keeps_last for spec in runs))
    # A trial may train several runs at once, all seeds of an arm.
    concurrent_runs = min(resource_plan.max_concurrent * plan.max_runs_per_trial, len(runs))
    row_bytes = sum(rows for _, rows in sizes) + (_STUDY_BYTES if runs else 0)
    # Every run has its last and saved checkpoints, and runs that train have further rolling ones. At worst, the runs
    # with the largest checkpoints train at the same time.
    kept_bytes = [size * (last_states + count) for (size, _), count in zip(sizes, saved_counts, strict=True)]
    largest_sizes = sorted((size for size, _ in sizes), reverse=True)[:concurrent_runs]
    total_bytes = sum(kept_bytes) + (_ROLLING_STATES - last_states) * sum(largest_sizes) + row_bytes
    written_bytes = 0
    for spec, checkpoint_bytes, (_, run_row_bytes) in zip(known_runs, kept_bytes, sizes, strict=False):
        folders = (plan.get_run_dir(spec.run_id), plan.output / spec.checkpoint_dir)
        # A run that is larger than estimated would otherwise hide that others lack space.
        written_bytes += min(sum(map(count_folder_bytes, folders)), checkpoint_bytes + run_row_bytes)
    # --output may not exist yet; it will be created on the disk of its nearest existing parent.
    nearest_folder = next(folder for folder in (plan.output, *plan.output.parents) if os.path.isdir(folder))
    unknown_models = tuple(path for path, shape in shapes.items() if shape is None)
    return DiskBudget(
        len(runs),
        concurrent_runs,
        None if unknown_models else max((size for size, _ in sizes), default=0),
        max(saved_counts, default=0),
        last_states,
        row_bytes,
        None if unknown_models else total_bytes,
        0 if unknown_models else written_bytes,
        shutil.disk_usage(nearest_folder).free,
        nearest_folder,
        unknown_models,
    )


def _estimate_run_bytes(plan: StudyPlan, spec: RunSpec, shape: ModelShape | None) -> tuple[int, int]:
    """Estimate the bytes of a run's checkpoint, and of its rows, logs and tables. shape: None if unknown."""
    if (estimate_bytes := plan.study.family.estimate_bytes) is not None:
        checkpoint_bytes, bytes_per_row = estimate_bytes(
            spec.config, model_size.count_policy_parameters(shape) if shape else 0
        )
        return checkpoint_bytes, _RUN_BYTES + spec.steps // spec.config.trainer.test_freq * bytes_per_row
    config = spec.ppo_config
    return 0 if shape is None else compute_checkpoint_bytes(shape, config), estimate_row_bytes(config)


def compute_scratch_bytes(budget: DiskBudget) -> int | None:
    """Compute the disk bytes that a run with a storage needs on its node for checkpoints; None if unknown."""
    if budget.checkpoint_bytes is None:
        return None
    # A saved checkpoint is there until it is copied to the storage.
    return budget.checkpoint_bytes * (_ROLLING_STATES + (budget.saved_checkpoints > 0))


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
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # removed since it was listed, by a running study
                continue
    return total


def format_disk_line(budget: DiskBudget) -> str:
    """Format the budget as a line of the plan: space needed, free space, the verdict, and the size of a checkpoint."""
    free_text = f"{decimal(budget.free_bytes)} free"
    if budget.remaining_runs == 0:
        return f"Disk: every run has ended, no more space is needed, {free_text}."
    if budget.total_bytes is None or budget.checkpoint_bytes is None:
        models = " and ".join(budget.unknown_models)
        return f"Disk: space unknown, because no config.json of a trainable model was found for {models}; {free_text}."
    written_text = f" ({decimal(budget.written_bytes)} already written)" if budget.written_bytes else ""
    verdict = "OK" if budget.missing_bytes <= budget.free_bytes else "NOT ENOUGH"
    removal_text = " The state of a run is removed when the run ends (--set trainer.keep_last=true keeps it)."
    return (
        f"Disk: needs at most {decimal(budget.total_bytes)}{written_text}, with checkpoints of up to "
        f"{decimal(budget.checkpoint_bytes)}; {free_text}. {verdict}.{'' if budget.last_states else removal_text}"
    )


def check_combined_budget(budgets: Sequence[DiskBudget]) -> None:
    """Raise MisfitError if the studies of a suite, each of which may fit, together need more space than is free."""
    needed_bytes = sum(budget.missing_bytes for budget in budgets)
    free_bytes = min((budget.free_bytes for budget in budgets), default=needed_bytes)
    if needed_bytes > free_bytes:
        raise MisfitError(
            f"The {len(budgets)} studies together need up to {decimal(needed_bytes)} more disk space, and "
            f"{budgets[0].folder} has {decimal(free_bytes)} free: type --output with a folder on a larger disk, type "
            f"--save-freq -1, run the studies one at a time, or free disk space."
        )


def check_budget(budget: DiskBudget) -> None:
    """Raise MisfitError if the study needs more space than is free. Unknown sizes are not checked."""
    if shortage := explain_shortage(budget):
        raise MisfitError(f"{shortage} {format_disk_line(budget)}")


def explain_shortage(budget: DiskBudget) -> str:
    """Explain how much space the study lacks and what to type; empty if it lacks none or a size is unknown."""
    needed_bytes = budget.missing_bytes
    if needed_bytes <= budget.free_bytes:
        return ""
    remedies = []
    if budget.saved_checkpoints:
        remedies.append("--save-freq with a larger number (-1 saves none)")
    if budget.last_states and budget.remaining_runs > 1:
        remedies.append("--set trainer.keep_last=false, which removes the last state of a run that has ended")
    if budget.concurrent_runs > 1:  # every concurrent run needs space for its rolling checkpoints
        remedies.append("--max-concurrent 1")
    remedies.append("--output with a folder on a larger disk")
    return (
        f"The study needs up to {decimal(needed_bytes)} more disk space, and {budget.folder} has "
        f"{decimal(budget.free_bytes)} free, {decimal(needed_bytes - budget.free_bytes)} too little: type "
        f"{', or '.join(remedies)}; or free disk space."
    )

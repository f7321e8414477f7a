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
from tune_study.placement.model_size import (
    ModelShape,
    count_policy_parameters,
    list_trained_tensor_sizes,
    read_model_shape,
)
from tune_study.plan.errors import MisfitError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.run_spec import RunSpec
from tune_study.plan.study_plan import StudyPlan

_FLOAT32 = 4
_HEADER_BYTES = 100
"""Bytes per tensor in the header of a safetensors file: name, type, shape and offsets."""
_CHECKPOINT_JSON_BYTES = 3_000
"""Bytes of a checkpoint's JSON files: counters, checksums and the run's settings."""
_ROLLING_STATES = 3
"""Rolling checkpoints of a training run: the newest, the previous one, in case the newest is damaged, and the one being
written."""

# The following constants were measured on laptop studies and rounded up by at least 5 %.
_STEP_BYTES = 21_000
"""Bytes per step: rows, Tune's results, TensorBoard, logs, tables and report."""
_ANALYSIS_BYTES = 100_000
"""Bytes per gradient analysis of 128 groups. Fewer groups need less."""
_LEVEL_BYTES, _EVALUATION_BYTES = 18, 150
"""Bytes in levels.jsonl per level of an evaluation, and per evaluation."""
_EPISODE_BYTES, _TURN_BYTES, _TOKEN_BYTES = 1_000, 700, 5
"""Bytes in episodes.jsonl per episode, per turn, and per token of a reply."""
_RUN_BYTES = 250_000
"""Bytes per run that do not depend on its steps: Tune's experiment state, figures, and settings."""
_STUDY_BYTES = 2_050_000
"""Bytes per study that do not depend on its runs: scripts, layout and pictures of the report, and tables."""


class DiskBudget(NamedTuple):
    """The maximum disk space for the runs of a study that have not ended, and the free space, in bytes.

    is_uniform: whether checkpoints of all runs are equal in size and number; if not, checkpoint_bytes and
    saved_checkpoints (folders global_step_<N> of a run) are maxima over the runs. last_states: rolling checkpoints per
    run that are kept after its end: 1, or 0 if no run keeps its last one. row_bytes: rows, logs, tables and report.
    written_bytes: the part of total_bytes that is already on disk. folder: the nearest existing parent of --output,
    whose file system has free_bytes for this user. unknown_models: paths of models of unknown size; with one,
    checkpoint_bytes and total_bytes are None.
    """

    remaining_runs: int
    concurrent_runs: int
    is_uniform: bool
    checkpoint_bytes: int | None
    saved_checkpoints: int
    last_states: int
    row_bytes: int
    total_bytes: int | None
    written_bytes: int
    free_bytes: int
    folder: Path
    unknown_models: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written; 0 if unknown."""
        return 0 if self.total_bytes is None else self.total_bytes - self.written_bytes

    @property
    def states_in_flight(self) -> int:
        """Rolling checkpoints of a training run beyond those that are kept after its end."""
        return _ROLLING_STATES - self.last_states


def compute_checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the size of a run's checkpoint after its first update: `PPOTrainer.get_state` in float32.

    A checkpoint contains the weight and AdamW's two moments of every trained parameter, and AdamW's step count (a
    scalar) per trained tensor. Frozen networks (reference, base) are loaded from the original model and not saved.
    """
    # Each trained tensor has four tensors in the file: weight, two moments and step count.
    tensor_sizes = [size for sizes in list_trained_tensor_sizes(shape, config).values() for size in sizes]
    elements = 3 * sum(tensor_sizes) + len(tensor_sizes)
    return _FLOAT32 * elements + 4 * len(tensor_sizes) * _HEADER_BYTES + _CHECKPOINT_JSON_BYTES


def count_occurrences(steps: int, every: int) -> int:
    """Count the events after every `every`-th of `steps` steps and after the last one; 0 if `every` is not positive."""
    return -(-steps // every) if every > 0 else 0


def estimate_row_bytes(config: RunConfig) -> int:
    """Estimate a run's bytes without checkpoints: lines, logs, Tune's files, and its share of tables and report."""
    env, trainer, steps = config.env, config.trainer, config.trainer.total_training_steps
    sampled_validations = trainer.val_before_train + count_occurrences(steps, trainer.test_freq)
    # The untrained policy is also validated greedily, and so is the trained one at the end. The test levels are played
    # twice at the end, in two more evaluations.
    validations = sampled_validations + trainer.val_before_train + 1
    levels = validations * env.val_env_groups * env.val_group_size + 2 * env.test_env_groups
    episodes = sampled_validations * (
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
    """Estimate the disk budget of the remaining runs of `plan`, without ended runs, which write nothing more.

    environ: the environment variables, which determine where models are cached.
    """
    ended_runs = find_finished_runs(plan)
    known_runs = [spec for spec in plan.runs if spec.run_id not in ended_runs]
    runs = list(known_runs)
    if plan.search is not None:  # points to come need as much as the known ones
        num_further_runs = plan.search.num_points * len(plan.seeds) - len(plan.runs)
        runs += itertools.islice(itertools.cycle(plan.runs), max(num_further_runs, 0))
    # A run of update rules may have no model path (None), since it makes its model itself.
    paths = [plan.study.family.get_model_path(spec.config) for spec in runs]
    shapes = {path: read_model_shape(path, environ) for path in dict.fromkeys(paths) if path is not None}
    run_bytes = [
        _estimate_run_bytes(plan, spec, shapes.get(path or "")) for spec, path in zip(runs, paths, strict=True)
    ]
    sizes = [size for size, _ in run_bytes]
    saved_counts = [count_occurrences(spec.steps, spec.config.trainer.save_freq) + spec.keeps_best for spec in runs]
    # --output may not exist yet; it will be created on the disk of its nearest existing parent.
    nearest_folder = next(folder for folder in (plan.output, *plan.output.parents) if os.path.isdir(folder))
    budget = DiskBudget(
        remaining_runs=len(runs),
        # A trial may train several runs at once, all seeds of an arm.
        concurrent_runs=min(resource_plan.max_concurrent * plan.max_runs_per_trial, len(runs)),
        is_uniform=len(set(sizes)) <= 1 and len(set(saved_counts)) <= 1,
        checkpoint_bytes=None,
        saved_checkpoints=max(saved_counts, default=0),
        last_states=int(any(spec.keeps_last for spec in runs)),
        row_bytes=sum(row_bytes for _, row_bytes in run_bytes) + (_STUDY_BYTES if runs else 0),
        total_bytes=None,
        written_bytes=0,
        free_bytes=shutil.disk_usage(nearest_folder).free,
        folder=nearest_folder,
        unknown_models=tuple(path for path, shape in shapes.items() if shape is None),
    )
    if budget.unknown_models:
        return budget
    # Every run has its last and saved checkpoints, and runs that train have those in flight. At worst, the runs with
    # the largest checkpoints train at the same time.
    kept_bytes = [size * (budget.last_states + count) for size, count in zip(sizes, saved_counts, strict=True)]
    largest_sizes = sorted(sizes, reverse=True)[: budget.concurrent_runs]
    written_bytes = 0
    for spec, checkpoint_bytes, (_, row_bytes) in zip(known_runs, kept_bytes, run_bytes, strict=False):
        folders = (plan.get_run_dir(spec.run_id), plan.output / spec.checkpoint_dir)
        # A run that is larger than estimated would otherwise hide that others lack space.
        written_bytes += min(sum(map(count_folder_bytes, folders)), checkpoint_bytes + row_bytes)
    return budget._replace(
        checkpoint_bytes=max(sizes, default=0),
        total_bytes=sum(kept_bytes) + budget.states_in_flight * sum(largest_sizes) + budget.row_bytes,
        written_bytes=written_bytes,
    )


def _estimate_run_bytes(plan: StudyPlan, spec: RunSpec, shape: ModelShape | None) -> tuple[int, int]:
    """Estimate the bytes of a run's checkpoint, and of its rows and the files made from them, such as logs and tables.

    shape: of the model that the run loads; None if it loads none or the shape is unknown.
    """
    if (estimate_bytes := plan.study.family.estimate_bytes) is not None:
        checkpoint_bytes, bytes_per_row = estimate_bytes(spec.config, count_policy_parameters(shape) if shape else 0)
        return checkpoint_bytes, _RUN_BYTES + spec.steps // spec.config.trainer.test_freq * bytes_per_row
    config = spec.ppo_config
    return 0 if shape is None else compute_checkpoint_bytes(shape, config), estimate_row_bytes(config)


def compute_scratch_bytes(budget: DiskBudget) -> int | None:
    """Compute the disk bytes that a run with a storage needs on its node for checkpoints; None if unknown."""
    if budget.checkpoint_bytes is None:
        return None
    # A saved checkpoint is there until it is copied to the storage.
    return budget.checkpoint_bytes * (_ROLLING_STATES + (budget.saved_checkpoints > 0))


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
    """Format the budget as a line of the plan: space needed, free space, the verdict, and the terms of the sum."""
    free_text = f"{decimal(budget.free_bytes)} free"
    if budget.remaining_runs == 0:
        return f"Disk: every run has ended, no more space is needed, {free_text}."
    terms = _format_terms(budget)
    if budget.total_bytes is None:
        return (
            "Disk: size of a checkpoint unknown, because no config.json of a trainable model was found for "
            f"{' and '.join(budget.unknown_models)}; {free_text}. Needed: {terms}."
        )
    written_text = f" ({decimal(budget.written_bytes)} already written)" if budget.written_bytes else ""
    verdict = "OK" if budget.missing_bytes <= budget.free_bytes else "NOT ENOUGH"
    removal_text = " The state of a run is removed when the run ends (--set trainer.keep_last=true keeps it)."
    return (
        f"Disk: needs at most {decimal(budget.total_bytes)}{written_text}, {free_text}. {verdict}. That is {terms}."
        f"{'' if budget.last_states else removal_text}"
    )


def _format_terms(budget: DiskBudget) -> str:
    """Format the terms of the budget's total: checkpoints of all runs, checkpoints in flight, and rows."""
    up_to = "" if budget.is_uniform else "up to "
    size = "unknown size" if budget.checkpoint_bytes is None else f"{up_to}{decimal(budget.checkpoint_bytes)}"
    saved = f"{up_to}{_count(budget.saved_checkpoints, 'saved checkpoint')}" if budget.saved_checkpoints else ""
    in_flight = _count(budget.states_in_flight, "more state" if budget.last_states else "state")
    if budget.last_states:
        saved = f"(1 last state + {saved})" if saved else "1 last state"
    kept = f"{_count(budget.remaining_runs, 'run')} x {saved} x {size} + " if saved else ""
    return (
        f"{kept}{_count(budget.concurrent_runs, 'run')} under way x {in_flight} x {size} + "
        f"{decimal(budget.row_bytes)} of rows, episodes and report"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
    if budget.concurrent_runs > 1:  # every concurrent run needs space for the checkpoints in flight
        remedies.append("--max-concurrent 1")
    remedies.append("--output with a folder on a larger disk")
    return (
        f"The study needs up to {decimal(needed_bytes)} more disk space, and {budget.folder} has "
        f"{decimal(budget.free_bytes)} free, {decimal(needed_bytes - budget.free_bytes)} too little: type "
        f"{', or '.join(remedies)}; or free disk space."
    )

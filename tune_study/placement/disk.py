"""Estimate the disk space that a study needs, before it starts.

Sizes are in bytes. Messages show them in decimal units, as `df -H` does.
"""

import glob
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.runs.episode_lines import MAX_ANSWER_CHARS
from trainable.runs.run_files import STATE_FOLDER
from tune_study.folder.summary import find_finished_runs
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
"""Bytes per tensor in the header of a safetensors file: name, type, shape and offsets (95 in sokoban-tiny)."""
_CHECKPOINT_JSON_BYTES = 3_000
"""Bytes of a checkpoint's JSON files: counters and checksums (0.4 kB), and the run's settings (2.2 kB)."""
_IN_FLIGHT = 2
"""Checkpoints of a training run besides the newest rolling one: the previous one, which is kept in case the newest is
damaged, and the one being written."""

# The following constants were measured on laptop studies, one run of 60 steps and one of 3, and rounded up to at least
# 5 % above the measurement.
_STEP_BYTES = 21_000
"""Bytes per step: metrics.jsonl 2.7 kB, result.json 7.7 kB, TensorBoard 5.0 kB, progress.csv 1.2 kB, logs 0.4 kB, and
2.2 kB of tables and report."""
_ANALYSIS_BYTES = 100_000
"""Bytes per gradient analysis: its lines and its share of the tables. The estimate is for 128 groups, as in the study
gradient-analysis, before and after the filter. Fewer groups need less."""
_LEVEL_BYTES, _EVALUATION_BYTES = 18, 150
"""Bytes in levels.jsonl per level of an evaluation (measured: validation 11.4, test 17), and per evaluation (an upper
bound: a line without levels has about 90 bytes)."""
_EPISODE_BYTES, _TURN_BYTES, _TOKEN_BYTES = 1_000, 700, 5
"""Bytes in episodes.jsonl per episode (the system message and the fields), per turn (a full observation has 530, a
compact one 140), and per token of a reply. A line has at most 1.7 kB under the laptop preset, and 1.1 kB on average."""
_RUN_BYTES = 250_000
"""Bytes per run that do not depend on its steps: Tune's experiment state (70 kB), figures (150 kB), and settings."""
_STUDY_BYTES = 1_650_000
"""Bytes per study that do not depend on its runs: scripts and layout of the report (1.1 MB), trials.parquet, tables."""


class DiskBudget(NamedTuple):
    """The maximum disk space for the runs of a study that have not ended, and the free space, in bytes."""

    remaining_runs: int
    """Runs that have not ended."""
    concurrent_runs: int
    """Number of remaining runs that train at once."""
    is_uniform: bool
    """Whether all runs have the same checkpoint size and number of saved checkpoints.

    If not, `checkpoint_bytes` and `saved_checkpoints` are maxima over the runs.
    """
    checkpoint_bytes: int | None
    """Size of one checkpoint; None if the size of a model is unknown."""
    saved_checkpoints: int
    """Number of global_step_<N> folders per run."""
    last_states: int
    """Number of rolling checkpoints per run that are kept after its end: 1, or 0 if no run keeps its last one."""
    row_bytes: int
    """Rows, logs, tables and report."""
    total_bytes: int | None
    """Sum of everything; None if the size of a model is unknown."""
    written_bytes: int
    """The part of `total_bytes` that is already on disk; 0 if the size of a model is unknown."""
    free_bytes: int
    """Space available to this user on the file system of `folder`."""
    folder: Path
    """The nearest existing parent of --output."""
    unknown_models: tuple[str, ...] = ()
    """Paths of the models whose size is unknown."""


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
    """Count how often an event occurs in `steps` steps: after every `every`-th step and after the last one.

    0 if `every` is not positive, which switches the event off.
    """
    return -(-steps // every) if every > 0 else 0


def estimate_row_bytes(config: RunConfig) -> int:
    """Estimate a run's bytes without checkpoints: lines, logs, Tune's files, and its share of tables and report."""
    env, trainer = config.env, config.trainer
    sampled_validations = trainer.val_before_train + count_occurrences(trainer.total_training_steps, trainer.test_freq)
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
    # Step 1 and every N-th step after it are analyzed: ceil(steps / N) analyses.
    analyses = (
        -(-trainer.total_training_steps // trainer.gradient_analysis_every) if trainer.gradient_analysis_mode else 0
    )
    return (
        _RUN_BYTES
        + trainer.total_training_steps * _STEP_BYTES
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
    runs = [spec for spec in plan.runs if spec.run_id not in ended_runs]
    num_known = len(runs)
    if plan.search is not None:  # points to come need as much as the known ones
        num_further_runs = plan.search.num_points * len(plan.seeds) - len(plan.runs)
        runs += list(itertools.islice(itertools.cycle(plan.runs), max(num_further_runs, 0)))
    sizes, unknown_models = _estimate_checkpoint_sizes(plan, runs, environ)
    saved_counts = [count_occurrences(spec.steps, spec.config.trainer.save_freq) + spec.keeps_best for spec in runs]
    last_states = int(any(spec.keeps_last for spec in runs))
    row_bytes = sum(_estimate_run_row_bytes(plan, spec) for spec in runs) + (_STUDY_BYTES if runs else 0)
    # A trial may train several runs at once, all seeds of an arm.
    concurrent_runs = min(resource_plan.max_concurrent * plan.max_runs_per_trial, len(runs))
    checkpoint_bytes, total_bytes, written_bytes = None, None, 0
    if not unknown_models:
        checkpoint_bytes = max(sizes, default=0)
        # Every run has its last and saved checkpoints, and runs that train have those in flight. At worst, the runs
        # with the largest checkpoints train at the same time.
        stored_bytes = sum(size * (last_states + count) for size, count in zip(sizes, saved_counts, strict=True))
        largest_sizes = sorted(sizes, reverse=True)[:concurrent_runs]
        total_bytes = stored_bytes + _count_rolling(last_states) * sum(largest_sizes) + row_bytes
        written_bytes = sum(
            _count_written_bytes(plan, spec, size)
            for spec, size in zip(runs[:num_known], sizes[:num_known], strict=True)
        )
    # --output may not exist yet; it will be created on the disk of its nearest existing parent.
    nearest_folder = next(folder for folder in (plan.output, *plan.output.parents) if os.path.isdir(folder))
    return DiskBudget(
        remaining_runs=len(runs),
        concurrent_runs=concurrent_runs,
        is_uniform=len(set(sizes)) <= 1 and len(set(saved_counts)) <= 1,
        checkpoint_bytes=checkpoint_bytes,
        saved_checkpoints=max(saved_counts, default=0),
        last_states=last_states,
        row_bytes=row_bytes,
        total_bytes=total_bytes,
        written_bytes=written_bytes,
        free_bytes=shutil.disk_usage(nearest_folder).free,
        folder=nearest_folder,
        unknown_models=unknown_models,
    )


def _estimate_checkpoint_sizes(
    plan: StudyPlan, runs: Sequence[RunSpec], environ: Mapping[str, str]
) -> tuple[list[int], tuple[str, ...]]:
    """Estimate checkpoint bytes of the `runs` with a model of known shape; also return the paths of other models."""
    family = plan.study.family
    model_paths = {spec.run_id: family.get_model_path(spec.config) for spec in runs}
    shapes = {path: read_model_shape(path, environ) for path in dict.fromkeys(model_paths.values()) if path is not None}
    unknown_models = tuple(path for path, shape in shapes.items() if shape is None)
    sizes = []
    for spec in runs:
        # A run of update rules may have no model path (None), since it makes its model itself.
        shape = shapes.get(model_paths[spec.run_id] or "")
        # Such families estimate their checkpoints themselves, with or without the parameters of a loaded model.
        if family.estimate_bytes is not None and model_paths[spec.run_id] not in unknown_models:
            sizes.append(family.estimate_bytes(spec.config, count_policy_parameters(shape) if shape else 0)[0])
        elif shape is not None:
            sizes.append(compute_checkpoint_bytes(shape, spec.ppo_config))
    return sizes, unknown_models


def _estimate_run_row_bytes(plan: StudyPlan, spec: RunSpec) -> int:
    """Estimate the bytes of a run's rows and of the files that are made from them, such as logs and tables."""
    estimate_bytes = plan.study.family.estimate_bytes
    if estimate_bytes is None:
        return estimate_row_bytes(spec.ppo_config)
    return _RUN_BYTES + spec.steps // spec.config.trainer.test_freq * estimate_bytes(spec.config, 0)[1]


def _count_rolling(last_states: int) -> int:
    """Count the rolling checkpoints of a training run beyond those that are kept after its end.

    last_states: rolling checkpoints per run that are kept. If 0, the newest one counts here as well.
    """
    return _IN_FLIGHT + 1 - last_states


def compute_scratch_bytes(budget: DiskBudget) -> int | None:
    """Compute the disk bytes that a run with a storage needs on its node for checkpoints; None if unknown.

    The node has the newest rolling checkpoint, the previous one, the one being written, and a saved one until it is
    copied to the storage.
    """
    if budget.checkpoint_bytes is None:
        return None
    return budget.checkpoint_bytes * (1 + _IN_FLIGHT + (budget.saved_checkpoints > 0))


def _count_written_bytes(plan: StudyPlan, spec: RunSpec, checkpoint_size: int) -> int:
    """Count the bytes of a run's budget that an earlier start has already written.

    Files outside the budget, such as checkpoints of an earlier --save-freq, are ignored: they do not reduce what is
    left to write.
    """
    run_dir, checkpoint_dir = plan.get_run_dir(spec.run_id), plan.output / spec.checkpoint_dir
    rolling_bytes = count_folder_bytes(run_dir / STATE_FOLDER)
    # Tune writes a trial's files, such as progress.csv, to <study folder>/<run_id of the trial>. If the seeds of an arm
    # share a trial, the folder has another name and is not counted.
    tune_bytes = count_folder_bytes(plan.folder / spec.run_id)
    record_bytes = count_folder_bytes(run_dir) - rolling_bytes + tune_bytes
    # The steps after which a complete run saves a checkpoint.
    every = spec.config.trainer.save_freq
    planned_steps = {*range(every, spec.steps, every), spec.steps} if every > 0 else set()
    saved_bytes = sum(
        min(count_folder_bytes(Path(path)), checkpoint_size)
        for path in glob.glob(f"{glob.escape(str(checkpoint_dir))}/global_step_*")
        if (step := path.rpartition("_")[2]).isdecimal() and int(step) in planned_steps
    )
    # No part counts for more than its estimate, or a part that is larger than estimated would hide that the others lack
    # space. The total has no checkpoint of a run that neither trains nor keeps its last state.
    kept_bytes = min(rolling_bytes, checkpoint_size) if spec.keeps_last else 0
    return kept_bytes + min(record_bytes, _estimate_run_row_bytes(plan, spec)) + saved_bytes


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
        unknown_text = " and ".join(budget.unknown_models)
        return (
            f"Disk: size of a checkpoint unknown, because no config.json of a trainable model was found for "
            f"{unknown_text}; {free_text}. Needed: {terms}."
        )
    written_text = f" ({decimal(budget.written_bytes)} already written)" if budget.written_bytes else ""
    verdict = "OK" if budget.total_bytes - budget.written_bytes <= budget.free_bytes else "NOT ENOUGH"
    removal_text = " The state of a run is removed when the run ends (--set trainer.keep_last=true keeps it)."
    return (
        f"Disk: needs at most {decimal(budget.total_bytes)}{written_text}, {free_text}. {verdict}. That is {terms}."
        f"{'' if budget.last_states else removal_text}"
    )


def _format_terms(budget: DiskBudget) -> str:
    """Format the terms of the budget's total: checkpoints of all runs, checkpoints in flight, and rows."""
    up_to = "" if budget.is_uniform else "up to "
    size = "unknown size" if budget.checkpoint_bytes is None else f"{up_to}{decimal(budget.checkpoint_bytes)}"
    per_run = [
        *([_count(budget.last_states, "last state")] if budget.last_states else []),
        *([f"{up_to}{_count(budget.saved_checkpoints, 'saved checkpoint')}"] if budget.saved_checkpoints else []),
    ]
    sum_per_run = " + ".join(per_run) if len(per_run) < 2 else f"({' + '.join(per_run)})"
    in_flight = _count(_count_rolling(budget.last_states), "more state" if budget.last_states else "state")
    terms = [
        *([f"{_count(budget.remaining_runs, 'run')} x {sum_per_run} x {size}"] if per_run else []),
        f"{_count(budget.concurrent_runs, 'run')} under way x {in_flight} x {size}",
        f"{decimal(budget.row_bytes)} of rows, episodes and report",
    ]
    return " + ".join(terms)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_combined_budget(budgets: Sequence[DiskBudget]) -> None:
    """Raise MisfitError if the studies of a suite together need more space than is free.

    Each may fit by itself. A study with a model of unknown size counts as 0.
    """
    needed_bytes = sum(
        budget.total_bytes - budget.written_bytes for budget in budgets if budget.total_bytes is not None
    )
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
    if budget.total_bytes is None:
        return ""
    needed_bytes = budget.total_bytes - budget.written_bytes
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

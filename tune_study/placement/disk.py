"""The disk that a study takes, worked out before it starts. Sizes are in bytes, shown in decimal units (`df -H`)."""

import glob
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.runs.run_files import STATE
from tune_study.folder.summary import finished_runs
from tune_study.placement.model_size import ModelShape, policy_parameters, shape_of, trained_tensors
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan

_FLOAT32 = 4
_HEADER = 100
"""Of a safetensors file, for one tensor: its name, type, shape and offsets. Measured: 95 (sokoban-tiny)."""
_VALUES = 3_000
"""The JSON files of a checkpoint: counters and checksums (0.4 kB), and the run's settings (2.2 kB)."""
_IN_FLIGHT = 2
"""While a run trains: the rolling state before the last one, and the one that is being written."""

# Measured on studies of the laptop preset, one run of 60 steps and one of 3; the figures are above by a tenth or more.
_STEP = 21_000
"""A step: metrics.jsonl 2.7 kB, result.json 7.7, TensorBoard 5.0, progress.csv 1.2, logs 0.4, tables and report 2.2."""
_ANALYSIS = 100_000
"""A gradient analysis of 128 groups, before and after the filter: its lines and its share of the tables."""
_LEVEL, _EVALUATION = 18, 150
"""A line of levels.jsonl: 11.4 bytes a validation level, 17 a test level; the rest of the line."""
_RUN = 250_000
"""What a run takes without a step: its share of Tune's experiment state (70 kB) and of the figures (150), settings."""
_STUDY = 550_000
"""What a study takes without a run: trials.parquet (90 kB), empty tables (40), the frames of report and figures."""


class DiskBudget(NamedTuple):
    """What the runs of a study that have not ended take at most, and what there is. Sizes in bytes.

    runs: how many have not ended. concurrent: how many of them at once. checkpoint: size of one, and kept: count of
    global_step_<N> folders a run, each of the run that has most where `is_uniform` is False. rolling: rolling states
    at the worst moment, over all runs. rows: rows, logs, tables and report. total: all of it. already: what of `total`
    is there. free: room for this user on the file system of `place`, the nearest folder of --output that exists.

    checkpoint and total are None, and already is 0, where a model is not here; `unknown` has its path.
    """

    runs: int
    concurrent: int
    is_uniform: bool
    checkpoint: int | None
    kept: int
    rolling: int
    rows: int
    total: int | None
    already: int
    free: int
    place: Path
    unknown: tuple[str, ...] = ()


def checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Size of one checkpoint of a run after its first update: what `PPOTrainer.state` holds, in float32.

    Every trained parameter has its weight and AdamW's two moments; every such tensor has AdamW's count of steps, a
    scalar. What is frozen, reference or base, is read from where the policy came from and is in no checkpoint.
    """
    parameters = [size for sizes in trained_tensors(shape, config).values() for size in sizes]
    elements = 3 * sum(parameters) + len(parameters)
    return _FLOAT32 * elements + 4 * len(parameters) * _HEADER + _VALUES


def times(steps: int, every: int) -> int:
    """How often something happens that is done every so many of `steps` and at the last; `every` <= 0: never."""
    return -(-steps // every) if every > 0 else 0


def row_bytes(config: RunConfig) -> int:
    """What a run writes beside its checkpoints: rows, levels, logs, Tune's files, its part of tables and report."""
    env, trainer = config.env, config.trainer
    # The base policy sampled and greedy, then every validation, and a greedy one at the end.
    validations = 2 * trainer.val_before_train + times(trainer.total_training_steps, trainer.test_freq) + 1
    levels = validations * env.val_env_groups * env.val_group_size + 2 * env.test_env_groups
    analyses = -(-trainer.total_training_steps // trainer.gradient_analysis_every) * trainer.gradient_analysis_mode
    return (
        _RUN
        + trainer.total_training_steps * _STEP
        + analyses * _ANALYSIS
        + levels * _LEVEL
        + (validations + 2) * _EVALUATION
    )


def budget(plan: StudyPlan, allotment: Allotment, environ: Mapping[str, str]) -> DiskBudget:
    """The disk budget of what is left of `plan`: runs that have ended write no more and are left out."""
    ended = finished_runs(plan)
    runs = [spec for spec in plan.runs if spec.run_id not in ended]
    sizes, unknown = _sizes(plan, runs, environ)
    kept = [times(spec.steps, spec.config.trainer.save_freq) for spec in runs]
    rows = sum(_rows(plan, spec) for spec in runs) + (_STUDY if runs else 0)
    concurrent = min(allotment.max_concurrent * max(len(trial) for trial in plan.trials), len(runs))
    place = next(folder for folder in (plan.output, *plan.output.parents) if os.path.isdir(folder))
    return DiskBudget(
        runs=len(runs),
        concurrent=concurrent,
        is_uniform=len(set(sizes)) <= 1 and len(set(kept)) <= 1,
        checkpoint=None if unknown else max(sizes, default=0),
        kept=max(kept, default=0),
        rolling=len(runs) + _IN_FLIGHT * concurrent,
        rows=rows,
        total=None if unknown else _states(sizes, kept, concurrent) + rows,
        already=0 if unknown else sum(_there(plan, spec, size) for spec, size in zip(runs, sizes, strict=True)),
        free=shutil.disk_usage(place).free,
        place=place,
        unknown=unknown,
    )


def _sizes(plan: StudyPlan, runs: Sequence[RunSpec], environ: Mapping[str, str]) -> tuple[list[int], tuple[str, ...]]:
    """Bytes of a state of each of `runs` whose model's shape is known, and the models whose shape is not."""
    family = plan.study.family
    loaded = {spec.run_id: family.loads(spec.config) for spec in runs}
    shapes = {path: shape_of(path, environ) for path in dict.fromkeys(loaded.values()) if path is not None}
    unknown = tuple(path for path, shape in shapes.items() if shape is None)
    sizes = []
    for spec in runs:
        shape = shapes.get(loaded[spec.run_id] or "")
        if family.sizes is not None and loaded[spec.run_id] not in unknown:
            sizes.append(family.sizes(spec.config, policy_parameters(shape) if shape else 0)[0])
        elif shape is not None:
            sizes.append(checkpoint_bytes(shape, spec.ppo))
    return sizes, unknown


def _rows(plan: StudyPlan, spec: RunSpec) -> int:
    """Bytes of a run's rows, and of what is made of them."""
    sizes = plan.study.family.sizes
    return (
        row_bytes(spec.ppo)
        if sizes is None
        else _RUN + spec.steps // spec.config.trainer.test_freq * sizes(spec.config, 0)[1]
    )


def _states(sizes: Sequence[int], kept: Sequence[int], concurrent: int) -> int:
    """Bytes of all checkpoints: each run's kept ones and a rolling one, and what is in flight of the largest runs."""
    at_rest = sum(size * (1 + count) for size, count in zip(sizes, kept, strict=True))
    return at_rest + _IN_FLIGHT * sum(sorted(sizes, reverse=True)[:concurrent])


def scratch_bytes(budget: DiskBudget) -> int | None:
    """Bytes that a run keeps on its node where a storage takes its states; None where they are not known.

    A rolling state and the one before, one that is being written, and one to keep until it is copied.
    """
    return None if budget.checkpoint is None else budget.checkpoint * (1 + _IN_FLIGHT + (budget.kept > 0))


def _there(plan: StudyPlan, spec: RunSpec, checkpoint: int) -> int:
    """Bytes of a run's part of the total that are on disk; what the plan has no place for does not count."""
    run_dir, folder = plan.run_dir(spec.run_id), plan.output / spec.checkpoints
    state = folder_bytes(run_dir / STATE)
    lines = folder_bytes(run_dir) - state + folder_bytes(plan.folder / spec.run_id)
    steps = [(path, path.rpartition("_")[2]) for path in glob.glob(f"{glob.escape(str(folder))}/global_step_*")]
    planned = [Path(path) for path, step in steps if step.isdecimal() and _is_kept(int(step), spec)]
    kept = sum(min(folder_bytes(path), checkpoint) for path in planned)
    return min(state, checkpoint) + min(lines, _rows(plan, spec)) + kept


def _is_kept(step: int, spec: RunSpec) -> bool:
    """Whether a run that trains all its steps writes global_step_<step>."""
    every = spec.config.trainer.save_freq
    return 1 <= step <= spec.steps and every > 0 and (step == spec.steps or step % every == 0)


def folder_bytes(folder: Path) -> int:
    """Sizes of all files below `folder`, links not followed; 0 where there is no folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # removed since it was listed: a study in the folder is running
                continue
    return total


def line(budget: DiskBudget) -> str:
    """The budget in one line of the plan."""
    free = f"{decimal(budget.free)} free"
    if budget.runs == 0:
        return f"disk: every run has ended, nothing more is needed; {free}"
    most = "" if budget.is_uniform else "up to "
    size = " checkpoints" if budget.checkpoint is None else f" x {most}{decimal(budget.checkpoint)}"
    runs = f"{budget.runs} run{'s' * (budget.runs > 1)} x (1 rolling + {most}{budget.kept} kept)"
    running = f"{budget.concurrent} x {_IN_FLIGHT}{size} while running"
    text = f"disk: {runs}{size} + {running} + rows {decimal(budget.rows)}"
    if budget.total is None:
        unknown = " and ".join(budget.unknown)
        why = f"no config.json of a model that can be trained is here for {unknown}"
        return f"{text}; the size of a checkpoint is not known: {why}; {free}"
    already = f", {decimal(budget.already)} of it written already" if budget.already else ""
    return f"{text} = {decimal(budget.total)}{already}; {free}"


def check_together(budgets: Sequence[DiskBudget]) -> None:
    """PlanError where studies that are to run one after another need more than is free; unknown sizes do not count."""
    needed = sum(budget.total - budget.already for budget in budgets if budget.total is not None)
    free = min((budget.free for budget in budgets), default=needed)
    if needed > free:
        raise PlanError(
            f"The {len(budgets)} studies need up to {decimal(needed)} more on disk together, and {budgets[0].place} "
            f"has {decimal(free)} free: type --output with a folder on a larger disk, --save-freq -1, run them one at "
            f"a time, or make room."
        )


def check(budget: DiskBudget) -> None:
    """PlanError where the study needs more than is free; an unknown size is no reason."""
    if budget.total is None:
        return
    needed = budget.total - budget.already
    if needed <= budget.free:
        return
    ways = ["--output with a folder on a larger disk"]
    if budget.kept:
        ways.insert(0, "--save-freq with a larger number (-1 keeps none)")
    if budget.concurrent > 1:
        ways.insert(-1, "--max-concurrent 1")
    raise PlanError(
        f"The study needs up to {decimal(needed)} more on disk, and {budget.place} has {decimal(budget.free)} free, "
        f"{decimal(needed - budget.free)} too little: type {', or '.join(ways)}; or make room. "
        f"In full: {line(budget).removeprefix('disk: ')}."
    )

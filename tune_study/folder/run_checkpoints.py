"""Find the checkpoint of a run: rolling or saved, local or in a storage."""

import os
from dataclasses import dataclass
from pathlib import Path

from trainable.config.setting_types import format_value
from trainable.files.paths import check_tree
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.run_files import STATE_FOLDER
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import RunSpec, StudyPlan


@dataclass(frozen=True)
class RunCheckpoint:
    """A run of a study and one of its checkpoints. step, path: step and folder of the checkpoint."""

    plan: StudyPlan
    spec: RunSpec
    step: int
    path: Path


def find_checkpoint_path(root: Path | None, step: int | None, path: Path | None) -> Path | None:
    """Find a checkpoint's folder: `path`, or the folder of `step` below `root`; None if both are None.

    step: None for the newest checkpoint below `root`. Raises PlanError if `root` contains no checkpoint.
    """
    if path is not None or root is None:
        return path
    root = Path(os.path.abspath(os.path.expanduser(root)))
    steps = [number for number, _ in iter_checkpoints(root)]
    if not steps:
        raise PlanError(
            f"{format_value(str(root), 1000)} contains no folder global_step_<N>: type --checkpoint-root with a run's "
            f"folder of checkpoints."
        )
    return root / f"global_step_{max(steps) if step is None else step}"


def find_run_checkpoint(
    plan: StudyPlan, trial: str | None, step: int | None, path: Path | str | None, algo: str | None = None
) -> RunCheckpoint:
    """Find a run and its checkpoint. Raises PlanError that lists the alternatives if there is none.

    plan: the study, read from its folder. trial: run_id, or an arm to choose its smallest seed; None if there is only
    one run. step: None for the newest. path: folder of the checkpoint, instead of `step`. algo: the arm, in a study
    whose axis has the option --algo.
    """
    if plan.model is None:
        raise PlanError(
            f"Study {plan.study.name} fine-tunes no language model, and the gradients of its runs are measured during "
            f"training (--set diagnostics=True): type the folder of another study."
        )
    if algo is not None and (trial is not None or plan.study.axis.option != "--algo"):
        reason = "--trial names the run already" if trial else f"it does not belong to study {plan.study.name}"
        raise PlanError(f"--algo cannot be used here ({reason}): type --trial and the name of a run.")
    spec = _find_run(plan, algo if trial is None else trial)
    if path is not None:  # the folder may be anywhere
        checkpoint_dir = Path(os.path.abspath(os.path.expanduser(path)))
        for number, folder in iter_checkpoints(checkpoint_dir.parent):
            if folder == checkpoint_dir and folder.is_dir():
                return RunCheckpoint(plan, spec, number, folder)
        raise PlanError(
            f"{format_value(str(path), 1000)} is not a checkpoint: type a folder global_step_<N> that exists."
        )
    check_tree(plan.output, trees=[plan.output / spec.checkpoint_dir])  # the saved checkpoints lie beside the folder
    # If a step has a rolling and a saved checkpoint, the saved one is used, since rolling checkpoints are temporary.
    local_checkpoints = {
        **dict(iter_checkpoints(plan.get_run_dir(spec.run_id) / STATE_FOLDER)),
        **dict(iter_checkpoints(plan.output / spec.checkpoint_dir)),
    }
    from tune_study.folder import storage

    stored_checkpoints: dict[int, str] = {}
    if plan.study_uri is not None:
        stored_checkpoints = storage.list_checkpoints(plan.study_uri, spec, plan.get_trial_name(spec))
    steps = sorted({*local_checkpoints, *stored_checkpoints})
    # By default, use the newest checkpoint, whether rolling or saved, local or in the storage.
    if step is None and steps:
        step = steps[-1]
    if step not in steps:
        step_phrase = "" if step is None else f" of step {step}"
        available_steps = ", ".join(map(str, steps)) or "none"
        reason = "The study saves none except for resuming (--save-freq, --keep-best, --set trainer.keep_last=true)."
        if (save_freq := spec.config.trainer.save_freq) > 0:
            reason = (
                f"It saves one every {save_freq} steps, in {plan.study_uri or plan.output / spec.checkpoint_dir}. If "
                "they are elsewhere, copy them there, or type --resume-from-path with the folder of one."
            )
        raise PlanError(
            f"Run {spec.run_id} has no checkpoint{step_phrase}. Available steps: {available_steps}. {reason}"
        )
    if step not in local_checkpoints:
        name = stored_checkpoints[step]
        is_saved = name.rpartition("/")[2].startswith("global_")
        parent = plan.output / spec.checkpoint_dir if is_saved else plan.get_run_dir(spec.run_id) / STATE_FOLDER
        local_checkpoints[step] = parent / name.rpartition("/")[2]
        storage.fetch_checkpoint(plan.study_uri or "", name, local_checkpoints[step])
    return RunCheckpoint(plan, spec, step, local_checkpoints[step])


def _find_run(plan: StudyPlan, trial: str | None) -> RunSpec:
    """Find a run by run_id, by arm (smallest seed), or the only run (None). Raises PlanError if there is none."""
    if trial is None and len(plan.runs) == 1:
        return plan.runs[0]
    # A run_id takes precedence over an arm of the same name.
    matches = [spec for spec in plan.runs if spec.run_id == trial] or [spec for spec in plan.runs if spec.arm == trial]
    if matches:
        return min(matches, key=lambda spec: spec.seed)
    arms = ", ".join(dict.fromkeys(format_value(spec.arm) for spec in plan.runs))
    problem = "There are several runs" if trial is None else f"There is no run `{format_value(trial)}`"
    raise PlanError(
        f"{problem} in {plan.folder}: type --trial with an arm, for its smallest seed, or with the name of a run. The "
        f"arms are {arms}; a run is {plan.runs[-1].run_id}."
    )

"""A Tune trial has one run, or the runs of all seeds of an arm: what it is given, and which row is whose."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tune_study.folder.outputs import ENDED, RunStatus
from tune_study.plan.study_plan import RunSpec, StudyPlan, changed_settings


def run_ids_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The runs that the trial of this config has."""
    return tuple(run["run_id"] for run in config["runs"])


def rows_by_run(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """run_id -> row of a result; a run that had ended before its trial did has none."""
    if config["side_by_side"]:
        return dict(result.get("rows", {}))
    return {config["run_id"]: result}


def trial_configs(plan: StudyPlan, finished: Mapping[str, RunStatus], interrupt: Path) -> Iterator[dict[str, Any]]:
    """What every Tune trial of a study is given; one with several runs has those that are left, or all if none is.

    finished: the runs that are not run again, by run_id: those that have ended are replayed. interrupt: a file whose
    existence ends a run after its next step.
    """
    for specs in plan.trials:
        left = tuple(spec for spec in specs if spec.run_id not in finished)
        ended = tuple(spec for spec in specs if spec.run_id in finished)
        if not left and not all(finished[spec.run_id].status in ENDED for spec in ended):
            continue  # given up: Tune is not told of it
        yield trial_config(plan, left or ended, not left, interrupt)


def trial_config(
    plan: StudyPlan, specs: Sequence[RunSpec], is_finished: bool, interrupt: Path | None = None
) -> dict[str, Any]:
    """What `trainable.trial.Trial` is given for runs of one arm: names, changed settings, absolute places."""
    first, family = specs[0], plan.study.family
    return {
        "run_id": first.experiment_name if family.seeds_together else first.run_id,
        "study": first.study,
        "arm": first.arm,
        "seed": first.seed,
        "settings": changed_settings(first.config),
        "runs": [_place(plan, spec) for spec in specs],
        "side_by_side": family.seeds_together,
        "finished": is_finished,
        "family": family.trainer,
        "stop_rules": list(plan.study.stop_rules),
        "interrupt": str(interrupt) if interrupt else None,
        "storage": plan.stored,
        "storage_patience": plan.base.trainer.disk_patience,
    }


def _place(plan: StudyPlan, spec: RunSpec) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "seed": spec.seed,
        "run_dir": str(plan.run_dir(spec.run_id)),
        "checkpoint_dir": str(plan.output / spec.checkpoints),
    }

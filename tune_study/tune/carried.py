"""A Tune trial carries one run, or all seeds of an arm: what it is given, and which row of its results is whose."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tune_study.folder.outputs import ENDED, RunStatus
from tune_study.plan.study_plan import RunSpec, StudyPlan, changed_settings


def run_ids(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The runs that the trial of this config carries."""
    if "members" in config:
        return tuple(member["run_id"] for member in config["members"])
    return (config["run_id"],)


def rows(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """run_id -> row of a result; a run that had ended before its trial did has none."""
    if "members" in config:
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
        if plan.study.family.seeds_together:
            yield arm_config(plan, left or ended, not left, interrupt)
        else:
            yield run_config(plan, specs[0], not left, interrupt)


def run_config(plan: StudyPlan, spec: RunSpec, is_finished: bool, interrupt: Path | None = None) -> dict[str, Any]:
    """What the Trainable of one run is given: names, settings that differ from the defaults, absolute places."""
    return {**_place(plan, spec), **_shared(plan, spec, is_finished, interrupt)}


def arm_config(plan: StudyPlan, specs: Sequence[RunSpec], is_finished: bool, interrupt: Path) -> dict[str, Any]:
    """What the Trainable of several seeds of an arm is given: run_id names the trial, members are the runs."""
    return {
        "run_id": specs[0].experiment_name,
        "members": [_place(plan, spec) for spec in specs],
        **_shared(plan, specs[0], is_finished, interrupt),
    }


def _place(plan: StudyPlan, spec: RunSpec) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "seed": spec.seed,
        "run_dir": str(plan.run_dir(spec.run_id)),
        "checkpoint_dir": str(plan.output / spec.checkpoints),
    }


def _shared(plan: StudyPlan, spec: RunSpec, is_finished: bool, interrupt: Path | None) -> dict[str, Any]:
    return {
        "study": spec.study,
        "arm": spec.arm,
        "settings": changed_settings(spec.config),
        "finished": is_finished,
        "trainable": plan.study.trainable,
        "stop_rules": list(plan.study.stop_rules),
        "interrupt": str(interrupt) if interrupt else None,
        "storage": plan.stored,
        "storage_patience": plan.base.trainer.disk_patience,
    }

"""A Tune trial has one run, or the runs of all seeds of an arm: what it is given, and which row is whose."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tune_study.folder.outputs import ENDED_STATUSES, RunStatus
from tune_study.plan.study_plan import RunSpec, StudyPlan, find_changed_settings


def list_run_ids(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The runs that the trial of this config has."""
    return tuple(run["run_id"] for run in config["runs"])


def split_rows_by_run(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """run_id -> row of a result; a run that had ended before its trial did has none."""
    if config["side_by_side"]:
        return dict(result.get("rows", {}))
    return {config["run_id"]: result}


def make_trial_configs(
    plan: StudyPlan, finished_statuses: Mapping[str, RunStatus], interrupt: Path
) -> Iterator[dict[str, Any]]:
    """What every Tune trial of a study is given; one with several runs has those that are left, or all if none is.

    finished: the runs that are not run again, by run_id: those that have ended are replayed. interrupt: a file whose
    existence ends a run after its next step.
    """
    for specs in plan.trials:
        remaining_specs = tuple(spec for spec in specs if spec.run_id not in finished_statuses)
        finished_specs = tuple(spec for spec in specs if spec.run_id in finished_statuses)
        if not remaining_specs and not all(
            finished_statuses[spec.run_id].status in ENDED_STATUSES for spec in finished_specs
        ):
            continue  # given up: Tune is not told of it
        yield make_trial_config(plan, remaining_specs or finished_specs, not remaining_specs, interrupt)


def make_trial_config(
    plan: StudyPlan, specs: Sequence[RunSpec], is_finished: bool, interrupt: Path | None = None
) -> dict[str, Any]:
    """What `trainable.trial.Trial` is given for runs of one arm: names, changed settings, absolute places."""
    first_spec, family = specs[0], plan.study.family
    return {
        "run_id": first_spec.experiment_name if family.has_batched_seeds else first_spec.run_id,
        "study": first_spec.study_name,
        "arm": first_spec.arm,
        "seed": first_spec.seed,
        "settings": find_changed_settings(first_spec.config),
        "runs": [_make_run_entry(plan, spec) for spec in specs],
        "side_by_side": family.has_batched_seeds,
        "finished": is_finished,
        "family": family.trainer,
        "stop_rules": list(plan.study.stop_rules),
        "interrupt": str(interrupt) if interrupt else None,
        "storage": plan.study_uri,
        "storage_patience": plan.base_config.trainer.disk_patience,
    }


def _make_run_entry(plan: StudyPlan, spec: RunSpec) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "seed": spec.seed,
        "run_dir": str(plan.get_run_dir(spec.run_id)),
        "checkpoint_dir": str(plan.output / spec.checkpoint_dir),
    }

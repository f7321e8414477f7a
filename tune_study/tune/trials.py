"""Make the configs of Tune trials, and assign the rows of their results to runs.

A trial has one run, or the runs of all seeds of an arm.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainable.config.own_parts import list_part_files
from trainable.runs.records import drop_carried
from trainable.runs.study_record import StatusRecord
from tune_study.host.interrupt import Interrupt
from tune_study.plan.study_plan import RunSpec, StudyPlan, find_changed_settings


def list_run_ids(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List the ids of the runs in a trial's config."""
    return tuple(run["run_id"] for run in config["run"]["runs"])


def split_rows_by_run(config: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split a result into rows by run_id. A run that failed, or ended before others of its trial, is missing."""
    if result.get("failure_class"):
        return {}
    # A trial with one run reports the columns of its row directly, so that Tune's tools can plot them.
    if has_several_runs(config):
        return dict(result.get("rows", {}))
    (run_id,) = list_run_ids(config)
    return {run_id: drop_carried(result)}


def has_several_runs(config: Mapping[str, Any]) -> bool:
    """Check whether a trial trains a list of seeds side by side, even a list of one."""
    return isinstance(config["seed"], list | tuple)


def make_trial_configs(
    plan: StudyPlan,
    finished_statuses: Mapping[str, StatusRecord],
    interrupt: Interrupt,
    placement_settings: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yield the configs of a study's Tune trials, each with its remaining runs.

    finished_statuses: statuses, by run_id, of the runs that are not run again. interrupt: the request to stop, whose
    files end runs after their next step. placement_settings: settings that follow from the GPUs' memory (see
    `ResourcePlan`).
    """
    for specs in plan.trials:
        remaining_specs = tuple(spec for spec in specs if spec.run_id not in finished_statuses)
        if remaining_specs:
            yield {**make_trial_config(plan, remaining_specs, interrupt), **placement_settings}


def make_trial_config(plan: StudyPlan, specs: Sequence[RunSpec], interrupt: Interrupt | None = None) -> dict[str, Any]:
    """Make the config of `trainable.trial.PPO` for runs of one arm: changed settings, seed, and places of the runs.

    specs: the runs, at least one.
    """
    first_spec, family = specs[0], plan.study.family
    if plan.study_uri is None:
        interrupts = [interrupt.path, interrupt.get_arm_path(first_spec.arm)] if interrupt else []
        runs = [_make_run_entry(plan, spec) for spec in specs]
        place: dict[str, Any] = {"runs": runs, "interrupts": list(map(str, interrupts))}
    else:
        # The runs are in the folder of the trial on its node, and upload their checkpoints to the storage.
        place = {"runs": [{"run_id": spec.run_id, "seed": spec.seed} for spec in specs], "storage": plan.study_uri}
    return {
        # The first run stands for all: runs of an arm differ only in their seed.
        **find_changed_settings(first_spec.config),
        "seed": [spec.seed for spec in specs] if family.has_batched_seeds else first_spec.seed,
        "run": {
            "study": plan.study.name,
            "arm": first_spec.arm,
            "stop_rules": list(plan.study.stop_rules),
            "code": {file.name: file.text for file in list_part_files(first_spec.config)},
            **place,
        },
    }


def _make_run_entry(plan: StudyPlan, spec: RunSpec) -> dict[str, Any]:
    """Make the entry of a run: its places, and for a run of a fork, which run it continues after which step."""
    entry: dict[str, Any] = {
        "run_id": spec.run_id,
        "seed": spec.seed,
        "run_dir": str(plan.get_run_dir(spec.run_id)),
        "checkpoint_dir": str(plan.output / spec.checkpoint_dir),
    }
    if parent := plan.find_parent(spec):
        places = {"run_dir": str(parent.run_dir), "checkpoint_dir": str(parent.checkpoint_dir)}
        entry["parent"] = {**places, "step": parent.step}
    return entry

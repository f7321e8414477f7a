"""A folder that holds a study already: the same study goes on in it, another is refused with what differs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from search_spaces import STUDIES
from trainable.config import RunConfig
from tune_study.outputs import read_json
from tune_study.plan import PlanError, StudyPlan, build_plan, flat_settings


def read_study(folder: Path) -> dict[str, Any]:
    """study.json of results/<run>, or PlanError if there is none."""
    data = read_json(folder / "study.json")
    if data is None:
        raise PlanError(
            f"{folder} holds no study (no study.json): type the folder results/<run> of one, "
            f"as `python -m tune_study run` printed it."
        )
    missing = [key for key in ("name", "preset", "axis", "seeds", "runs", "settings") if key not in data]
    if missing:
        raise PlanError(f"{folder}/study.json is not whole: it lacks {', '.join(missing)}. Type the folder of a study.")
    return data


def plan_from_folder(folder: Path) -> StudyPlan:
    """The plan of the study in results/<run>, as it was resolved when it was started; PlanError if there is none."""
    folder = Path(os.path.abspath(folder))
    data = read_study(folder)
    study = STUDIES.get(str(data.get("name")))
    if study is None:
        raise PlanError(f"{folder} holds the study {data.get('name')!r}, which is none of {', '.join(STUDIES)}.")
    try:
        study = replace(study, trainable=data["trainable"], stop_rules=tuple(data["stop_rules"]))
        base = RunConfig.model_validate(data["settings"])
        values, seeds = tuple(data["axis"]["values"]), tuple(data["seeds"])
        reason = data["preset_reason"]
        plan = build_plan(study, data["preset"], reason, base, values, seeds, folder.parent.parent)
    except (KeyError, TypeError, ValidationError) as error:
        raise PlanError(f"{folder}/study.json is not one that this version reads: {error}") from error
    if plan.folder != folder:
        raise PlanError(f"{folder} was moved or renamed: the study in it belongs into {plan.folder}.")
    return plan


def join(plan: StudyPlan, extend: bool) -> StudyPlan:
    """`plan` as it can be run in its folder: itself where the folder is new, or the study there, extended if asked.

    PlanError if the folder holds a study with other settings, or other values or seeds without `extend`.
    """
    if not (plan.folder / "study.json").exists():
        return plan
    held = plan_from_folder(plan.folder)
    changes = differences(held, plan)
    if changes:
        raise PlanError(
            f"{plan.folder} holds this study with other settings:\n  " + "\n  ".join(changes) + "\n"
            "Type the same settings to go on with it, or another --output to start a new one."
        )
    values = (*held.values, *(value for value in plan.values if value not in held.values))
    seeds = tuple(sorted({*held.seeds, *plan.seeds}))
    if not extend:
        _check_same_arms(held, plan)
    return build_plan(plan.study, plan.preset, plan.preset_reason, plan.base, values, seeds, plan.output)


def differences(held: StudyPlan, plan: StudyPlan) -> list[str]:
    """`name: old -> new` for everything that differs and can change a row."""
    changes = [
        f"{name}: {old} -> {new}"
        for name, old, new in (
            ("trainable", held.study.trainable, plan.study.trainable),
            ("stop_rules", ", ".join(held.study.stop_rules), ", ".join(plan.study.stop_rules)),
        )
        if old != new
    ]
    changes += _changed(held.base, plan.base)
    return changes or _changed_arms(plan)


def _changed(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ between two configurations, if any of them can change a row."""
    if old.config_hash() == new.config_hash():
        return []
    before, after = (flat_settings(config.model_dump(mode="json")) for config in (old, new))
    return [f"{name}: {before[name]} -> {after[name]}" for name in after if before[name] != after[name]]


def _changed_arms(plan: StudyPlan) -> list[str]:
    """Settings of the folder's own runs that the study, as it is declared now, would give another value."""
    found = []
    for spec in plan.runs:
        recorded = read_json(plan.run_dir(spec.run_id) / "run.json")
        if recorded is not None:
            changes = _changed(RunConfig.model_validate(recorded["config"]), spec.config)
            found += [f"{spec.run_id} {change}" for change in changes]
    return found


def _check_same_arms(held: StudyPlan, plan: StudyPlan) -> None:
    """PlanError where values or seeds differ."""
    option = plan.study.axis.option
    changes = []
    if set(held.values) != set(plan.values):
        changes.append(f"{option}: {','.join(held.values)} -> {','.join(plan.values)}")
    if set(held.seeds) != set(plan.seeds):
        changes.append(f"--seeds: {len(held.seeds)} -> {len(plan.seeds)}")
    if changes:
        raise PlanError(
            f"{plan.folder} holds this study with other runs:\n  " + "\n  ".join(changes) + "\n"
            f"Type --extend to add the new ones to it, `python -m tune_study resume {plan.folder}` to go on with "
            f"those it has, or another --output."
        )

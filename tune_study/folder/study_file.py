"""A folder that holds a study already: the same study goes on in it, another is refused with what differs."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from search_spaces import STUDIES
from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, explain, with_overrides
from trainable.config.setting_types import shown
from trainable.config.study_config import StudyConfig
from trainable.runs.stop_rules import RULES
from trainable.storage.uris import is_same
from tune_study.folder.outputs import read_json
from tune_study.plan.study_plan import (
    PlanError,
    StudyPlan,
    arm_config,
    build_plan,
    find_study,
    flat_settings,
    values_said,
)

Text = Annotated[str, Field(max_length=100_000)]
RunId = Annotated[str, Field(max_length=255, pattern=r"^[^/.\x00-\x1f][^/\x00-\x1f]*$")]

NOT_MOVED: Mapping[str, object] = MappingProxyType({})


class _Part(BaseModel):
    """A part of study.json: types as they were written; what this version does not know is no error."""

    model_config = ConfigDict(strict=True)


class _Axis(_Part):
    setting: Text
    option: Text
    values: list[Text]


class _Entry(_Part):
    run_id: RunId
    arm: Text
    seed: int = Field(ge=0, le=2**31)


class _Trainer(_Part):
    total_training_steps: int = Field(ge=1, le=2**31)


class _SettingsEntry(_Part):
    trainer: _Trainer


class _Git(_Part):
    commit: Text
    dirty: bool


class _Start(_Part):
    versions: dict[Text, Text]
    git: _Git | None


class _Contrast(_Part):
    name: Text
    pairs: list[Annotated[list[Text], Field(min_length=2, max_length=2)]]


class _StudyFile(_Part):
    """study.json as far as `status`, `report` and `resume` rely on it."""

    name: Text
    preset: Text
    axis: _Axis
    seeds: list[int]
    runs: list[_Entry]
    settings: _SettingsEntry
    defaults: dict[Text, Any] = {}
    stop_rules: list[Text]
    preset_reason: Text
    command: Text
    question: Text = ""
    run: Text = ""
    baseline: Text | None = None
    contrasts: list[_Contrast] = []
    versions: dict[Text, Text] = {}
    git: _Git | None = None
    starts: list[_Start] = []
    created_at: Text = ""
    family: Text = "ppo"
    model: Text = ""
    storage: Text | None = None


def read_study(folder: Path) -> dict[str, Any]:
    """study.json of results/<run>, or PlanError if there is none, or one in which something is missing or odd."""
    data = _object(folder / "study.json")
    if data is None:
        what = "its study.json is damaged" if os.path.exists(folder / "study.json") else "no study.json"
        raise PlanError(
            f"{shown(folder, 1000)} holds no study ({what}): type the folder results/<run> of one, "
            f"as `python -m tune_study run` printed it."
        )
    missing = [key for key in ("name", "preset", "axis", "seeds", "runs", "settings") if key not in data]
    if missing:
        raise PlanError(f"{folder}/study.json is not whole: it lacks {', '.join(missing)}. Type the folder of a study.")
    try:
        _StudyFile.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{folder}/study.json is damaged, or of another version: {explain(error)}") from None
    return data


def _object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file or none in it that can be read."""
    try:
        return read_json(path)
    except RecursionError:  # A list in a list in a list ...
        return None


def plan_from_folder(folder: Path, placed: Mapping[str, object] = NOT_MOVED, study: Study | None = None) -> StudyPlan:
    """The plan of the study in results/<run>, as it was resolved when it was started; PlanError if there is none.

    placed: settings of its place that are to be others from now on, such as {"trainer.n_gpus_per_node": 2}. study: as
    the caller declares it; without one it is that of the same name in `search_spaces`. The folder chooses no code:
    what trains its runs is what that study declares.
    """
    folder = Path(os.path.abspath(folder))
    data = read_study(folder)
    study = study or STUDIES.get(data["name"])
    if study is None:
        raise PlanError(f"{folder} holds the study '{shown(data['name'])}', which is none of {', '.join(STUDIES)}.")
    try:
        base = with_overrides(study.family.config.model_validate(data["settings"]), placed)
        if study.variants:
            study = find_study(study.name, str(flat_settings(base.model_dump(mode="json"))[study.variant_setting]))
        if unknown := set(data["stop_rules"]) - {*RULES, *study.stop_rules}:
            raise PlanError(f"there is no stop rule {shown(unknown.pop())}.")
        study = replace(study, stop_rules=tuple(data["stop_rules"]))
        values, seeds = tuple(data["axis"]["values"]), tuple(data["seeds"])
        plan = build_plan(study, data["preset"], data["preset_reason"], base, values, seeds, folder.parent.parent)
        plan = replace(plan, storage=data.get("storage"))
        if {spec.run_id for spec in plan.runs} != {entry["run_id"] for entry in data["runs"]}:
            raise PlanError("it lists other runs than its values and seeds give.")
    except ConfigError:
        raise
    except ValidationError as error:
        raise PlanError(f"{folder}/study.json is not one that this version reads: {explain(error)}") from None
    except ValueError as error:
        raise PlanError(f"{folder}/study.json is not one that this version reads: {error}") from None
    if plan.folder != folder:
        raise PlanError(f"{folder} was moved or renamed: the study in it belongs into {plan.folder}.")
    return plan


def check_unchanged(plan: StudyPlan) -> None:
    """PlanError where the study, as it is declared now, would give the runs in its folder other settings."""
    changes = _changed_arms(plan)
    if changes:
        raise PlanError(
            f"The study {plan.study.name} is declared otherwise than when {plan.folder} was started:\n  "
            + "\n  ".join(changes) + "\nGo on with the code that started it, or start anew with another --output."
        )  # fmt: skip


def join(plan: StudyPlan, extend: bool) -> StudyPlan:
    """`plan` as it can be run in its folder: itself where the folder is new, or the study there, extended if asked.

    PlanError if the folder holds a study with other settings, or other values or seeds without `extend`. Groups of a
    grid join without it.
    """
    if not (plan.folder / "study.json").exists():
        return plan
    held = plan_from_folder(plan.folder, study=plan.study)
    check_storage(held, plan.storage)
    changes = differences(held, plan)
    if changes:
        raise PlanError(
            f"{plan.folder} holds this study with other settings:\n  " + "\n  ".join(changes) + "\n"
            "Type the same settings to go on with it, or another --output to start a new one."
        )
    # A value is the arm that it makes: 0.10 continues what was started as 0.1.
    held_as = {arm_config(held.study, held.base, value).config_hash(): value for value in held.values}
    asked = tuple(
        value if value in held.values else held_as.get(arm_config(plan.study, plan.base, value).config_hash(), value)
        for value in plan.values
    )
    values = (*held.values, *(value for value in asked if value not in held.values))
    seeds = tuple(sorted({*held.seeds, *plan.seeds}))
    if not extend:
        _check_same_arms(held, replace(plan, values=held.values if plan.study.axis.members else asked))
    joined = build_plan(plan.study, plan.preset, plan.preset_reason, plan.base, values, seeds, plan.output)
    return replace(joined, storage=plan.storage or held.storage)


def check_storage(held: StudyPlan, asked: str | None) -> None:
    """PlanError where a study that is `held` in a folder is asked to go on with another storage than it has."""
    if asked is None or (held.storage is not None and is_same(asked, held.storage)):
        return
    has = f"keeps its runs in {shown(held.storage, 1000)}" if held.storage else "was started without --storage"
    raise PlanError(
        f"The study in {held.folder} {has}: go on with `python -m tune_study resume {held.folder}`, or type another "
        f"--output to start or fetch one that uses {shown(asked, 1000)}."
    )


def differences(held: StudyPlan, plan: StudyPlan) -> list[str]:
    """`name: old -> new` for everything that differs and can change a row."""
    changes = [
        f"{name}: {old} -> {new}"
        for name, old, new in (("stop_rules", ", ".join(held.study.stop_rules), ", ".join(plan.study.stop_rules)),)
        if old != new
    ]
    changes += _changed(held.base, plan.base)
    return changes or _changed_arms(plan)


def _changed(old: StudyConfig, new: StudyConfig) -> list[str]:
    """Settings that differ between two configurations, if any of them can change a row."""
    if old.config_hash() == new.config_hash():
        return []
    before, after = (flat_settings(config.model_dump(mode="json")) for config in (old, new))
    return [f"{name}: {before[name]} -> {after[name]}" for name in after if before[name] != after[name]]


def _changed_arms(plan: StudyPlan) -> list[str]:
    """Settings of the folder's own runs that the study, as it is declared now, would give another value."""
    found = []
    for spec in plan.runs:
        path = plan.run_dir(spec.run_id) / "run.json"
        recorded = _object(path)
        if recorded is not None:
            try:
                held = type(spec.config).model_validate(recorded.get("config"))
            except ValidationError as error:
                raise PlanError(f"{path} is not one that this version reads: {explain(error)}") from None
            changes = _changed(held, spec.config)
            found += [f"{spec.run_id} {change}" for change in changes]
    return found


def _check_same_arms(held: StudyPlan, plan: StudyPlan) -> None:
    """PlanError where values or seeds differ."""
    option = plan.study.axis.option
    changes = []
    if set(held.values) != set(plan.values):
        old, new = (values_said(each.study, each.values) for each in (held, plan))
        changes.append(f"{option}: {old} -> {new}")
    if set(held.seeds) != set(plan.seeds):
        changes.append(f"--seeds: {len(held.seeds)} -> {len(plan.seeds)}")
    if changes:
        raise PlanError(
            f"{plan.folder} holds this study with other runs:\n  " + "\n  ".join(changes) + "\n"
            f"Type --extend to add the new ones to it, `python -m tune_study resume {plan.folder}` to go on with "
            f"those it has, or another --output."
        )

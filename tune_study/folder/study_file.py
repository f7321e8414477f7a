"""Read study.json of an existing study, and compare it with a study to be run in the same folder.

The same study is continued; another one is refused with a list of the differences.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from search_spaces.catalog import FAMILIES, STUDIES, get_declaration
from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.command_lines import format_command
from trainable.config.run_config import ConfigError, apply_overrides, format_validation_error
from trainable.config.setting_types import flatten_settings, format_value
from trainable.families import get_family
from trainable.files.json_values import DamagedFileError
from trainable.files.paths import UnsafePathError
from trainable.runs.stop_rules import RULES
from trainable.runs.study_record import RUN_FILE, STUDY_FILE, RunRecord, StudyRecord, find_record, read_record
from tune_study.folder.origin import NOTHING, check_outside_values, find_usable_storage, list_plan_values
from tune_study.plan.errors import PlanError
from tune_study.plan.fork import make_fork_study
from tune_study.plan.own_study import OwnStudy, check_recorded_files, explain_missing_file
from tune_study.plan.search import find_search_differences, make_point_study
from tune_study.plan.storage_uri import is_same_folder
from tune_study.plan.study_plan import StudyPlan, plan_runs, set_max_seeds, set_points
from tune_study.plan.typed_settings import find_study, format_values, is_same_number

NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})


def read_study(folder: Path) -> StudyRecord:
    """Read study.json of results/<run>. Raises PlanError if it is missing, damaged, or has an unknown family."""
    try:
        study = read_record(StudyRecord, folder)
    except DamagedFileError as error:
        raise PlanError(f"{error}.") from None
    except UnsafePathError:
        raise
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = "no study.json" if is_missing else f"study.json: {error.strerror}"
        example = f"as `{format_command('run')}` printed it"
        with suppress(PermissionError):
            paths = sorted(path.parent for name in ("*", "results/*") for path in folder.glob(f"{name}/{STUDY_FILE}"))
            # The path of a file or a folder of a study, such as its report.
            paths += [path for path in folder.parents if (path / STUDY_FILE).is_file()]
            example = f"such as {format_value(paths[0], 1000)}" if paths else example
        raise PlanError(
            f"{format_value(folder, 1000)} contains no study ({problem}): type the folder results/<run> of a study, "
            f"{example}."
        ) from None
    if study.family not in FAMILIES:
        raise PlanError(
            f"{folder}/study.json names the family {format_value(study.family)}, which this version cannot read. "
            f"It reads {', '.join(FAMILIES)}: install the version that wrote the study."
        )
    return study


def plan_from_folder(
    folder: Path,
    overrides: Mapping[str, object] = NO_OVERRIDES,
    study: Study | None = None,
    own_study: OwnStudy | None = None,
    allowed: frozenset[str] = NOTHING,
) -> StudyPlan:
    """Plan the study in results/<run> with the settings with which it was started.

    The folder cannot choose code: runs are trained as the study's declaration says, and no name in study.json is
    imported. Nor can it choose what is contacted or read outside of it (see `tune_study.folder.origin`). A storage that
    may not be used is left out of the plan.

    overrides: resource settings that change from now on, such as {"trainer.n_gpus_per_node": 2}. study: the
    declaration; None for `own_study`, or the study of the same name in `search_spaces`. own_study: the study in the
    file of --study. allowed: what this command allows the folder to name outside of it, each as SETTING=VALUE.

    Raises PlanError if the folder contains no study that this version can read, if `own_study` is missing or not the
    folder's study, and if the folder names something outside of it that may not be used.
    """
    folder = Path(os.path.abspath(folder))
    record = read_study(folder)
    study = study or _find_declaration(folder, record, own_study)
    check_recorded_files(folder, record.code)
    try:
        base = apply_overrides(study.family.config_class.model_validate(record.settings), overrides)
        # A study with variants is identified by its name and the setting that chooses the variant.
        if study.variants:
            study = find_study(study.name, str(flatten_settings(base.model_dump(mode="json"))[study.variant_setting]))
        declaration = study
        # The study continues with the rules of its start, even if the declaration has changed.
        if unknown := set(record.stop_rules) - {*RULES, *study.stop_rules}:
            raise PlanError(f"there is no stop rule {format_value(unknown.pop())}.")
        study = replace(study, stop_rules=record.stop_rules)
        if (forks := record.forks) is not None:
            if {*record.axis.values} - {*forks.steps} or {*record.seeds} - {entry.seed for entry in forks.parents}:
                raise PlanError("its arms and seeds do not match what it forks.")
            study = make_fork_study(study, forks, record.points)
        elif record.points:
            study = make_point_study(study, record.points)
        if record.confirms is not None:
            # The user may have chosen another arm for comparison than the study's baseline.
            study = replace(study, baseline=record.baseline or study.baseline)
        if record.preset not in study.family.presets:
            raise PlanError(f"there is no preset {format_value(record.preset)}.")
        plan = plan_runs(
            StudyPlan(
                study,
                record.preset,
                record.preset_reason,
                base,
                record.axis.values,
                record.seeds,
                folder,
                storage=find_usable_storage(folder, record.storage, allowed)[0],
                extra_seeds=record.extra_seeds,
                source=None if own_study is None else own_study.source,
                confirms=record.confirms,
                forks=forks,
                search=record.search,
                points=record.points,
                earlier_steps=record.earlier_steps,
            )
        )
        if own_study is not None and record.baseline not in ("", plan.baseline):
            raise PlanError(
                f"its baseline {format_value(record.baseline)} was declared before the runs, and "
                f"{format_value(own_study.source.path, 1000)} now declares {format_value(plan.study.baseline)}: "
                "restore it, or start a new study with another --output."
            )
        if record.max_seeds is not None:
            plan = set_max_seeds(plan, record.max_seeds)
        if {spec.run_id for spec in plan.runs} != {entry.run_id for entry in record.runs}:
            raise PlanError("its list of runs does not match its values and seeds.")
    except PlanError as error:
        raise PlanError(f"{folder}/study.json: {error}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):  # its message already says which setting to change
            raise
        problem = format_validation_error(error) if isinstance(error, ValidationError) else error
        raise PlanError(f"{folder}/study.json cannot be read by this version: {problem}") from None
    check_outside_values(plan, declaration, allowed)
    return plan


def _find_declaration(folder: Path, record: StudyRecord, own_study: OwnStudy | None) -> Study:
    """Find the declaration of the study in `folder`; see `plan_from_folder`."""
    name, entry = record.name, record.declaration
    if not get_family(record.family).trainable:
        raise PlanError(
            f"The runs in {folder} are of another trainer, so they cannot be continued here: "
            "`status`, `report`, `explain`, `alarms`, `replay-stoppers` and `compare` read them."
        )
    if entry is not None:
        if own_study is None:
            raise PlanError(explain_missing_file(folder, entry))
        if own_study.study.name != name:
            raise PlanError(
                f"{folder} contains the study {format_value(name)}, and {format_value(own_study.source.path, 1000)} "
                f"declares {own_study.study.name}: type --study with the file of {format_value(name)}."
            )
        return own_study.study
    if own_study is not None:
        raise PlanError(f"{folder} contains the study {format_value(name)}, which no file declares: leave --study out.")
    study = get_declaration(name)
    if study is None:
        raise PlanError(
            f"{folder} contains the study '{format_value(name)}', which is not one of {', '.join(STUDIES)}."
        )
    return study


def check_unchanged(plan: StudyPlan) -> None:
    """Raise PlanError if the study's current declaration gives the runs in its folder other settings."""
    if changes := _find_changed_arms(plan):
        change_lines = "\n  ".join(changes)
        raise PlanError(
            f"The declaration of study `{plan.study.name}` has changed since {plan.folder} was started:\n  "
            f"{change_lines}\n"
            f"Continue with the code that started it, or start a new study with another --output."
        )


def merge_with_folder(plan: StudyPlan, extend: bool, allowed: frozenset[str] = NOTHING) -> StudyPlan:
    """Merge `plan` with the study in its folder; return `plan` if the folder contains no study.

    extend: whether to add new values and seeds to the existing study. Groups of a grid are added in any case.
    allowed: see `plan_from_folder`; the values that `plan` names are always allowed.

    Raises PlanError if the folder contains a study with other settings, and without `extend` also for other values or
    seeds.
    """
    if not (plan.folder / STUDY_FILE).exists():
        return plan
    own_study = None if plan.source is None else OwnStudy(plan.study, plan.source)
    # The settings are compared below, so the declaration may be the current one.
    allowed |= list_plan_values(plan)
    study = None if own_study else plan.study
    existing = plan_from_folder(plan.folder, study=study, own_study=own_study, allowed=allowed)
    check_same_storage(plan.folder, plan.storage)
    check_storage_usable(existing)
    if plan.search is not None and existing.search is not None:
        plan = _continue_search(plan, existing)
    old_steps, steps = (version.base_config.trainer.total_training_steps for version in (existing, plan))
    # A search cannot be longer: its rungs, and the points after the first ones, depend on the steps.
    is_longer = old_steps < steps and plan.search is None
    if changes := find_differences(existing, plan, may_be_longer=extend and is_longer):
        advice = "Type the same settings to continue it, or another --output to start a new study."
        if is_longer and not extend and not find_differences(existing, plan, may_be_longer=True):
            advice = f"Add --extend to train its runs up to step {steps}, or another --output to start a new study."
        raise PlanError(
            f"{plan.folder} contains this study with other settings:\n  " + "\n  ".join(changes) + f"\n{advice}"
        )
    # 0.10 continues an arm that was started as 0.1.
    names = {
        value: next((known for known in existing.values if is_same_number(known, value)), value)
        for value in plan.values
    }
    requested_values = tuple(names.values())
    values = tuple(dict.fromkeys((*existing.values, *requested_values)))
    seeds = tuple(sorted({*existing.seeds, *plan.seeds}))
    requested_seeds = {names[value]: extra_seeds for value, extra_seeds in plan.extra_seeds.items()}
    if not extend:
        # A grid is meant to be run group by group, so further groups do not count as a difference.
        same_values = existing.values if plan.study.axis.value_groups else requested_values
        _check_same_arms(existing, replace(plan, values=same_values, extra_seeds=requested_seeds))
    extra_seeds = {value: (*existing.extra_seeds.get(value, ()), *requested_seeds.get(value, ())) for value in values}
    return replace(
        plan_runs(replace(plan, values=values, seeds=seeds, extra_seeds=extra_seeds)),
        storage=plan.storage or existing.storage,
        max_seeds=plan.max_seeds or existing.max_seeds,
        confirms=existing.confirms,
        earlier_steps=(*existing.earlier_steps, old_steps) if is_longer else existing.earlier_steps,
    )


def _continue_search(plan: StudyPlan, existing: StudyPlan) -> StudyPlan:
    """Add the points that the search in the folder has drawn to the plan of a search.

    Raises PlanError for another search than the folder's, and for fewer points than it has.
    """
    assert plan.search is not None
    assert existing.search is not None
    if changes := find_search_differences(existing.search, plan.search):
        raise PlanError(
            f"{plan.folder} contains a search with other options:\n  " + "\n  ".join(changes) + "\n"
            "Type the same options to continue it, or another --output to start a new search."
        )
    num_points = len(existing.points)
    if plan.search.num_points < num_points:
        raise PlanError(
            f"--trials {format_value(plan.search.num_points)} is less than the {num_points} points that {plan.folder} "
            f"has: type --trials {num_points} or more."
        )
    return set_points(plan, existing.points)


def check_same_storage(folder: Path, requested_uri: str | None) -> None:
    """Raise PlanError if the study in `folder` would continue with another storage than it has.

    requested_uri: the storage that was typed; None to keep the study's.
    """
    storage = read_study(folder).storage
    if requested_uri is None or (storage is not None and is_same_folder(requested_uri, storage)):
        return
    problem = f"keeps its runs in {format_value(storage, 1000)}" if storage else "was started without --storage"
    raise PlanError(
        f"The study in {folder} {problem}: continue it with `{format_command('resume', folder)}`, "
        f"or type another --output to start or fetch one that uses {format_value(requested_uri, 1000)}."
    )


def check_storage_usable(plan: StudyPlan) -> None:
    """Raise PlanError if the plan cannot continue because the storage in study.json may not be used."""
    if plan.storage is None and (problem := find_usable_storage(plan.folder, read_study(plan.folder).storage)[1]):
        raise PlanError(f"{format_value(plan.folder, 1000)} cannot be continued without its storage. {problem}")


def find_differences(existing: StudyPlan, plan: StudyPlan, *, may_be_longer: bool = False) -> list[str]:
    """List as `name: old -> new` every difference between two plans that can change a row.

    may_be_longer: ignore a different number of steps.
    """
    old_rules, new_rules = (", ".join(version.study.stop_rules) for version in (existing, plan))
    changes = [f"stop_rules: {old_rules} -> {new_rules}"] if old_rules != new_rules else []
    changes += _find_changed_settings(existing.base_config, plan.base_config, may_be_longer)
    # Even with equal base settings the arms may differ, if the declaration of the axis has changed.
    return changes or _find_changed_arms(plan, may_be_longer)


def _find_changed_settings(old: BaseRunConfig, new: BaseRunConfig, may_be_longer: bool) -> list[str]:
    """List the settings that differ as `name: old -> new`; empty if none of them can change a row."""
    # The hash leaves out settings that change no row, such as resources.
    if old.compute_hash() == new.compute_hash() or (may_be_longer and old.is_same_run(new)):
        return []
    old_settings, new_settings = (flatten_settings(config.model_dump(mode="json")) for config in (old, new))
    return [
        f"{name}: {old_settings[name]} -> {new_settings[name]}"
        for name in new_settings
        if old_settings[name] != new_settings[name]
    ]


def _find_changed_arms(plan: StudyPlan, may_be_longer: bool = False) -> list[str]:
    """List as `run name: old -> new` the settings to which the current declaration gives another value."""
    all_changes = []
    for spec in plan.runs:
        run_dir = plan.get_run_dir(spec.run_id)
        record = find_record(RunRecord, run_dir)
        if record is not None:  # without a readable run.json there is nothing to compare
            try:
                old_config = type(spec.config).model_validate(record.config)
            except ValidationError as error:
                raise PlanError(
                    f"{run_dir / RUN_FILE} cannot be read by this version: {format_validation_error(error)}"
                ) from None
            changes = _find_changed_settings(old_config, spec.config, may_be_longer)
            all_changes += [f"{spec.run_id} {change}" for change in changes]
    return all_changes


def _check_same_arms(existing: StudyPlan, plan: StudyPlan) -> None:
    """Raise PlanError if the two plans have different values or seeds."""
    option = plan.study.axis.option
    changes = []
    if set(existing.values) != set(plan.values):
        old, new = (format_values(version.study, version.values) for version in (existing, plan))
        changes.append(f"{option}: {old} -> {new}")
    if set(existing.seeds) != set(plan.seeds):
        changes.append(f"--seeds: {len(existing.seeds)} -> {len(plan.seeds)}")
    if plan.num_baseline_seeds > existing.num_baseline_seeds and plan.extra_seeds:
        changes.append(f"--baseline-seeds: {existing.num_baseline_seeds} -> {plan.num_baseline_seeds}")
    if changes:
        options = plan.resume_options
        raise PlanError(
            f"{plan.folder} contains this study with other runs:\n  " + "\n  ".join(changes) + "\n"
            f"Type --extend to add the new runs to it, `{format_command('resume', plan.folder, *options)}` to continue "
            f"the existing runs, or another --output."
        )

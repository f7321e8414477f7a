"""Read the files of the user whose parts a study names, before its runs are planned.

Only files are opened that were typed: in an option, in a study file that was typed, or in the call of `tune_study.run`.
A results folder records the texts, for reading and for a comparison. A path in a folder is shown and never opened.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import (
    OwnPartError,
    PartFile,
    PartName,
    find_registered_file,
    list_part_files,
    list_parts,
    parse_part_name,
    register_file,
)
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError
from tune_study.plan.source_file import format_changes, read_source

CODE_OPTION = "--code"
"""The option with which files of parts are typed where no setting names them."""


def load_typed_files(paths: Iterable[str]) -> None:
    """Read and execute files that were typed. Raise PlanError if one cannot be used, or if two have the same name."""
    _register([PartFile(path, read_source(path, "that has the parts of the study")) for path in dict.fromkeys(paths)])


def load_named_files(
    study: Study, study_path: str, values: Sequence[str] | None, preset: str, typed_values: Iterable[object]
) -> None:
    """Read and execute the files of all parts that the settings of a study name.

    Args:
        study: the declaration.
        study_path: path of the file that declares it, in whose folder relative paths of its settings start; empty
            for a study of this package, or one that was declared in Python.
        values: values of its axis, as they were typed; None for those of the preset.
        preset: the preset.
        typed_values: values of settings that were typed.

    Raises PlanError if a file cannot be used, or if two files have the same name: a configuration tells them apart by
    the name of the file alone.
    """
    typed_paths = [part.path for part in _find_names([*typed_values, *(values or ())])]
    arms = [study.axis.named_settings.get(value, value) for value in values or study.get_grid(preset)]
    declared_paths = [part.path for part in _find_names([study.make_preset_settings(preset), arms])]
    folder = Path(study_path).expanduser().parent
    load_typed_files([*typed_paths, *(str(folder / path) for path in declared_paths if path not in typed_paths)])


def _find_names(value: object) -> Iterator[PartName]:
    """All parts that are named in values of settings, which may be texts such as `[a.py:rule,b.py:rule]`."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _find_names(entry)
    elif isinstance(value, str):
        names = map(parse_part_name, re.split(r"[\[\],]\s*", value))
        yield from (name for name in names if name is not None)


def _register(files: Sequence[PartFile]) -> None:
    files_by_name: dict[str, PartFile] = {}
    for file in files:
        other_file = files_by_name.setdefault(file.name, file)
        if other_file.text != file.text:
            raise PlanError(
                f"{format_value(other_file.path, 1000)} and {format_value(file.path, 1000)} have the same name, which "
                "is how runs tell their parts apart: rename one of them."
            )
    for file in files:
        try:
            register_file(file)
        except OwnPartError as error:
            raise PlanError(str(error)) from None


def list_used_files(configs: Iterable[BaseRunConfig]) -> tuple[PartFile, ...]:
    """The files whose parts the configurations name, without repetition."""
    files = {(file.name, file.digest): file for config in configs for file in list_part_files(config)}
    return tuple(files.values())


def make_code_entry(files: Iterable[PartFile]) -> list[dict[str, str]]:
    """The record of files in study.json."""
    return [{"path": file.path, "sha256": file.sha256, "text": file.text} for file in files]


def check_recorded_files(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlanError unless the files with which a study was started were typed again, with the same texts.

    Parts decide what runs compute, so a study never continues with another text.

    entries: the record in study.json of `folder`.
    """
    for entry in entries:
        path = format_value(entry["path"], 1000)
        file = find_registered_file(Path(entry["path"]).name)
        if file is None:
            raise PlanError(
                f"The study in {folder} uses parts of the file {path}. A results folder never chooses code, so the "
                f"file has to be typed: add {CODE_OPTION} {path}, or its place on this machine."
            )
        if file.sha256 == entry["sha256"]:
            continue
        diff = format_changes(entry["text"], file.text)
        raise PlanError(
            f"{format_value(file.path, 1000)} has changed since {folder} was started:\n  {diff}\n"
            "It decides what the runs compute: restore the file, or start a new study with another --output."
        )


def check_parts(configs: Sequence[BaseRunConfig]) -> None:
    """Try each part of the user on a small example. Raise PlanError that names the part and what is wrong with it."""
    configs_by_part = {(setting, part): config for config in configs for setting, part in list_parts(config).items()}
    if not configs_by_part:
        return
    from trainable.part_checks import check_part  # imports torch

    for (setting, _), config in configs_by_part.items():
        try:
            check_part(config, setting)
        except OwnPartError as error:
            raise PlanError(str(error)) from None

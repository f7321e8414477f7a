"""Read the plug-in files that a study names, before its runs are planned.

Only typed files are opened: named by an option, by a typed study file, or in the call of `tune_study.run`. A results
folder records the texts, for reading and for comparison. A path in a folder is shown and never opened.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import (
    PartFile,
    PartName,
    find_registered_file,
    get_part,
    list_parts,
    parse_part_name,
    pin_values,
    register_file,
)
from trainable.config.setting_types import format_value
from trainable.runs.study_record import SourceFile
from tune_study.plan.errors import PlanError

GAME_SETTING = "env.name"
CODE_OPTION = "--code"
"""The option that names plug-in files where no setting does."""

MAX_SOURCE_BYTES = 1_000_000
MAX_DIFF_LINES = 40


def read_source(path_text: str, purpose: str) -> PartFile:
    """Read a Python file. Raises PlanError if it cannot be read or is not a text file.

    purpose: what the file is for, to follow "type the path of a Python file".
    """
    path, shown_path = Path(path_text).expanduser(), format_value(path_text, 1000)
    if not path.is_file():
        raise PlanError(f"There is no file {shown_path}: type the path of a Python file {purpose}.")
    try:
        content = path.read_bytes()
        if len(content) > MAX_SOURCE_BYTES:
            raise PlanError(f"{shown_path} has more than {MAX_SOURCE_BYTES} bytes: type the path of a file {purpose}.")
        return PartFile(path_text, content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{shown_path} cannot be read ({error}): type the path of a Python file.") from None


def refuse_change(folder: Path, recorded_text: str, file: PartFile, advice: str) -> NoReturn:
    """Raise PlanError with the lines in which a file differs from its text when the study in `folder` was started."""
    old_lines, new_lines = recorded_text.splitlines(), file.text.splitlines()
    names = ("when the study was started", "now")
    lines = list(difflib.unified_diff(old_lines, new_lines, *names, lineterm="", n=1))
    diff = "\n  ".join(lines[:MAX_DIFF_LINES] + ["..."] * (len(lines) > MAX_DIFF_LINES))
    raise PlanError(f"{format_value(file.path, 1000)} has changed since {folder} was started:\n  {diff}\n{advice}")


def load_typed_files(paths: Iterable[str]) -> None:
    """Read and execute typed files.

    Raises PlanError if one cannot be read or if two have the same name, and OwnPartError if one cannot be executed.
    """
    files_by_name: dict[str, PartFile] = {}
    for file in [read_source(path, "that has the parts of the study") for path in dict.fromkeys(paths)]:
        other_file = files_by_name.setdefault(file.name, file)
        if other_file.text != file.text:
            raise PlanError(
                f"{format_value(other_file.path, 1000)} and {format_value(file.path, 1000)} have the same name, which "
                "is how runs tell their parts apart: rename one of them."
            )
    for file in files_by_name.values():
        register_file(file)


def load_named_files(
    study: Study, study_path: str, values: Sequence[str] | None, preset: str, typed_values: Iterable[object]
) -> None:
    """Read and execute the plug-in files that the settings of a study name.

    study_path: path of the file that declares it, to whose folder paths in its settings are relative; empty for a study
    that no file declares. values: values of its axis, as they were typed; None for all of the preset. typed_values:
    values of settings that were typed. Raises the errors of `load_typed_files`.
    """
    named_settings = study.axis.named_settings
    # The name of an arm may look like a plug-in, but is not one.
    typed_arms = [value for value in values or () if value not in named_settings]
    typed_paths = [part.path for part in _find_names([*typed_values, *typed_arms])]
    arms = [named_settings.get(value, value) for value in values or study.get_grid(preset)]
    declared_arms = [arm for arm in arms if arm not in typed_arms]
    declared_settings = [study.make_preset_settings(preset), study.smoke_settings, declared_arms]
    folder = Path(study_path).expanduser().parent
    load_typed_files([*typed_paths, *(str(folder / part.path) for part in _find_names(declared_settings))])


def pin_typed_values(values: Mapping[str, object]) -> dict[str, object]:
    """Read the plug-in files that typed values of settings name, and add each file's hash to the plug-in's name.

    Raises the errors of `load_typed_files`.
    """
    load_typed_files(part.path for part in _find_names(values))
    return {name: pin_values(value) for name, value in values.items()}


def load_game_settings(name: str) -> dict[str, object]:
    """Read the file of a plug-in game, and return the settings that come with it: its attribute `settings`.

    name: the game as it was typed, FILE.py:NAME. A game without the attribute has no settings. Raises PlanError or
    OwnPartError if the file or the game cannot be used.
    """
    part = parse_part_name(name)
    assert part is not None
    load_typed_files([part.path])
    game = get_part(part._replace(path=part.file_name).format())
    try:
        settings = getattr(game() if callable(game) else game, "settings", {})
    except Exception:  # the check of the game reports the error
        settings = {}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise PlanError(
            f"{format_value(name, 1000)} has an attribute `settings` that is no mapping of settings to values, such as "
            '{"env.max_turn": 1}: correct it, or give it another name.'
        )
    return dict(settings)


def _find_names(value: object) -> Iterator[PartName]:
    """Yield all plug-ins that values of settings name; values may be texts such as `[a.py:rule,b.py:rule]`."""
    if isinstance(value, str):
        texts = re.split(r"[\[\],'\"\s]+", value) if value.startswith("[") else [value]
        yield from filter(None, map(parse_part_name, texts))
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _find_names(entry)


def check_recorded_files(folder: Path, entries: Sequence[SourceFile]) -> None:
    """Raise PlanError unless the files in a study's record were typed again, with the same texts.

    Plug-ins decide what runs compute, so a study never continues with another text.
    """
    files = {entry.path: find_registered_file(Path(entry.path).name) for entry in entries}
    if missing_paths := [format_value(path, 1000) for path, file in files.items() if file is None]:
        options = " ".join(f"{CODE_OPTION} {path}" for path in missing_paths)
        raise PlanError(
            f"The study in {folder} uses parts of {' and '.join(missing_paths)}. For safety, no file that a folder "
            f"names is executed: name them yourself with {options}, where they are here."
        )
    advice = (
        "It decides what the runs compute, and even a comment counts: restore the file, or start a new study with "
        "another --output. (--accept-changed-file is for the file of a study.)"
    )
    for entry in entries:
        file = files[entry.path]
        if file is not None and file.sha256 != entry.sha256:
            refuse_change(folder, entry.text, file, advice)


def check_parts(configs: Sequence[BaseRunConfig]) -> None:
    """Try each plug-in on a small example. Raises OwnPartError that names the plug-in and what is wrong with it."""
    # A reward is tried on each game's levels.
    configs_by_part = {
        (setting, part, parts.get(GAME_SETTING)): config
        for config in configs
        for parts in [list_parts(config)]
        for setting, part in parts.items()
    }
    if not configs_by_part:
        return
    from trainable.part_checks import check_part  # imports torch

    # Games first, since other plug-ins are tried with them.
    for (setting, _, _), config in sorted(configs_by_part.items(), key=lambda entry: entry[0][0] != GAME_SETTING):
        check_part(config, setting)

"""Write, load and compare a user's files: studies and plug-ins, before runs are planned.

Only typed files are opened and executed: named by an option, by a typed study file, or in the call of `tune_study.run`.
A results folder records the texts, for reading and for comparison. A path in a folder is shown and never opened.
"""

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Study, make_grid_axis
from search_spaces.language_model.family import PPO
from trainable.config.base_config import BaseRunConfig
from trainable.config.command_lines import format_command
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
from trainable.config.run_config import RunConfig, apply_overrides, resolve_key
from trainable.config.schedules import split_values
from trainable.config.setting_types import format_value
from trainable.runs.study_record import SourceFile
from tune_study.plan.errors import PlanError
from tune_study.plan.typed_settings import check_varied

NEW_COMMAND = format_command("new", "NAME", "--vary", "actor.lr=1e-4,3e-4")
"""An example of the command that writes the file of a study."""

VARIABLE = "STUDY"
"""The variable of a file that holds its study."""

GAME_SETTING = "env.name"
CODE_OPTION = "--code"
"""The option that names plug-in files where no setting does."""

MAX_DIFF_LINES = 40

PRESETS = tuple(name for name, preset in PPO.presets.items() if not preset.variant_of)

_FILE = '''"""{question}"""

from search_spaces.declaration.study import {imports}
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO

{constants}STUDY = Study(
    name="{name}",  # names the folder of the results
    family=PPO,  # fine-tunes a language model, with any setting of `python -m tune_study settings --all`
    question=__doc__,  # stands above the report
    # The arms. `{option}` of the command line chooses {choice}.
    axis={axis},
    # Settings of all arms, as --set takes them; the preset has the others.
    fixed_settings=PLAIN_SETTINGS,
    baseline={baseline},  # the arm that the others are compared with{contrasts}
)
'''
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""The name of a study: lower-case words joined by hyphens, since it names folders."""


class OwnStudy(NamedTuple):
    """A study from a user's file or from Python, and that file, whose path is empty if it was declared in Python."""

    study: Study
    source: PartFile


def load_own_study(typed: str) -> OwnStudy:
    """Execute the Python file that was typed, and return its study.

    Raises PlanError if there is no such file or if it declares no usable study, and OwnPartError if it cannot be
    executed.
    """
    file = read_source(typed, f"that declares a study, such as one that `{NEW_COMMAND}` writes")
    study = getattr(register_file(file), VARIABLE, None)
    if not isinstance(study, Study):
        path = format_value(typed, 1000)
        raise PlanError(f"{path} has no Study called {VARIABLE}: `{NEW_COMMAND}` writes a file that has one.")
    check_study(study, typed)
    return OwnStudy(study, file)


def load_typed_code(study: str | None, code_paths: Sequence[str] | None) -> OwnStudy | None:
    """Execute the files of --study and --code to continue a study; return the study, None without --study."""
    own_study = None if study is None else load_own_study(study)
    load_typed_files(code_paths or ())  # may replace the file of the study, which may have plug-ins as well
    return own_study


def list_resume_options(path: str | None, code_paths: Iterable[str] = ()) -> tuple[str, ...]:
    """List what `resume` needs besides the folder.

    path: where the study is declared; None or empty if it is in no file. code_paths: its plug-in files. A file that is
    typed with --study is not repeated.
    """
    other_paths = [code_path for code_path in code_paths if code_path != path]
    study_options = ("--study", path) if path else ()
    return (*study_options, *(word for code_path in other_paths for word in (CODE_OPTION, code_path)))


def explain_missing_file(folder: Path, entry: SourceFile) -> str:
    """Explain how to continue a study from a user's file or from Python. The file is named, and not opened."""
    if not entry.path:
        return (
            f"The study in {folder} was declared in Python, and a results folder never chooses code: call "
            f"tune_study.run again with the same Study and output."
        )
    path = format_value(entry.path, 1000)
    return (
        f"The study in {folder} was declared in the file {path}. For safety, no file that a folder "
        f"names is executed: name it yourself with --study {path} (in Python, study={path!r}), where it is here."
    )


def check_study(study: Study, path_text: str) -> None:
    """Raise PlanError for an unusable declaration: an unusable or taken name, or no axis values.

    path_text: where the study is declared, for the message.
    """
    path = format_value(path_text, 1000)
    _check_name(study.name, f"set another name= in {path}")
    unknown_presets = study.axis.grids.keys() - study.family.presets.keys()
    if unknown_presets or not any(study.axis.grids.values()):
        raise PlanError(
            f"The axis of study {study.name} in {path} needs values under one of the presets "
            f"{', '.join(study.family.presets)}: set grids= in the file."
        )


def _check_name(name: str, remedy: str) -> None:
    """Raise PlanError if a study of a user may not have this name. remedy: how to give it another one."""
    is_taken = name in STUDIES or name in SUITES
    if is_taken or not _NAME.fullmatch(name):
        problem = "is a study of this package" if is_taken else "is no name of a study"
        raise PlanError(f"{format_value(name)} {problem}: {remedy}, of lower-case words joined by hyphens, like my-lr.")


def read_source(path_text: str, purpose: str) -> PartFile:
    """Read a Python file. Raises PlanError if it cannot be read or is not a text file.

    purpose: what the file is for, to follow "type the path of a Python file".
    """
    path, shown_path = Path(path_text).expanduser(), format_value(path_text, 1000)
    if not path.is_file():
        raise PlanError(f"There is no file {shown_path}: type the path of a Python file {purpose}.")
    try:
        return PartFile(path_text, path.read_bytes().decode())  # bytes, since the hash is of the file as it is
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{shown_path} cannot be read ({error}): type the path of a Python file.") from None


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
    for entry in entries:
        file = files[entry.path]
        if file is not None and file.sha256 != entry.sha256:
            names = ("when the study was started", "now")
            old_lines, new_lines = entry.text.splitlines(), file.text.splitlines()
            lines = list(difflib.unified_diff(old_lines, new_lines, *names, lineterm="", n=1))
            diff = "\n  ".join(lines[:MAX_DIFF_LINES] + ["..."] * (len(lines) > MAX_DIFF_LINES))
            raise PlanError(
                f"{format_value(file.path, 1000)} has changed since {folder} was started:\n  {diff}\nIt decides what "
                "the runs compute, and even a comment counts: restore the file, or start a new study with another "
                "--output."
            )


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


def parse_factors(assignments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of each --vary KEY=VALUE,VALUE,..., by setting, as they were typed.

    Raises PlanError or ConfigError if a setting or a value does not exist or is given twice.
    """
    if not assignments:
        raise PlanError("A study varies at least one setting: type --vary KEY=VALUES, like --vary actor.lr=1e-4,3e-4.")
    factors: dict[str, tuple[str, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        values = split_values(text)
        if len(values) < 2 or not all(values):
            raise PlanError(
                f"--vary {format_value(assignment)} does not have two values or more: type --vary KEY=VALUE,VALUE, "
                "like --vary actor.lr=1e-4,3e-4,1e-3."
            )
        setting = resolve_key(key.strip(), RunConfig)
        if setting == "seed":
            raise PlanError("Seeds are no axis: type --seeds N when you run the study.")
        duplicates = [f"the value {value}" for number, value in enumerate(values) if value in values[:number]]
        if twice := [f"the setting {setting}"] if setting in factors else duplicates:
            raise PlanError(f"--vary has {format_value(twice[0])} twice: give it once.")
        factors[setting] = values
    base = apply_overrides(RunConfig(), PPO.presets["laptop"].settings)
    for arm in itertools.product(*factors.values()):
        check_varied(base, dict(zip(factors, arm, strict=True)))
    return factors


def format_study(name: str, factors: Mapping[str, tuple[str, ...]]) -> str:
    """Format a file that declares the study `name` over the values of each setting in `factors`."""
    grids = {setting: f"({', '.join(map(json.dumps, values))})" for setting, values in factors.items()}
    fields = {"name": name, "constants": "", "contrasts": "", "option": "--values", "choice": "others"}
    if len(factors) == 1:
        ((setting, grid),) = grids.items()
        presets = ", ".join(f"{json.dumps(preset)}: {grid}" for preset in PRESETS)
        fields["axis"] = f"Axis({json.dumps(setting)}, {{{presets}}})"
        fields["question"] = f"Does {setting} change the success of the policy?"
        fields["imports"], baseline = "Axis, Study", factors[setting][0]
    else:
        lines = "".join(f"\n    {json.dumps(key)}: {grid}," for key, grid in grids.items())
        fields["constants"] = f"FACTORS = {{{lines}\n}}\n\n"
        fields["axis"] = "make_grid_axis(FACTORS)"
        fields["contrasts"] = (
            "\n    contrasts=make_grid_contrasts(FACTORS),  # main effects"
            "\n    interactions=make_grid_interactions(FACTORS),"
        )
        fields["option"], fields["choice"] = "--arms", "some of them"
        fields["question"] = f"How do {' and '.join(factors)} change the success of the policy?"
        fields["imports"] = "Study, make_grid_axis, make_grid_contrasts, make_grid_interactions"
        baseline = make_grid_axis(factors).grids[PRESETS[0]][0]
    return _FILE.format(**fields, baseline=json.dumps(baseline))


def write_study_file(
    name: str, assignments: Sequence[str], path: Path | None, command: str | None = None, logs: Path | None = None
) -> tuple[Path, str]:
    """Write the file of a new study; return its path and the command that runs it.

    path: the file; None for NAME.py in the current folder. command, logs: of a study whose trials are a command, see
    `format_command_study`. Raises PlanError if the name is taken or the file exists.
    """
    _check_name(name, "type another one")
    if command is None:
        text = format_study(name, parse_factors(assignments))
    else:
        from tune_study.plan.new_command import format_command_study  # imports NumPy

        text = format_command_study(name, command, assignments, logs)
    path = path or Path(f"{name.replace('-', '_')}.py")
    if path.suffix != ".py":
        raise PlanError(f"--to {format_value(str(path), 1000)} does not end in .py: type the name of a Python file.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PlanError(
            f"{format_value(str(path), 1000)} exists and is left unchanged: type --to with another file."
        ) from None
    except OSError as error:
        raise PlanError(f"{format_value(str(path), 1000)} cannot be written: {error.strerror}.") from None
    return path, format_command("run", path)

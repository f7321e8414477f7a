"""Load studies that are declared in a user's file.

Only a file whose path was typed is executed. A results folder records the text of the file, for reading and for
comparison; a path in a folder is shown and never opened.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.command_lines import format_command
from trainable.config.own_parts import PartFile, register_file
from trainable.config.setting_types import format_value
from trainable.files.control_characters import LINE_CHARACTERS, is_printable
from trainable.runs.study_record import SourceFile
from tune_study.plan.errors import PlanError
from tune_study.plan.own_parts import CODE_OPTION, load_typed_files, read_source, refuse_change

NEW_COMMAND = format_command("new", "NAME", "--vary", "actor.lr=1e-4,3e-4")
"""An example of the command that writes the file of a study."""

DEFAULT_NAME = "STUDY"
"""The variable of a file that holds its study, unless another one is typed after a colon."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class StudySource(NamedTuple):
    """Where the declaration of a study comes from."""

    typed: str
    """The path of its file, maybe with a variable, as it was typed; empty for a study that was declared in Python."""
    text: str
    """The content of the file."""
    accepts_change: bool = False
    """Whether a study that was started with another text may continue."""

    @property
    def path(self) -> str:
        """The path of the file; empty for a study that was declared in Python."""
        return _split_path(self.typed)[0]

    @property
    def record(self) -> SourceFile:
        """The record in study.json."""
        return SourceFile(self.typed, PartFile(self.typed, self.text).sha256, self.text)


class OwnStudy(NamedTuple):
    """A study from a user's file or from Python, and where its declaration comes from."""

    study: Study
    source: StudySource


def is_study_file(name: str) -> bool:
    """Check whether the name of a study is the path of a Python file, with or without a variable after a colon."""
    return _split_path(name)[0].endswith(".py")


def load_own_study(typed: str, accepts_change: bool = False) -> OwnStudy:
    """Execute the Python file that was typed, maybe with a variable after a colon, and return its study.

    accepts_change: see `StudySource`. Raises PlanError if there is no such file or if it declares no usable study, and
    OwnPartError if it cannot be executed.
    """
    path_text, variable = _split_path(typed)
    file = read_source(path_text, f"that declares a study, such as one that `{NEW_COMMAND}` writes")
    module = register_file(file)
    study = getattr(module, variable, None)
    if not isinstance(study, Study):
        names = [name for name, value in vars(module).items() if isinstance(value, Study)]
        new_command = format_command("new", "NAME")
        advice = f"type {path_text}:{names[0]}" if names else f"`{new_command}` writes a file that has one"
        raise PlanError(f"{format_value(path_text, 1000)} has no Study called {format_value(variable)}: {advice}.")
    check_study(study, path_text)
    return OwnStudy(study, StudySource(typed, file.text, accepts_change))


def load_typed_code(
    study: str | None, code_paths: Sequence[str] | None, accepts_change: bool = False
) -> OwnStudy | None:
    """Execute the files of --study and --code to continue a study; return the study, None without --study."""
    own_study = None if study is None else load_own_study(study, accepts_change)
    load_typed_files(code_paths or ())  # may replace the file of the study, which may have plug-ins as well
    return own_study


def list_resume_options(path: str | None, code_paths: Iterable[str] = ()) -> tuple[str, ...]:
    """List what `resume` needs besides the folder.

    path: where the study is declared; None or empty if it is in no file. code_paths: its plug-in files. A file that is
    typed with --study is not repeated.
    """
    other_paths = [code_path for code_path in code_paths if not path or code_path != _split_path(path)[0]]
    study_options = ("--study", path) if path else ()
    return (*study_options, *(word for code_path in other_paths for word in (CODE_OPTION, code_path)))


def check_same_source(folder: Path, entry: SourceFile, source: StudySource) -> None:
    """Raise PlanError, with the lines that differ, if the study was started with another text of its file.

    entry: the declaration in study.json of `folder`.
    """
    if source.record.sha256 != entry.sha256 and not source.accepts_change:
        advice = (
            "Restore the file, start a new study with another --output, or type --accept-changed-file to continue with "
            "the changed file, which is recorded. The settings of runs that have started cannot change."
        )
        refuse_change(folder, entry.text, PartFile(source.typed, source.text), advice)


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


def _split_path(typed: str) -> tuple[str, str]:
    """Split what was typed into path and variable."""
    path, colon, variable = typed.rpartition(":")
    return (path, variable) if colon and path.endswith(".py") else (typed, DEFAULT_NAME)


def is_study_name(name: str) -> bool:
    """Check whether a study may have this name: lower-case words joined by hyphens, since it names folders."""
    return _NAME.fullmatch(name) is not None


def check_study(study: Study, path_text: str) -> None:
    """Raise PlanError for an unusable declaration: an unusable or taken name, unprintable texts, or no axis values.

    path_text: where the study is declared, for the message.
    """
    path = format_value(path_text, 1000)
    if not is_study_name(study.name):
        raise PlanError(
            f"The study of {path} is called {format_value(study.name)}: a name has lower-case words joined by hyphens, "
            f"like my-study. Set name= in the file."
        )
    if study.name in STUDIES or study.name in SUITES:
        raise PlanError(
            f"The study of {path} is called {study.name}, like a study of this package: set another name= in the file."
        )
    texts = (study.question, study.axis.setting, *study.contrasts, *study.interactions)
    if hidden_texts := [text for text in texts if not is_printable(text, LINE_CHARACTERS)]:
        raise PlanError(
            f"Study {study.name} in {path} has the text {format_value(hidden_texts[0])}, which contains a character "
            "that cannot be shown: a question, or the name of a contrast, has letters, digits, spaces and signs."
        )
    unknown_presets = study.axis.grids.keys() - study.family.presets.keys()
    if unknown_presets or not any(study.axis.grids.values()):
        raise PlanError(
            f"The axis of study {study.name} in {path} needs values under one of the presets "
            f"{', '.join(study.family.presets)}: set grids= in the file."
        )

"""Studies that are declared in a file of the user.

Only a file whose path was typed is executed. A results folder records the text of the file, for reading and for a
comparison; a path in a folder is shown and never opened.
"""

import difflib
import hashlib
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from search_spaces import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError

DEFAULT_NAME = "STUDY"
"""The variable of a file that has its study, unless another one is typed after a colon."""

MAX_BYTES = 1_000_000
MAX_DIFF_LINES = 40
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class StudySource(NamedTuple):
    """Where the declaration of a study comes from.

    typed: the path as it was typed. text: the content of the file. sha256: of that text. accepts_change: whether a
    study may continue that was started with another text.
    """

    typed: str
    text: str
    sha256: str
    accepts_change: bool = False

    def make_entry(self) -> dict[str, Any]:
        """The record in study.json."""
        return {"path": self.typed, "sha256": self.sha256, "text": self.text}


class OwnStudy(NamedTuple):
    """A study of the user, and where its declaration comes from."""

    study: Study
    source: StudySource


def is_study_file(name: str) -> bool:
    """Whether the name of a study is the path of a Python file, with or without the variable after a colon."""
    return _split_path(name)[0].endswith(".py")


def load_own_study(typed: str, accepts_change: bool = False) -> OwnStudy:
    """Execute the Python file that was typed, and return the study that it declares.

    typed: the path of the file, or path:VARIABLE; without a variable it is STUDY. accepts_change: see `StudySource`.
    Raises PlanError if there is no such file, if it cannot be executed, or if it declares no usable study.
    """
    path_text, variable = _split_path(typed)
    text = _read_text(path_text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    module = _execute(path_text, text, sha256)
    study = getattr(module, variable, None)
    if not isinstance(study, Study):
        names = [name for name, value in vars(module).items() if isinstance(value, Study)]
        advice = f"`{format_command('new', 'NAME')}` writes a file that has one"
        if names:
            advice = f"type {path_text}:{names[0]}"
        raise PlanError(f"{format_value(path_text, 1000)} has no Study called {format_value(variable)}: {advice}.")
    check_study(study, path_text)
    return OwnStudy(study, StudySource(typed, text, sha256, accepts_change))


def list_resume_options(path: str | None) -> tuple[str, ...]:
    """What `resume` needs besides the folder. path: where the study is declared; None or empty if it is in no file."""
    return ("--study", path) if path else ()


def check_same_source(folder: Path, entry: Mapping[str, Any], source: StudySource) -> None:
    """Raise PlanError, with the lines that differ, if a study was started with another text of its file.

    entry: the declaration in study.json of `folder`.
    """
    if source.sha256 == entry["sha256"] or source.accepts_change:
        return
    lines = list(
        difflib.unified_diff(
            entry["text"].splitlines(), source.text.splitlines(), "when the study was started", "now", lineterm="", n=1
        )
    )
    shown_lines = lines[:MAX_DIFF_LINES] + ["..."] * (len(lines) > MAX_DIFF_LINES)
    diff = "\n  ".join(shown_lines)
    raise PlanError(
        f"{format_value(source.typed, 1000)} has changed since {folder} was started:\n  {diff}\n"
        "Restore the file, start a new study with another --output, or type --accept-changed-file to go on with the "
        "changed file, which is recorded. The settings of runs that have started cannot change."
    )


def explain_missing_file(folder: Path, entry: Mapping[str, Any]) -> str:
    """What to do to continue a study of the user. Its file is named, and not opened."""
    if not entry["path"]:
        return (
            f"The study in {folder} was declared in Python, and a results folder never chooses code: call "
            f"tune_study.run again with the same Study and output."
        )
    path = format_value(entry["path"], 1000)
    return (
        f"The study in {folder} was declared in the file {path}. A results folder never chooses code, so the file "
        f"has to be typed: add --study {path}, or its place on this machine."
    )


def _split_path(typed: str) -> tuple[str, str]:
    """Path and variable of what was typed."""
    path, colon, variable = typed.rpartition(":")
    return (path, variable) if colon and path.endswith(".py") else (typed, DEFAULT_NAME)


def _read_text(path_text: str) -> str:
    path = Path(path_text).expanduser()
    shown_path = format_value(path_text, 1000)
    if not path.is_file():
        raise PlanError(
            f"There is no file {shown_path}: type the path of a Python file that declares a study; "
            f"`{format_command('new', 'NAME', '--vary', 'actor.lr=1e-4,3e-4')}` writes one."
        )
    try:
        content = path.read_bytes()
        if len(content) > MAX_BYTES:
            raise PlanError(f"{shown_path} has more than {MAX_BYTES} bytes: type the path of a file that is a study.")
        return content.decode()
    except UnicodeDecodeError:
        raise PlanError(f"{shown_path} is not a text in UTF-8: type the path of a Python file.") from None
    except OSError as error:
        raise PlanError(f"{shown_path} cannot be read: {error.strerror}.") from None


def _execute(path_text: str, text: str, sha256: str) -> ModuleType:
    """The module of the text. Raise PlanError with the line at which it fails."""
    module = ModuleType(f"own_study_{sha256[:16]}")
    module.__file__ = path_text
    sys.modules[module.__name__] = module  # dataclasses look their own module up
    try:
        exec(compile(text, path_text, "exec"), module.__dict__)
    except SyntaxError as error:
        raise PlanError(
            f"{format_value(path_text, 1000)} is not Python: {error.msg} in line {error.lineno}. Correct the file."
        ) from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path_text]
        place = f" in line {lines[-1]}" if lines else ""
        raise PlanError(
            f"{format_value(path_text, 1000)} cannot be executed: {type(error).__name__}{place}: "
            f"{format_value(str(error), 500)}. Correct the file."
        ) from None
    return module


def is_study_name(name: str) -> bool:
    """Whether a study may have this name: lower-case words joined by hyphens, since folders are named after it."""
    return _NAME.fullmatch(name) is not None


def check_study(study: Study, path_text: str) -> None:
    """Raise PlanError for a name that a folder cannot have or that is taken, and for an axis without values.

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
    unknown_presets = study.axis.grids.keys() - study.family.presets.keys()
    if unknown_presets or not any(study.axis.grids.values()):
        raise PlanError(
            f"The axis of study {study.name} in {path} needs values under one of the presets "
            f"{', '.join(study.family.presets)}: set grids= in the file."
        )

"""Plug-ins: your own functions and games, which a setting names as FILE.py:NAME.

A file is executed only if a user typed its path. A configuration names plug-ins with a digest of the file's text,
FILE.py:NAME#DIGEST, so that runs with a changed file have another hash. Processes look plug-ins up by this digest:
each process of a run gets the texts, and executes them before it makes anything from the configuration.
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

from trainable.config.base_config import BaseRunConfig
from trainable.config.setting_types import format_value

C = TypeVar("C", bound=BaseRunConfig)

PART_FORM = "FILE.py:NAME"
"""How a setting names a plug-in, for messages."""
MAX_NAME_LENGTH = 1024
_MODULE_PREFIX = "own_parts_"
"""Prefix of the module names of plug-in files."""
_PART_NAME = re.compile(r"(?P<path>[^#:]*\.py):(?P<name>[A-Za-z_]\w*)(?:#(?P<digest>[0-9a-f]{16}))?", re.ASCII)


class OwnPartError(ValueError):
    """Raised if a plug-in or its file cannot be used. The message says why, and what to change."""


class PartName(NamedTuple):
    """The name of a plug-in in a setting: path of its file, variable, and digest of the text (empty if not pinned)."""

    path: str
    name: str
    digest: str = ""

    @property
    def file_name(self) -> str:
        """The file's name without its folder. Configurations contain only this, so that files can be moved."""
        return PurePath(self.path).name

    def format(self) -> str:
        """Format the name as in a setting."""
        return f"{self.path}:{self.name}#{self.digest}" if self.digest else f"{self.path}:{self.name}"


def parse_part_name(value: object) -> PartName | None:
    """Parse the value of a setting as the name of a plug-in, or return None if it is none.

    >>> parse_part_name("parts/clip.py:soft_clip")
    PartName(path='parts/clip.py', name='soft_clip', digest='')
    >>> parse_part_name("ppo_clip") is None
    True
    """
    match = _PART_NAME.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else PartName(match["path"], match["name"], match["digest"] or "")


def shorten_part_name(value: str) -> str:
    """Drop file and digest from the name of a plug-in, for file names. Return other values unchanged."""
    part = parse_part_name(value)
    return value if part is None else part.name


@dataclass(frozen=True)
class Choice:
    """Validate a setting that is one of `names` or the name of a plug-in.

    The type of such a setting is Annotated[str, AfterValidator(Choice(names))].
    """

    names: tuple[str, ...]

    def __call__(self, value: str) -> str:
        """Return `value` if it is allowed. Otherwise raise ValueError with what is allowed."""
        if value in self.names or (parse_part_name(value) is not None and len(value) <= MAX_NAME_LENGTH):
            return value
        names = f"{', '.join(map(repr, self.names))} or " if self.names else ""
        raise ValueError(f"must be {names}a part of yours, {PART_FORM}")


class PartFile(NamedTuple):
    """A file with plug-ins. path: as it was typed. text: its content."""

    path: str
    text: str

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return PurePath(self.path).name

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of the text, in hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the hash, as they appear in configurations."""
        return self.sha256[:16]


class _LoadedFile(NamedTuple):
    """A file that this process has executed."""

    file: PartFile
    module: ModuleType


_loaded_files: dict[tuple[str, str], _LoadedFile] = {}
"""The files that this process has executed, by name and digest."""
_newest_digests: dict[str, str] = {}
"""The digest of the text that was registered last, by file name."""


def execute_text(text: str, path: str, module_name: str) -> ModuleType:
    """Execute the text of a Python file as a module. Raise OwnPartError, with the line, if it fails."""
    module = ModuleType(module_name)
    module.__file__ = path
    sys.modules[module_name] = module  # dataclasses look their own module up
    shown_path = format_value(path, 1000)
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except SyntaxError as error:
        raise OwnPartError(
            f"{shown_path} is not Python: {error.msg} in line {error.lineno}. Correct the file."
        ) from None
    except (Exception, SystemExit) as error:
        raise OwnPartError(
            f"{shown_path} cannot be executed: {describe_error(error, path)}. Correct the file."
        ) from None
    return module


def describe_error(error: BaseException, path: str) -> str:
    """Describe an error that was raised in the plug-in file `path`: its class, line and message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {format_value(str(error), 500)}"


def find_place(error: BaseException) -> str:
    """Find the innermost line of a plug-in in the traceback of an error, such as "my_loss.py, line 12".

    Empty if no plug-in was involved.
    """
    places = [
        f"{PurePath(frame.f_code.co_filename).name}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(_MODULE_PREFIX)
    ]
    return places[-1] if places else ""


def register_file(file: PartFile) -> None:
    """Execute a file, so that its plug-ins can be used in this process. Each text is executed only once.

    Raises OwnPartError if the file cannot be executed.
    """
    key = (file.name, file.digest)
    if key not in _loaded_files:
        module_name = f"{_MODULE_PREFIX}{PurePath(file.name).stem}_{file.digest}"
        _loaded_files[key] = _LoadedFile(file, execute_text(file.text, file.path, module_name))
    _newest_digests[file.name] = file.digest


def find_registered_file(name: str) -> PartFile | None:
    """Find the file of this name that was registered last, if any."""
    digest = _newest_digests.get(name)
    return None if digest is None else _loaded_files[name, digest].file


def get_part(value: str) -> Any:
    """Look up the function, class or object that the value of a setting names.

    Raises OwnPartError if its file was not registered, if the file does not define the name, or if it only imports it,
    since the digest would not cover the imported text.
    """
    part = parse_part_name(value)
    if part is None:
        raise OwnPartError(f"{format_value(value)} names no part: type {PART_FORM}.")
    module = _find_loaded_file(part).module
    try:
        own_part = getattr(module, part.name)
    except AttributeError:
        raise OwnPartError(
            f"{format_value(part.path, 1000)} has no {part.name}: define it, or name something that the file has."
        ) from None
    is_definition = isinstance(own_part, type | FunctionType | BuiltinFunctionType)
    if isinstance(own_part, ModuleType) or (is_definition and own_part.__module__ != module.__name__):
        raise OwnPartError(
            f"{format_value(part.path, 1000)} imports {part.name}, and only the text of that file is recorded: define "
            "it there, or wrap it in a function."
        )
    return own_part


def get_part_file(value: str) -> PartFile:
    """Find the registered file of the plug-in that the value of a setting names."""
    part = parse_part_name(value)
    if part is None:
        raise OwnPartError(f"{format_value(value)} names no part: type {PART_FORM}.")
    return _find_loaded_file(part).file


def _find_loaded_file(part: PartName) -> _LoadedFile:
    """Find the file of a plug-in. Without a digest, use the file of that name that was registered last."""
    digest = part.digest or _newest_digests.get(part.file_name, "")
    loaded_file = _loaded_files.get((part.file_name, digest))
    if loaded_file is None:
        name = format_value(part.format(), 1000)
        raise OwnPartError(f"{name} needs the file {part.file_name}, which was not typed.")
    return loaded_file


def list_parts(config: BaseRunConfig) -> dict[str, PartName]:
    """List the plug-ins in a configuration by dotted setting, with an index at the end for entries of a list."""
    return dict(_find_parts(config.model_dump(), ""))


def _find_parts(value: object, name: str) -> Iterator[tuple[str, PartName]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _find_parts(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for number, entry in enumerate(value):
            yield from _find_parts(entry, f"{name}.{number}")
    elif (part := parse_part_name(value)) is not None:
        yield name, part


def list_part_files(config: BaseRunConfig) -> tuple[PartFile, ...]:
    """List the files of the plug-ins that a configuration names, each once. All must be registered."""
    files = (_find_loaded_file(part).file for part in list_parts(config).values())
    return tuple({(file.name, file.digest): file for file in files}.values())


def pin_parts(config: C) -> C:
    """Add to each plug-in of a configuration the digest of its registered file, and drop the file's folder.

    Raises OwnPartError if a file was not registered.
    """
    if not list_parts(config):
        return config
    return type(config).model_validate(_pin_values(config.model_dump()))


def _pin_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pin_values(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_pin_values(entry) for entry in value)
    part = parse_part_name(value)
    if part is None:
        return value
    return PartName(part.file_name, part.name, _find_loaded_file(part).file.digest).format()

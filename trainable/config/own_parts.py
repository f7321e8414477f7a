"""Plug-ins: your own functions and games, which a setting names as FILE.py:NAME.

A file is executed only if a user typed its path. A configuration names plug-ins with a digest of the file's text,
FILE.py:NAME#DIGEST, so that runs with a changed file have another hash. Processes look plug-ins up by this digest:
each process of a run gets the texts, and executes them before it makes anything from the configuration.
"""

import hashlib
import inspect
import linecache
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
        """The file's name without its folder: all that configurations have, so that files can be moved."""
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
    """A file with plug-ins: its path, as it was typed, and its content."""

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


_loaded_files: dict[tuple[str, str], tuple[PartFile, ModuleType]] = {}
"""The files that this process has executed, by name and digest, and by name and "" the one that was registered last."""


def register_file(file: PartFile) -> ModuleType:
    """Execute a file, so that its plug-ins can be used in this process. Each text is executed only once.

    Raises OwnPartError, with the line, if the file cannot be executed.
    """
    key = (file.name, file.digest)
    if key not in _loaded_files:
        module = ModuleType(f"{_MODULE_PREFIX}{PurePath(file.name).stem}_{file.digest}")
        module.__file__ = file.path
        sys.modules[module.__name__] = module  # dataclasses look their own module up
        # Tracebacks show the text that is executed, wherever the file is by then.
        linecache.cache[file.path] = (len(file.text), None, file.text.splitlines(keepends=True), file.path)
        try:
            exec(compile(file.text, file.path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            path = format_value(file.path, 1000)
            raise OwnPartError(f"{path} cannot be executed: {describe_error(error)}. Correct the file.") from None
        _loaded_files[key] = file, module
    _loaded_files[file.name, ""] = _loaded_files[key]
    return _loaded_files[key][1]


def describe_error(error: BaseException) -> str:
    """Describe an error that a plug-in has raised: class, message and place."""
    place = find_place(error)
    return f"{type(error).__name__}: {format_value(str(error), 500)}{f' ({place})' if place else ''}"


def find_place(error: BaseException) -> str:
    """Find the innermost line of a plug-in in the traceback of an error, such as "my_loss.py, line 12: `x / 0`".

    Empty if no plug-in was involved.
    """
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(_MODULE_PREFIX)
    ]
    if not places:
        return ""
    path, line = places[-1]
    return f"{PurePath(path).name}, line {line}: `{format_value(linecache.getline(path, line).strip(), 200)}`"


def find_registered_file(name: str) -> PartFile | None:
    """Find the file of this name that was registered last, if any."""
    return _loaded_files[name, ""][0] if (name, "") in _loaded_files else None


def get_part(value: str) -> Any:
    """Look up the function, class or object that the value of a setting names.

    Raises OwnPartError if its file was not registered, if the file does not define the name, or if it only imports it,
    since the digest would not cover the imported text.
    """
    part = parse_part_name(value)
    if part is None:
        raise OwnPartError(f"{format_value(value)} names no part: type {PART_FORM}.")
    _, module = _find_loaded_file(part)
    path = format_value(part.path, 1000)
    if not hasattr(module, part.name):
        raise OwnPartError(f"{path} has no {part.name}: define it, or name something that the file has.")
    own_part = getattr(module, part.name)
    is_definition = isinstance(own_part, type | FunctionType | BuiltinFunctionType)
    if isinstance(own_part, ModuleType) or (is_definition and own_part.__module__ != module.__name__):
        raise OwnPartError(
            f"{path} imports {part.name}, and only the text of that file is recorded: define it there, or wrap it in a "
            "function."
        )
    return own_part


def has_parameter(part: Any, name: str) -> bool:
    """Check whether a plug-in function has a parameter of this name, which it does not need to have."""
    try:
        return name in inspect.signature(part).parameters
    except (TypeError, ValueError):  # no function, or one without a signature
        return False


def get_part_file(part: PartName) -> PartFile:
    """Find the registered file of a plug-in. Raises OwnPartError if there is none."""
    return _find_loaded_file(part)[0]


def _find_loaded_file(part: PartName) -> tuple[PartFile, ModuleType]:
    """Find the file of a plug-in. Without a digest, use the file of that name that was registered last."""
    try:
        return _loaded_files[part.file_name, part.digest]
    except KeyError:
        name = format_value(part.format(), 1000)
        raise OwnPartError(f"{name} needs the file {part.file_name}, which was not typed.") from None


def list_parts(config: BaseRunConfig) -> dict[str, PartName]:
    """List the plug-ins in a configuration by dotted setting, with an index at the end for entries of a list."""
    return dict(_find_parts(config.model_dump(), ""))


def _find_parts(value: object, name: str) -> Iterator[tuple[str, PartName]]:
    if isinstance(value, dict | tuple | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _find_parts(entry, f"{name}.{key}" if name else str(key))
    elif (part := parse_part_name(value)) is not None:
        yield name, part


def list_part_files(*configs: BaseRunConfig) -> tuple[PartFile, ...]:
    """List the files of the plug-ins that configurations name, each once. All must be registered."""
    files = (get_part_file(part) for config in configs for part in list_parts(config).values())
    return tuple({(file.name, file.digest): file for file in files}.values())


def pin_parts(config: C) -> C:
    """Add to each plug-in of a configuration the digest of its registered file, and drop the file's folder.

    Raises OwnPartError if a file was not registered.
    """
    return type(config).model_validate(pin_values(config.model_dump())) if list_parts(config) else config


def pin_values(value: Any) -> Any:
    """Pin the plug-ins in values of settings; see `pin_parts`."""
    if isinstance(value, Mapping):
        return {key: pin_values(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(pin_values(entry) for entry in value)
    part = parse_part_name(value)
    return value if part is None else PartName(part.file_name, part.name, get_part_file(part).digest).format()

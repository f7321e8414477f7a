"""A folder in any filesystem that pyarrow knows: an object store or a path, named by a URI. A file is there whole.

Credentials are pyarrow's to find, in the environment or on the machine.
"""

import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from trainable.runs.failures import StorageError
from trainable.storage.uris import check_uri

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""A file appears in them when its upload is complete; elsewhere it is written beside its place and renamed."""
_CHUNK = 16 * 2**20


class Place(NamedTuple):
    """A folder (or a file) of a filesystem; path: as the filesystem takes it."""

    files: FileSystem
    path: str

    def at(self, name: str) -> "Place":
        """The place `name`, parts joined by slashes, below this one."""
        return Place(self.files, f"{self.path.rstrip('/')}/{name}")

    @property
    def is_object_store(self) -> bool:
        """Whether there are no folders and no renames, and no need of either."""
        return self.files.type_name in _OBJECT_STORES


def open_place(uri: str) -> Place:
    """The place that a URI or an absolute path names; StorageError where pyarrow has no filesystem for it."""
    check_uri(uri)
    try:
        files, path = FileSystem.from_uri(uri)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise StorageError(f"{uri} is no storage that can be used: {plain(error)}") from None
    if not path.strip("/"):
        raise StorageError(f"{uri} names no folder: write it like s3://bucket/folder, gs://bucket/folder or /shared.")
    return Place(files, path)


def plain(error: BaseException) -> str:
    """The first line of an error's words."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listing(place: Place) -> dict[str, FileInfo]:
    """Every file below `place` by its path from there; hidden ones left out."""
    found = place.files.get_file_info(FileSelector(place.path, recursive=True, allow_not_found=True))
    start = len(place.path.rstrip("/")) + 1
    named = {info.path[start:]: info for info in found if info.type == FileType.File}
    return {name: info for name, info in named.items() if not any(part[0] == "." for part in name.split("/"))}


def exists(place: Place) -> bool:
    """Whether there is a file at `place`."""
    return place.files.get_file_info(place.path).type == FileType.File


def get_bytes(place: Place) -> bytes:
    """The file's content; FileNotFoundError where there is none."""
    with place.files.open_input_stream(place.path) as source:
        return bytes(source.readall())


def get_file(place: Place, path: Path) -> None:
    """Copy the file at `place` to `path`, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with place.files.open_input_stream(place.path) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)


def put_bytes(place: Place, content: bytes) -> None:
    """Write a file; whoever reads it sees all of it or what was there before."""
    target = _writable(place)
    with place.files.open_output_stream(target) as out:
        out.write(content)
    _settle(place, target)


def put_file(place: Place, path: Path) -> None:
    """Copy `path` to `place` (see `put_bytes`)."""
    target = _writable(place)
    with path.open("rb") as source, place.files.open_output_stream(target) as out:
        shutil.copyfileobj(source, out, _CHUNK)
    _settle(place, target)


def _writable(place: Place) -> str:
    """The path to write to first; where there are folders, the file's own is made."""
    if place.is_object_store:
        return place.path
    folder, _, name = place.path.rpartition("/")
    place.files.create_dir(folder, recursive=True)
    return f"{folder}/.{name}.{uuid4().hex[:8]}.part"


def _settle(place: Place, target: str) -> None:
    if target != place.path:
        place.files.move(target, place.path)


def remove_file(place: Place) -> None:
    """Delete a file; none there is no error."""
    try:
        place.files.delete_file(place.path)
    except FileNotFoundError:
        return


def remove_folder(place: Place) -> None:
    """Delete all below `place`; nothing there is no error."""
    try:
        place.files.delete_dir(place.path)
    except FileNotFoundError:
        return

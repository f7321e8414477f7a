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
_CHUNK_BYTES = 16 * 2**20


class StoragePath(NamedTuple):
    """A folder (or a file) of a filesystem; path: as the filesystem takes it."""

    filesystem: FileSystem
    path: str

    def joinpath(self, name: str) -> "StoragePath":
        """The place `name`, parts joined by slashes, below this one."""
        return StoragePath(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    @property
    def is_object_store(self) -> bool:
        """Whether there are no folders and no renames, and no need of either."""
        return self.filesystem.type_name in _OBJECT_STORES


def open_storage(uri: str) -> StoragePath:
    """The place that a URI or an absolute path names; StorageError where pyarrow has no filesystem for it."""
    check_uri(uri)
    try:
        filesystem, path = FileSystem.from_uri(uri)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise StorageError(f"{uri} is no storage that can be used: {format_error(error)}") from None
    if not path.strip("/"):
        raise StorageError(f"{uri} names no folder: write it like s3://bucket/folder, gs://bucket/folder or /shared.")
    return StoragePath(filesystem, path)


def format_error(error: BaseException) -> str:
    """The first line of an error's words."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def list_files(storage_path: StoragePath) -> dict[str, FileInfo]:
    """Every file below `place` by its path from there; hidden ones left out."""
    infos = storage_path.filesystem.get_file_info(FileSelector(storage_path.path, recursive=True, allow_not_found=True))
    prefix_length = len(storage_path.path.rstrip("/")) + 1
    info_by_name = {info.path[prefix_length:]: info for info in infos if info.type == FileType.File}
    return {name: info for name, info in info_by_name.items() if not any(part[0] == "." for part in name.split("/"))}


def file_exists(storage_path: StoragePath) -> bool:
    """Whether there is a file at `place`."""
    return storage_path.filesystem.get_file_info(storage_path.path).type == FileType.File


def get_bytes(storage_path: StoragePath) -> bytes:
    """The file's content; FileNotFoundError where there is none."""
    with storage_path.filesystem.open_input_stream(storage_path.path) as source:
        return bytes(source.readall())


def get_file(storage_path: StoragePath, path: Path) -> None:
    """Copy the file at `place` to `path`, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage_path.filesystem.open_input_stream(storage_path.path) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def put_bytes(storage_path: StoragePath, content: bytes) -> None:
    """Write a file; whoever reads it sees all of it or what was there before."""
    write_path = _make_write_path(storage_path)
    with storage_path.filesystem.open_output_stream(write_path) as out:
        out.write(content)
    _rename_into_place(storage_path, write_path)


def put_file(storage_path: StoragePath, path: Path) -> None:
    """Copy `path` to `place` (see `put_bytes`)."""
    write_path = _make_write_path(storage_path)
    with path.open("rb") as source, storage_path.filesystem.open_output_stream(write_path) as out:
        shutil.copyfileobj(source, out, _CHUNK_BYTES)
    _rename_into_place(storage_path, write_path)


def _make_write_path(storage_path: StoragePath) -> str:
    """The path to write to first; where there are folders, the file's own is made."""
    if storage_path.is_object_store:
        return storage_path.path
    folder, _, name = storage_path.path.rpartition("/")
    storage_path.filesystem.create_dir(folder, recursive=True)
    return f"{folder}/.{name}.{uuid4().hex[:8]}.part"


def _rename_into_place(storage_path: StoragePath, write_path: str) -> None:
    if write_path != storage_path.path:
        storage_path.filesystem.move(write_path, storage_path.path)


def remove_file(storage_path: StoragePath) -> None:
    """Delete a file; none there is no error."""
    try:
        storage_path.filesystem.delete_file(storage_path.path)
    except FileNotFoundError:
        return


def remove_folder(storage_path: StoragePath) -> None:
    """Delete all below `place`; nothing there is no error."""
    try:
        storage_path.filesystem.delete_dir(storage_path.path)
    except FileNotFoundError:
        return

"""Read and write files in any filesystem that pyarrow supports, such as object stores and shared folders.

A reader never sees a partly written file. pyarrow finds the credentials in the environment or on the machine.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem

from trainable.files.paths import UnsafePathError, atomic_write, check_path, is_file, open_regular
from trainable.runs.failures import StorageError
from trainable.storage.uris import check_uri

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""pyarrow's names of filesystems in which a file appears only when its upload is complete.

In other filesystems, a file is written under a temporary name and then renamed.
"""
_CHUNK_BYTES = 16 * 2**20
"""Bytes in memory while a file is copied. A checkpoint can be larger than the memory of the node."""


class StoragePath(NamedTuple):
    """A folder or file in a filesystem. `path` is in the notation of that filesystem, such as bucket/folder/file.

    root: the folder that was opened, which may be reached through links; None for `path` itself.
    """

    filesystem: FileSystem
    path: str
    root: str | None = None

    def joinpath(self, name: str) -> "StoragePath":
        """The path of `name`, which may contain slashes, below this one."""
        root = self.path if self.root is None else self.root
        return StoragePath(self.filesystem, f"{self.path.rstrip('/')}/{name}", root)

    @property
    def is_object_store(self) -> bool:
        """Whether the storage has neither folders nor renames. Writing a file there needs neither."""
        return self.filesystem.type_name in _OBJECT_STORES


def open_storage(uri: str) -> StoragePath:
    """Open the folder that a URI or an absolute path names; StorageError if pyarrow has no filesystem for it."""
    check_uri(uri)
    try:
        filesystem, path = FileSystem.from_uri(uri)
    except (OSError, ValueError, TypeError, ImportError) as error:  # pyarrow raises each of them for some bad URI
        raise StorageError(f"{uri} cannot be used as a storage: {format_error(error)}") from None
    if not path.strip("/"):
        raise StorageError(f"{uri} names no folder: type it like s3://bucket/folder, gs://bucket/folder or /shared.")
    return StoragePath(filesystem, path)


def format_error(error: BaseException) -> str:
    """The first line of an error message, since those of pyarrow can have many; the type if there is no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _check_links(storage_path: StoragePath, is_folder: bool = False) -> None:
    """Raise UnsafePathError if there is a link in a shared folder where a study reads, writes or deletes something.

    pyarrow follows links, and the file of a study that names its storage may come from somebody else. The folder that
    was opened may itself be reached through links. is_folder: check everything below `storage_path`; without it, there
    must be a regular file or nothing.
    """
    if not isinstance(storage_path.filesystem, LocalFileSystem):
        return
    path = Path(storage_path.path)
    try:
        check_path(path if storage_path.root is None else Path(storage_path.root), path)
        if not is_folder:
            is_file(path)
    except UnsafePathError:
        raise UnsafePathError(
            path, "is no regular file or lies behind a symbolic link, which no storage may contain: remove the link"
        ) from None
    # A folder that disappears meanwhile is skipped: another process may be removing a checkpoint.
    for folder, folder_names, file_names in os.walk(path) if is_folder else ():
        for name in (*folder_names, *file_names):
            if os.path.islink(link := os.path.join(folder, name)):
                raise UnsafePathError(Path(link), "is a symbolic link, which no storage may contain: remove it")


def list_files(storage_path: StoragePath) -> dict[str, FileInfo]:
    """Every file below `storage_path`, by its relative path, without hidden files."""
    _check_links(storage_path, is_folder=True)
    selector = FileSelector(storage_path.path, recursive=True, allow_not_found=True)
    entries = storage_path.filesystem.get_file_info(selector)
    prefix_length = len(storage_path.path.rstrip("/")) + 1
    files = {entry.path[prefix_length:]: entry for entry in entries if entry.type == FileType.File}
    # Hidden files are incomplete, because `put_bytes` and `put_file` write to such a name first.
    return {
        name: entry for name, entry in files.items() if not any(component[0] == "." for component in name.split("/"))
    }


def file_exists(storage_path: StoragePath) -> bool:
    """Whether there is a file at `storage_path`."""
    _check_links(storage_path)
    return storage_path.filesystem.get_file_info(storage_path.path).type == FileType.File


def get_bytes(storage_path: StoragePath) -> bytes:
    """The content of a file; FileNotFoundError if there is none."""
    _check_links(storage_path)
    with storage_path.filesystem.open_input_stream(storage_path.path) as source:
        return bytes(source.readall())


def get_file(storage_path: StoragePath, path: Path) -> None:
    """Copy the file at `storage_path` to `path`, and create the folder of `path`.

    A reader of `path` sees either all of the file or the previous content.
    """
    _check_links(storage_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        storage_path.filesystem.open_input_stream(storage_path.path) as source,
        atomic_write(path) as temp_path,
        temp_path.open("wb") as target,
    ):
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def put_bytes(storage_path: StoragePath, content: bytes) -> None:
    """Write a file; a reader sees either all of it or the previous content."""
    write_path = _make_write_path(storage_path)
    with storage_path.filesystem.open_output_stream(write_path) as out:
        out.write(content)
    _rename_into_place(storage_path, write_path)


def put_file(storage_path: StoragePath, path: Path) -> None:
    """Copy `path` to `storage_path`; a reader sees either all of it or the previous content."""
    write_path = _make_write_path(storage_path)
    with open_regular(path, "rb") as source, storage_path.filesystem.open_output_stream(write_path) as out:
        shutil.copyfileobj(source, out, _CHUNK_BYTES)
    _rename_into_place(storage_path, write_path)


def _make_write_path(storage_path: StoragePath) -> str:
    """The path to write to before `_rename_into_place`. In a filesystem with folders, the parent folder is created.

    The random part of the name keeps two processes that write the same file from mixing their bytes.
    """
    if storage_path.is_object_store:
        return storage_path.path
    _check_links(storage_path)
    folder, _, name = storage_path.path.rpartition("/")
    storage_path.filesystem.create_dir(folder, recursive=True)
    return f"{folder}/.{name}.{uuid4().hex[:8]}.part"


def _rename_into_place(storage_path: StoragePath, write_path: str) -> None:
    if write_path != storage_path.path:
        storage_path.filesystem.move(write_path, storage_path.path)


def remove_file(storage_path: StoragePath) -> None:
    """Delete a file, if it exists."""
    _check_links(storage_path)
    try:
        storage_path.filesystem.delete_file(storage_path.path)
    except FileNotFoundError:
        return


def remove_folder(storage_path: StoragePath) -> None:
    """Delete everything below `storage_path`, if it exists."""
    _check_links(storage_path, is_folder=True)
    try:
        storage_path.filesystem.delete_dir(storage_path.path)
    except FileNotFoundError:
        return

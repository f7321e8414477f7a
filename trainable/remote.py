"""A folder in any filesystem that pyarrow knows: an object store or a path, named by a URI. A file is there whole.

Credentials are pyarrow's to find, in the environment or on the machine; a URI that carries some is refused, since a
study writes its URI down.
"""

import re
import shutil
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit, urlunsplit
from uuid import uuid4

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from trainable.failures import StorageError

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""A file appears in them when its upload is complete; elsewhere it is written beside its place and renamed."""
_CHUNK = 16 * 2**20
_SECRET_FIELD = re.compile(r"key|secret|token|password|sig", re.IGNORECASE)
# A secret may hold a slash, which ends what `urlsplit` takes for the authority: a colon that begins no port is enough.
_SECRET_USER = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#]*:(?!\d+(?:[/?#]|$))", re.IGNORECASE)


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


def is_uri(text: str) -> bool:
    """Whether `text` is written as a URI, not as a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def check_uri(uri: str) -> None:
    """StorageError for a URI that carries credentials, which the message does not repeat."""
    fields = [name for name, _ in parse_qsl(urlsplit(uri).query, keep_blank_values=True)] if is_uri(uri) else []
    if _SECRET_USER.match(uri) or any(_SECRET_FIELD.search(name) for name in fields):
        raise StorageError(
            "The URI of the storage carries a user name with a password, a key or a token, and a study writes its URI "
            "down: leave them out, and give them to pyarrow in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or by the machine's own role."
        )


def below(uri: str, name: str) -> str:
    """The URI of `name` below `uri`; its query (endpoint, region) stays."""
    if not is_uri(uri):
        return f"{uri.rstrip('/')}/{name}"
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def parent(uri: str) -> tuple[str, str]:
    """(URI of the folder that `uri` is in, the last part of `uri`)."""
    parts = urlsplit(uri)
    path = PurePosixPath(parts.path)
    return urlunsplit(parts._replace(path=str(path.parent).rstrip("/"))), path.name


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

"""Names of storages: a URI, or an absolute path. None carries credentials, since a study writes its URI down."""

import re
from pathlib import PurePosixPath
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from trainable.runs.failures import StorageError

_SECRET_FIELD = re.compile(r"key|secret|token|password|sig", re.IGNORECASE)
# A secret may hold a slash, which ends what `urlsplit` takes for the authority: a colon that begins no port is enough.
_SECRET_USER = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#]*:(?!\d+(?:[/?#]|$))", re.IGNORECASE)


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


def join_uri(uri: str, name: str) -> str:
    """The URI of `name` below `uri`; its query (endpoint, region) stays."""
    if not is_uri(uri):
        return f"{uri.rstrip('/')}/{name}"
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def split_uri(uri: str) -> tuple[str, str]:
    """(URI of the folder that `uri` is in, the last part of `uri`)."""
    if not is_uri(uri):
        path = PurePosixPath(uri)
        return str(path.parent).rstrip("/"), path.name
    parts = urlsplit(uri)
    path = PurePosixPath(parts.path)
    return urlunsplit(parts._replace(path=str(path.parent).rstrip("/"))), path.name


def is_same_folder(uri: str, other_uri: str) -> bool:
    """Whether two URIs name one folder, however they say to reach it (endpoint, region)."""
    if not (is_uri(uri) and is_uri(other_uri)):
        return uri.rstrip("/") == other_uri.rstrip("/")
    first, second = urlsplit(uri), urlsplit(other_uri)
    return (first.scheme, first.netloc, first.path.rstrip("/")) == (
        second.scheme,
        second.netloc,
        second.path.rstrip("/"),
    )

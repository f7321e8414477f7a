"""Check, join and split the URIs and absolute paths that name a storage.

A URI with credentials is refused, because a study writes its URI to files.
"""

import re
from pathlib import PurePosixPath
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from trainable.runs.failures import StorageError

# Names of query fields such as access_key, session_token or X-Amz-Signature.
_SECRET_FIELD = re.compile(r"key|secret|token|password|sig", re.IGNORECASE)
# This is not left to `urlsplit`, because an AWS secret may contain a slash, at which `urlsplit` ends the part with user
# and password. Therefore any colon before the next /, ? or # that does not start a port counts as a password.
_SECRET_USER = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#]*:(?!\d+(?:[/?#]|$))", re.IGNORECASE)


def is_uri(text: str) -> bool:
    """Whether `text` has the form of a URI, not of a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def check_uri(uri: str) -> None:
    """Raise StorageError for a URI that contains credentials. The message does not repeat them."""
    fields = [name for name, _ in parse_qsl(urlsplit(uri).query, keep_blank_values=True)] if is_uri(uri) else []
    if _SECRET_USER.match(uri) or any(_SECRET_FIELD.search(name) for name in fields):
        raise StorageError(
            "The URI of the storage contains a user name with a password, a key or a token, but a study writes its URI "
            "to files. Leave credentials out of the URI, and provide them in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or through the machine's role."
        )


def join_uri(uri: str, name: str) -> str:
    """The URI of `name` below `uri`. The query (endpoint, region) stays at the end.

    >>> join_uri("s3://bucket/studies?region=eu-west-1", "kl_sweep")
    's3://bucket/studies/kl_sweep?region=eu-west-1'
    """
    if not is_uri(uri):
        return f"{uri.rstrip('/')}/{name}"
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def split_uri(uri: str) -> tuple[str, str]:
    """(URI of the parent folder, last component of the path): the inverse of `join_uri`."""
    if not is_uri(uri):
        path = PurePosixPath(uri)
        return str(path.parent).rstrip("/"), path.name
    parts = urlsplit(uri)
    path = PurePosixPath(parts.path)
    return urlunsplit(parts._replace(path=str(path.parent).rstrip("/"))), path.name


def is_same_folder(uri: str, other_uri: str) -> bool:
    """Whether two URIs name the same folder. Queries may differ: they say how it is reached (endpoint, region)."""
    if not (is_uri(uri) and is_uri(other_uri)):
        return uri.rstrip("/") == other_uri.rstrip("/")
    first, second = urlsplit(uri), urlsplit(other_uri)
    return (first.scheme, first.netloc, first.path.rstrip("/")) == (
        second.scheme,
        second.netloc,
        second.path.rstrip("/"),
    )

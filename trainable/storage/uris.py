"""Check, join and split the URIs and absolute paths that name a storage.

A URI with credentials is refused, because a study writes its URI to files.
"""

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from trainable.runs.failures import StorageError

_SCHEME = re.compile(r"\s*[a-zA-Z][a-zA-Z0-9+.-]+:/")
"""The beginning of a URI. With a single slash it is a misspelled one, which is refused rather than taken for a path."""
_AMBIGUOUS_PATH = re.compile(r"(?!~)[^/]*[:@]")
"""The beginning of a path that may be a URI without its slashes, which may contain a key: s3:key@bucket/folder."""
_AUTHORITY = re.compile(r"(?:[A-Za-z0-9._-]*(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?)")
"""A bucket or a host, with a port at most."""
_KNOWN_USERS = {
    "gs": re.compile(r"anonymous@"),
    "gcs": re.compile(r"anonymous@"),
    # A container of Azure is written in the place of a user.
    "abfs": re.compile(r"[a-z0-9-]{3,63}@(?=[a-z0-9]{3,24}\.(?:dfs|blob)\.core\.windows\.net)"),
    "abfss": re.compile(r"[a-z0-9-]{3,63}@(?=[a-z0-9]{3,24}\.(?:dfs|blob)\.core\.windows\.net)"),
}
"""By scheme, what may precede an @ although it is no credential."""
_HOST = re.compile(r"(?:https?://)?(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?/?")
_WORD = re.compile(r"[A-Za-z0-9._-]{1,63}")
_QUERY_VALUES = {
    "endpoint_override": _HOST,
    "blob_storage_authority": _HOST,
    "dfs_storage_authority": _HOST,
    **dict.fromkeys(("region", "scheme", "project_id", "user", "blob_storage_scheme", "dfs_storage_scheme"), _WORD),
    **dict.fromkeys(("allow_bucket_creation", "allow_bucket_deletion", "allow_delayed_open"), _WORD),
    **dict.fromkeys(("tls_verify_certificates", "smart_defaults", "enable_tls", "background_writes"), _WORD),
    **dict.fromkeys(("retry_limit_seconds", "replication", "buffer_size", "default_block_size"), _WORD),
}
"""The query fields of pyarrow that are no credentials, and the form of their values."""
_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf", "file")
"""Those that pyarrow opens, beside fsspec+NAME."""
_SEPARATORS = re.compile(r"[@;?#&\s\x00-\x1f\x7f]")
"""Characters that separate parts of a URI. In a path, they may separate credentials from it that are escaped twice."""


def is_uri(text: str) -> bool:
    """Whether `text` has the form of a URI, not of a path."""
    return _SCHEME.match(text) is not None


def check_uri(uri: str) -> None:
    """Raise StorageError unless a URI has only components that are no credentials. The message repeats none of them.

    There is no list of what a credential looks like, since it can be spelled in many ways. What is accepted is listed
    instead: a bucket or host with a port, a path, and the query fields of _QUERY_VALUES. Of a path, only the part
    before the first slash is checked.
    """
    if not is_uri(uri) and _AMBIGUOUS_PATH.match(uri):
        raise StorageError(
            "What was typed is neither a URI such as s3://name/folder nor clearly a path, because it contains a colon "
            "or an @ before its first slash. A path with such a beginning is typed with ./ before it. Leave "
            "credentials out, and provide them in the environment or through the machine's role."
        )
    scheme = uri.strip().partition(":")[0].lower()
    if is_uri(uri) and scheme not in _SCHEMES and not scheme.startswith("fsspec+"):
        raise StorageError(
            f"The URI of the storage begins with another word than those of storages: type one that begins with one of "
            f"{', '.join(f'{name}://' for name in _SCHEMES)}, or the absolute path of a shared folder."
        )
    if is_uri(uri) and (component := _find_unknown_component(uri)):
        raise StorageError(
            f"The URI of the storage contains a user name with a password, a key or a token, or something else that is "
            f"not accepted, in its {component}. A study writes its URI to files. Type it like s3://name/folder or "
            f"gs://name/folder; after a question mark, only options such as region, endpoint_override and scheme are "
            f"accepted. Leave credentials out of the URI, and provide them in the environment (AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or through the machine's role."
        )


def _find_unknown_component(uri: str) -> str:
    """The name of a component of a URI that is not accepted; empty if all are."""
    match = re.fullmatch(r"([a-zA-Z][a-zA-Z0-9+.-]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", uri, re.DOTALL)
    if match is None:
        return "beginning"
    scheme, authority, path, query, fragment = match.groups()
    if fragment is not None:
        return "part after #"
    user = _KNOWN_USERS.get(scheme.lower())
    known_user = user.match(authority) if user is not None else None
    if not _AUTHORITY.fullmatch(authority[known_user.end() :] if known_user else authority):
        return "part before the path"
    # A local path may contain any character; those of a path that the user typed are escaped.
    if _SEPARATORS.search(path if scheme.lower() == "file" else _unescape(path)):
        return "path"
    for field in query.split("&") if query is not None else ():
        name, _, value = field.partition("=")
        if name not in _QUERY_VALUES or not _QUERY_VALUES[name].fullmatch(unquote(value)):
            return "query"
    return ""


def _unescape(text: str) -> str:
    """`text` without percent escapes, however often it was escaped."""
    while (plain := unquote(text)) != text:
        text = plain
    return text


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

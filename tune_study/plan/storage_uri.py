"""Handle the URI of a storage, a bucket or a shared folder. URIs with credentials are refused: files record them."""

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from tune_study.plan.errors import PlanError

_SCHEME = re.compile(r"\s*[a-zA-Z][a-zA-Z0-9+.-]+:/")
"""The beginning of a URI. A single slash is a misspelling, which is refused rather than taken for a path."""
_AMBIGUOUS_PATH = re.compile(r"(?!~)[^/]*[:@]")
"""The beginning of a path that may be a URI without slashes, and may contain a key: s3:key@bucket/folder."""
_HOST = r"(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?"
_AZURE_CONTAINER = r"[a-z0-9-]{3,63}@(?=[a-z0-9]{3,24}\.(?:dfs|blob)\.core\.windows\.net)"
_URI = re.compile(
    rf"(?:(?:s3|hdfs|viewfs|hf|fsspec\+[a-z0-9]+)://|gc?s://(?:anonymous@)?|abfss?://(?:{_AZURE_CONTAINER})?)"
    rf"(?:[\w.-]*(?::\d{{1,5}})?|{_HOST})(?:/[^@;?#&%\s\x00-\x1f\x7f]*)?(?:\?(?P<query>.*))?"
    r"|file://(?:localhost)?/[^?#;]*",
    re.IGNORECASE | re.ASCII,
)
"""A URI without credentials. Allowed parts are listed, since credentials can be spelled in many ways."""
_FIELD = re.compile(
    rf"(?:endpoint_override|blob_storage_authority|dfs_storage_authority)=(?:https?://)?{_HOST}/?"
    r"|(?:region|scheme|project_id|user|blob_storage_scheme|dfs_storage_scheme|allow_bucket_creation"
    r"|allow_bucket_deletion|allow_delayed_open|tls_verify_certificates|smart_defaults|enable_tls|background_writes"
    r"|retry_limit_seconds|replication|buffer_size|default_block_size)=[\w.-]{1,63}",
    re.IGNORECASE | re.ASCII,
)
"""A field for pyarrow after the question mark that is not a credential."""


def is_uri(text: str) -> bool:
    """Check whether `text` has the form of a URI rather than a path."""
    return _SCHEME.match(text) is not None


def check_uri(uri: str) -> None:
    """Raise PlanError if a URI or path may contain credentials. The message does not repeat it."""
    match = _URI.fullmatch(uri)
    if is_uri(uri):
        query = match["query"] if match is not None else None
        is_accepted = match is not None and all(
            _FIELD.fullmatch(unquote(field)) for field in (query.split("&") if query is not None else ())
        )
    else:
        is_accepted = not _AMBIGUOUS_PATH.match(uri)
    if not is_accepted:
        raise PlanError(
            "The storage is no URI that is accepted, or contains a user name with a password, a key or a token, which "
            "the files of the study would make public. Type it like s3://name/folder, gs://name/folder, "
            "abfs://container@account.dfs.core.windows.net/folder or hdfs://host/folder, with nothing but options such "
            "as region, endpoint_override and scheme after a question mark, or the path of a shared folder (with ./ "
            "before it if its name contains a colon or an @). Provide credentials in the environment, such as "
            "AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS, or through the machine's role."
        )


def join_uri(uri: str, name: str) -> str:
    """Join `name` to the path of `uri`. The query (endpoint, region) stays at the end.

    >>> join_uri("s3://bucket/studies?region=eu-west-1", "kl_sweep")
    's3://bucket/studies/kl_sweep?region=eu-west-1'
    """
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into (URI of the parent folder, last component of the path), the inverse of `join_uri`."""
    parts = urlsplit(uri)
    path = PurePosixPath(parts.path)
    return urlunsplit(parts._replace(path=str(path.parent).rstrip("/"))), path.name


def is_same_folder(uri: str, other_uri: str) -> bool:
    """Check whether two URIs name the same folder; queries (endpoint, region) may differ."""
    first, second = ((parts.scheme, parts.netloc, parts.path.rstrip("/")) for parts in map(urlsplit, (uri, other_uri)))
    return first == second

"""Which URIs name a storage, and that one with a credential is refused and not repeated."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import check_uri, is_same_folder, join_uri, split_uri

QUERY_FIELDS = ("endpoint_override", "region", "scheme", "project_id", "user", "replication")


@pytest.mark.parametrize(
    "uri",
    [
        "hdfs://host:8020/x",
        "gs://anonymous@bucket/x",
        "~me@domain/x",
        "folder/a:b@c",
        "s3://b?endpoint_override=[::1]:9000",
        "s3://b/x?endpoint_override=https%3A%2F%2Fs3.host&scheme=http&region=eu-west-1",
        "abfs://container@account.dfs.core.windows.net/x",
        "file:///mnt/a%40b%3Bc%23d%3Fe",
        "hdfs:///x?user=me",
    ],
)
def test_other_colons_are_no_credentials(uri: str) -> None:
    check_uri(uri)


SECRETS = ["s3:KEY:HIDDEN@b/p", "HIDDEN@b/p", "s3:HIDDEN", " s3:HIDDEN/p", "S3://k:HIDDEN@b/p"]
UNKNOWN = ["nope://bucket/x", "s3:/bucket/x", "s3://bucket/x?region", "gs://bucket/x#part"]


@pytest.mark.parametrize("text", SECRETS + UNKNOWN)
def test_what_is_no_storage_or_may_contain_credentials_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(
        PlanError, match="no URI that is accepted, or contains a user name with a password, a key or a token"
    ) as raised:
        check_uri(text)
    assert not [part for part in ("HIDDEN", "b/p", "bucket/x") if part in str(raised.value)]


# Where a secret can be in a URI. The first two are spellings from the documents of AWS and Azure.
SECRET_PLACES = (
    "s3://name/x?X-Amz-Signature={}",
    "abfs://container@account.dfs.core.windows.net/x?sv=2024&SIG={}",
    "s3://user%3A{}@name/x",
    "s3://{}@name/x",
    "s3://user:{}@name/x",
    "s3://user:0/{}@name/x",
    "s3://user%253A{}%2540name/x",
    "abfs://container:{}@account.dfs.core.windows.net/x",
    "gs://anonymous:{}@name/x",
    "hdfs://user:{}@host/x",
    "s3://name/x?region=a;secret_key={}",
    "s3://name/x;secret_key={}",
    "s3://name/x#secret_key={}",
    "s3://name/x%3Fsecret_key={}",
    "s3://name/x%253Fsecret_key={}",
    "s3://name/x?region=a%26secret_key={}",
    "s3://name/x?SE%43RET%255Fkey={}",
    "s3://name/x?endpoint_override=user:{}@host",
    "s3://name/x?endpoint_override=user:{}",
    "s3://name/x?endpoint_override=https://{}:user",
    "s3://name/x?{}",
    "s3:/name/x?secret_key={}",
    " s3://user:{}@name/x",
    "file:///x?password={}",
    "file:///x;password={}",
    "nope://user:{}@name/x",
)
SECRET_NAMES = ("secret_key", "accessKey", "PASSWORD", "pass", "pwd", "token", "Auth", "credential", "sig", "Signature")
ALPHABET = string.ascii_letters + string.digits + "+/=%:._-~"


@given(
    st.one_of(
        st.sampled_from(SECRET_PLACES),
        st.sampled_from(SECRET_NAMES).map("s3://name/x?region=a&{}={{}}".format),
        st.text(string.ascii_letters + "_-", min_size=1, max_size=12)
        .filter(lambda name: name not in QUERY_FIELDS)
        .map("gs://name/x?{}={{}}".format),
    ),
    st.text(ALPHABET, min_size=6, max_size=40).map(lambda text: f"TOP{text}SECRET"),
)
def test_a_secret_in_any_spelling_is_refused_and_in_no_message(place: str, secret: str) -> None:
    uri = place.format(secret)
    with pytest.raises(PlanError) as raised:
        check_uri(uri)
    assert secret not in str(raised.value)


@given(st.lists(st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True).filter(lambda name: name.strip(".")), min_size=1))
def test_join_uri_and_split_uri_are_inverses(names: list[str]) -> None:
    for root in ("s3://bucket", "s3://bucket/pre?region=x", "file:///mnt"):
        uri = root
        for name in names:
            assert split_uri(join_uri(uri, name)) == (uri, name)
            uri = join_uri(uri, name)


def test_connection_options_do_not_change_the_identity_of_a_folder() -> None:
    assert is_same_folder("s3://bucket/x?endpoint_override=a:1&scheme=http", "s3://bucket/x/")
    assert not is_same_folder("s3://bucket/x", "s3://bucket/y")
    assert not is_same_folder("s3://bucket/x", "gs://bucket/x")
    assert not is_same_folder("s3://bucket/x", "s3://other/x")

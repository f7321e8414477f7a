"""Paths in a storage: valid names, possible failures, and files that appear only when they are complete."""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.files.paths import UnsafePathError
from trainable.runs.failures import StorageError, classify_failure
from trainable.storage.mirror import call_storage
from trainable.storage.remote import (
    StoragePath,
    file_exists,
    get_bytes,
    get_file,
    list_files,
    open_storage,
    put_bytes,
    put_file,
    remove_file,
    remove_folder,
)
from trainable.storage.uris import _QUERY_VALUES, check_uri, is_same_folder, join_uri, split_uri


def test_a_path_may_contain_characters_that_are_special_in_a_uri() -> None:
    assert split_uri("/x/a#b/c?d") == ("/x/a#b", "c?d")
    assert is_same_folder("/x/a#b/", "/x/a#b")
    assert not is_same_folder("/x/a#b", "/x/a#c")


# Failures of a storage.


def test_a_storage_that_fails_is_waited_for_and_then_named(tmp_path: Path) -> None:
    messages: list[str] = []
    errors = iter([OSError("AWS Error NETWORK_CONNECTION"), None])

    def fail_once() -> str:
        error = next(errors)
        if error:
            raise error
        return "done"

    assert call_storage(fail_once, 60.0, messages.append) == "done"
    assert messages == [
        "waiting up to 60 s for the storage to respond: AWS Error NETWORK_CONNECTION",
        "the storage responds again",
    ]
    broken_path = StoragePath(open_storage(str(tmp_path)).filesystem, str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"The storage did not respond without an error within 0 s \(trainer\.disk_patience\)\."
    ) as raised:
        call_storage(partial(put_bytes, broken_path, b""), 0.0, messages.append)
    failure = classify_failure(raised.value, has_rows=True)
    assert (failure.kind, failure.is_retried) == ("storage", False)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "forbidden"),
        FileNotFoundError(2, "nothing"),
        OSError("AWS Error ACCESS_DENIED in PutObject"),
        OSError("AWS Error NO_SUCH_BUCKET during PutObject"),
    ],
)
def test_a_permanent_error_is_not_waited_for(error: OSError) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(StorageError):
        call_storage(fail, 3600.0, calls.append)
    assert calls == [1]


# URIs.


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:word@bucket/x",
        "s3://key:wo/rd@bucket/x",
        "s3://bucket/x?access_key=a",
        "abfs://bucket/x?sas_token=a",
        "S3://key:word@bucket",
        "gs://bucket/x?SECRET=",
    ],
)
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(StorageError, match="contains a user name with a password, a key or a token") as raised:
        open_storage(uri)
    assert "word" not in str(raised.value).replace("password", "")
    assert "bucket" not in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a:b",
        "hdfs://host:8020/x",
        "gs://anonymous@bucket/x",
        "/mnt/a:b",
        "./a:b",
        "../a@b",
        "~me@domain/x",
        "folder/a:b@c",
        "s3://b?endpoint_override=[::1]:9000",
        "s3://b?endpoint_override=host:9000",
        "s3://b/x?endpoint_override=https%3A%2F%2Fs3.host&scheme=http&region=eu-west-1",
        "abfs://container@account.dfs.core.windows.net/x",
        "file:///mnt/a%40b%3Bc%23d%3Fe",
        "hdfs:///x?user=me",
    ],
)
def test_other_colons_are_no_credentials(uri: str) -> None:
    check_uri(uri)


@pytest.mark.parametrize("text", ["s3:KEY:SECRET@b/p", "KEY:SECRET@b/p", "SECRET@b/p", "s3:SECRET", " s3:SECRET/p"])
def test_a_path_that_may_be_a_uri_with_credentials_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(StorageError, match="before its first slash") as raised:
        open_storage(text)
    assert "SECRET" not in str(raised.value)
    assert "KEY" not in str(raised.value)


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
        .filter(lambda name: name not in _QUERY_VALUES)
        .map("gs://name/x?{}={{}}".format),
    ),
    st.text(ALPHABET, min_size=6, max_size=40).map(lambda text: f"TOP{text}SECRET"),
)
def test_a_secret_in_any_spelling_is_refused_and_in_no_message(place: str, secret: str) -> None:
    uri = place.format(secret)
    with pytest.raises(StorageError) as raised:
        open_storage(uri)
    assert secret not in str(raised.value)


@pytest.mark.parametrize("uri", ["nope://bucket/x", "s3://", "relative/folder", "s3://?scheme=http"])
def test_what_is_no_storage_is_refused(uri: str) -> None:
    with pytest.raises(StorageError, match=r"cannot be used as a storage|names no folder|begins with another word"):
        open_storage(uri)


@given(st.lists(st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True).filter(lambda name: name.strip(".")), min_size=1))
def test_join_uri_and_split_uri_are_inverses(names: list[str]) -> None:
    for root in ("s3://bucket", "s3://bucket/pre?region=x", "/mnt"):
        uri = root
        for name in names:
            assert split_uri(join_uri(uri, name)) == (uri, name)
            uri = join_uri(uri, name)


def test_a_reader_of_a_shared_folder_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_storage(str(tmp_path)).joinpath("a/b")
    put_bytes(place, b"whole")
    source = tmp_path / "source"
    source.write_bytes(b"new content")
    # The process dies just before the rename.
    monkeypatch.setattr("trainable.storage.remote._rename_into_place", lambda place, target: None)
    put_file(place, source)
    assert get_bytes(place) == b"whole"
    assert sorted(list_files(open_storage(str(tmp_path)).joinpath("a"))) == ["b"]


def test_connection_options_do_not_change_the_identity_of_a_folder() -> None:
    assert is_same_folder("s3://bucket/x?endpoint_override=a:1&scheme=http", "s3://bucket/x/")
    assert not is_same_folder("s3://bucket/x", "s3://bucket/y")
    assert not is_same_folder("s3://bucket/x", "gs://bucket/x")
    assert not is_same_folder("s3://bucket/x", "s3://other/x")


@pytest.mark.parametrize("name", ["link/below/file", "link", "file_link"])
@pytest.mark.parametrize(
    "operation",
    [
        get_bytes,
        file_exists,
        list_files,
        remove_file,
        remove_folder,
        lambda path: put_bytes(path, b""),
        lambda path: put_file(path, Path(__file__)),
        lambda path: get_file(path, Path("/nowhere/file")),
    ],
)
def test_no_link_in_a_shared_folder_is_followed(
    operation: Callable[[StoragePath], object], name: str, tmp_path: Path
) -> None:
    foreign_file = tmp_path / "foreign" / "below" / "file"
    foreign_file.parent.mkdir(parents=True)
    foreign_file.write_text("content")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "link").symlink_to(tmp_path / "foreign")
    (tmp_path / "real" / "file_link").symlink_to(foreign_file)
    (tmp_path / "shared").symlink_to(tmp_path / "real")  # the folder that the user names may be a link
    messages: list[str] = []
    path = open_storage(str(tmp_path / "shared")).joinpath(name)
    with pytest.raises(StorageError, match="symbolic link, which no storage may contain") as raised:
        call_storage(partial(operation, path), 3600.0, messages.append)
    assert isinstance(raised.value.__cause__, UnsafePathError)
    assert messages == []  # waiting removes no link
    assert foreign_file.read_text() == "content"
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["below", "file", "file_link", "foreign", "link", "real", "shared"]
    )
    with pytest.raises(UnsafePathError):
        list_files(open_storage(str(tmp_path / "shared")))
    with pytest.raises(UnsafePathError):
        remove_folder(open_storage(str(tmp_path / "shared")))


def test_a_copy_that_fails_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, target = open_storage(str(tmp_path / "shared")).joinpath("a"), tmp_path / "target"
    put_bytes(place, b"new content")
    target.write_text("previous content")

    def fail(source: object, target: object, length: int) -> None:
        raise OSError("the storage does not respond")

    with monkeypatch.context() as patch:
        patch.setattr("trainable.storage.remote.shutil.copyfileobj", fail)
        with pytest.raises(OSError, match="does not respond"):
            get_file(place, target)
    assert target.read_text() == "previous content"
    get_file(place, target)
    assert target.read_text() == "new content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared", "target"]

from pathlib import Path

import pytest

from trainable.files.json_values import MAX_DEPTH, DamagedFileError, parse_json, read_json
from trainable.files.paths import UnsafePathError


@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_nesting_is_limited_at_the_same_depth_from_any_caller(brackets: str) -> None:
    def nest(depth: int) -> bytes:
        return (brackets[:-1] * depth + "1" + brackets[-1] * depth).encode()

    def call_deeply(depth: int) -> None:
        if depth:
            call_deeply(depth - 1)
        else:
            parse_json(nest(MAX_DEPTH))

    parse_json(nest(MAX_DEPTH))
    call_deeply(300)
    for depth in (MAX_DEPTH + 1, 10**6):
        with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
            parse_json(nest(depth))


def test_brackets_beside_each_other_and_in_strings_are_not_nested() -> None:
    values = [["[" * 500, '\\"[[' * 200, {}] for _ in range(500)]
    import json

    assert parse_json(json.dumps(values).encode()) == values


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{'a': 1}", b"1" * 5000])
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"study\.json is not valid JSON"):
        read_json(tmp_path / "study.json")


def test_a_missing_file_is_not_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "study.json")


def test_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "study.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePathError, match=r"study\.json is a symbolic link"):
        read_json(tmp_path / "study.json")

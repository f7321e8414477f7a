import json
from pathlib import Path

import pytest

from trainable.files.json_values import MAX_BYTES, DamagedFileError, find_object, read_object, write_object
from trainable.files.paths import UnsafePathError


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{'a': 1}", b"1" * 5000, b"[" * 10**5])
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"study\.json is damaged: it is not valid JSON"):
        read_object(tmp_path / "study.json")


def test_a_missing_file_is_not_a_damaged_one_and_a_link_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "study.json")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "study.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePathError, match=r"study\.json is a symbolic link"):
        read_object(tmp_path / "study.json")


OBJECT = {"name": "kl", "runs": [{"arm": "0.1", "seed": 3}], "value": 1.5e-7, "nothing": None, "text": "über"}


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    write_object(path, OBJECT)
    assert read_object(path) == find_object(path) == OBJECT
    # White space and the order of keys are no part of the content.
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert read_object(path) == OBJECT
    write_object(tmp_path / "run.json", {"values": (1, 2), 3: float("inf")})
    assert read_object(tmp_path / "run.json") == {"values": [1, 2], "3": float("inf")}


def test_every_changed_byte_of_an_object_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_object(path, {"run_id": "kl-0", "status": "completed", "stop_value": 0.25, "ended_at": None})
    content, expected = path.read_bytes(), read_object(path)
    n_noticed = 0
    for position in range(len(content)):
        for byte in (content[position] ^ 1, content[position] ^ 32, 0, ord("7"), ord(" ")):
            path.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
            content_now = find_object(path)
            assert content_now in (expected, None)
            n_noticed += content_now is None
    assert n_noticed > 3 * len(content)


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": 1}', '{"a": 1, "checksum": null}', '{"a": 1, "checksum": 2}'])
def test_an_object_without_its_checksum_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"run\.json is damaged: it does not"):
        read_object(tmp_path / "run.json")
    assert find_object(tmp_path / "run.json") is None
    assert find_object(tmp_path / "missing.json") is None


def test_a_file_of_many_gigabytes_is_not_read_and_a_message_shows_control_characters(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DamagedFileError, match="at most 67108864 are read"):
        read_object(tmp_path / "run.json")
    path = tmp_path / "a\x1b[2J.json"
    path.write_text("{")
    with pytest.raises(DamagedFileError, match=r"a\\x1b\[2J\.json is damaged"):
        read_object(path)

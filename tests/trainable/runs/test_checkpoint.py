import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainable.files.paths import compute_sha256
from trainable.runs.checkpoint import (
    group_tensors,
    iter_checkpoints,
    read_checkpoint,
    write_checkpoint,
    write_rolling_checkpoint,
)
from trainable.runs.failures import CheckpointError

TENSORS = {
    "actor/weight": torch.arange(6.0).view(2, 3),
    "actor_optimizer/0/step": torch.tensor(7.0),
    "actor_optimizer/0/exp_avg": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(6.0).view(2, 3).T,
}
VALUES = {"step": 7, "kl_coef": 0.1 + 0.2, "totals": {"tokens": 12}, "text": "√"}
FILES = ("state.safetensors", "state.json", "checksums.json")


def write_step(folder: Path, step: int = 7) -> Path:
    write_checkpoint(folder, TENSORS, {**VALUES, "step": step})
    return folder


def has_step(folder: Path, step: int) -> bool:
    tensors, values = read_checkpoint(folder)
    assert tensors.keys() == TENSORS.keys()
    has_equal_tensors = all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    return has_equal_tensors and values == {**VALUES, "step": step}


def test_what_was_written_is_read_bit_for_bit_and_nothing_is_pickled(tmp_path: Path) -> None:
    assert has_step(write_step(tmp_path / "a" / "b" / "state"), 7)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["state"]
    assert sorted(path.name for path in (tmp_path / "a" / "b" / "state").iterdir()) == sorted(FILES)
    weight = torch.nn.Parameter(torch.ones(3, 4))
    write_checkpoint(tmp_path / "state", {"w": weight, "part": torch.arange(12).view(3, 4)[:, 1:2]}, {})
    tensors, _ = read_checkpoint(tmp_path / "state")
    assert torch.equal(tensors["w"], torch.ones(3, 4))
    assert tensors["part"].tolist() == [[1], [5], [9]]
    write_step(tmp_path / "state")
    for name in FILES:
        start = (tmp_path / "state" / name).read_bytes()[:16]
        assert not start.startswith((b"\x80", b"PK"))
        assert b"{" in start


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change",
    [Path.unlink, replace_by_folder, lambda path: path.write_bytes(path.read_bytes() + b"\1")],
    ids=["missing", "a folder", "longer"],
)
def test_a_file_that_is_not_what_was_written_is_named(
    tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    change(write_step(tmp_path / "state") / name)
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path / "state")


def flip_bit(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :]


@pytest.mark.parametrize("damage", [lambda content, end: content[:end], flip_bit], ids=["cut", "bit"])
def test_a_file_damaged_at_any_byte_is_refused(tmp_path: Path, damage: Callable[[bytes, int], bytes]) -> None:
    folder = write_step(tmp_path / "state")
    for path in folder.iterdir():
        content = path.read_bytes()
        for position in range(len(content)):
            path.write_bytes(damage(content, position))
            with pytest.raises(CheckpointError, match=str(folder)):
                read_checkpoint(folder)
        path.write_bytes(content)
    assert has_step(folder, 7)


@pytest.mark.parametrize("text", ["[]", '"x"', "3", "null", "{}", '{"state.json": "0"}'])
def test_checksums_of_another_form_are_damaged(tmp_path: Path, text: str) -> None:
    (write_step(tmp_path / "state") / "checksums.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checksums\.json is damaged"):
        read_checkpoint(tmp_path / "state")


def test_checkpoints_are_numbered_by_their_names_the_latest_first(tmp_path: Path) -> None:
    assert list(iter_checkpoints(tmp_path / "state")) == []
    with pytest.raises(CheckpointError, match="state"):
        read_checkpoint(tmp_path / "state")
    for name in ("step_9", "step_10", ".step_11.writing", ".step_8.old", "step_x", "other", "global_step_12"):
        (tmp_path / name).mkdir()
    expected = [(12, "global_step_12"), (10, "step_10"), (9, "step_9"), (8, "step_8")]
    assert [(step, path.name) for step, path in iter_checkpoints(tmp_path)] == expected


class Died(BaseException):
    """The process dies here."""


def die_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die just before the rename with that number."""
    rename_count, rename = [0], Path.rename

    def count_rename(self: Path, target: Path) -> Path:
        rename_count[0] += 1
        if rename_count[0] == number:
            raise Died
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", count_rename)


@pytest.mark.parametrize("number", [1, 2])
def test_a_death_before_either_rename_leaves_the_old_one_to_be_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path / "step_7", 1)
    with monkeypatch.context() as patched:
        die_at_rename(patched, number)
        with pytest.raises(Died):
            write_step(tmp_path / "step_7", 2)
    assert list(iter_checkpoints(tmp_path)) == [(7, tmp_path / "step_7")]
    assert has_step(tmp_path / "step_7", 1)
    write_step(tmp_path / "step_7", 3)  # the next write leaves no temporary files
    assert has_step(tmp_path / "step_7", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_7"]


def write_rolling(folder: Path, step: int, keep: int = 2) -> list[str]:
    write_rolling_checkpoint(folder, step, TENSORS, {**VALUES, "step": step}, keep)
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_rolling_states_are_kept_and_abandoned_and_partial_ones_removed(tmp_path: Path) -> None:
    expected = [["step_5"], ["step_10", "step_5"], ["step_10", "step_15"]]
    assert [write_rolling(tmp_path, step) for step in (5, 10, 15)] == expected
    assert write_rolling(tmp_path, 20, keep=1) == ["step_20"]
    assert has_step(tmp_path / "step_20", 20)
    for step in (21, 22, 23):
        write_rolling(tmp_path, step)
    (tmp_path / ".step_24.writing").mkdir()
    assert write_rolling(tmp_path, 22) == ["step_22"]  # the run went back, and step 23 is of an abandoned attempt


def test_two_deaths_in_a_row_lose_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path / "state", 1)
    for number in (2, 1):  # first between the two renames; then, without an old folder, before the only rename
        with monkeypatch.context() as patched:
            die_at_rename(patched, number)
            with pytest.raises(Died):
                write_step(tmp_path / "state", 2)
        assert has_step(tmp_path / "state", 1)


def test_deeply_nested_values_with_a_right_checksum_are_refused(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "state")
    (folder / "state.json").write_text("[" * 10**6)
    checksums = {name: compute_sha256(folder / name) for name in FILES[:2]}
    (folder / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", [*FILES, ""])
def test_no_link_in_a_checkpoint_is_followed(tmp_path: Path, name: str) -> None:
    folder = write_step(tmp_path / "state")
    path = folder / name if name else folder
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        read_checkpoint(folder)


NUMBERED_FILES = tuple(f"state-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def several_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with different numbers of threads."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(n_threads)


def write_in_three_files(folder: Path, step: int = 7) -> Path:
    write_checkpoint(folder, TENSORS, {**VALUES, "step": step}, max_file_bytes=28)
    return folder


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_files_have_every_tensor_once_and_are_as_full_as_allowed(sizes: list[int], max_bytes: int) -> None:
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    groups = group_tensors(tensors, max_bytes)
    assert [name for group in groups.values() for name in group] == list(tensors)
    assert list(groups) == sorted(groups)
    group_bytes = [sum(tensor.nbytes for tensor in group.values()) for group in groups.values()]
    assert all(size <= max_bytes or len(group) == 1 for size, group in zip(group_bytes, groups.values(), strict=True))
    for (size, _), (_, next_group) in pairwise(zip(group_bytes, groups.values(), strict=True)):
        assert size + next(iter(next_group.values())).nbytes > max_bytes


def test_tensors_in_several_files_are_read_bit_for_bit(tmp_path: Path, several_threads: None) -> None:
    folder = write_in_three_files(tmp_path / "state")
    assert sorted(path.name for path in folder.iterdir()) == sorted((*NUMBERED_FILES, *FILES[1:]))
    assert has_step(folder, 7)
    write_step(folder, 8)  # as one file again, as earlier versions wrote it
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert has_step(folder, 8)


@pytest.mark.parametrize("name", NUMBERED_FILES)
def test_each_of_several_files_is_checked(tmp_path: Path, name: str, several_threads: None) -> None:
    path = write_in_three_files(tmp_path / "state") / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        read_checkpoint(tmp_path / "state")
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path / "state")


@pytest.mark.parametrize(
    "names",
    [
        ("../state.safetensors",),
        ("state.safetensors", NUMBERED_FILES[0]),
        NUMBERED_FILES[:2],
        (*NUMBERED_FILES[:2], "state-00004-of-00003.safetensors"),
        (),
    ],
    ids=["elsewhere", "two kinds", "one is missing", "a wrong number", "none"],
)
def test_checksums_must_name_the_files_of_one_checkpoint(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = write_in_three_files(tmp_path / "state")
    (folder / "checksums.json").write_text(json.dumps(dict.fromkeys((*names, "state.json"), "0")))
    with pytest.raises(CheckpointError, match=r"checksums\.json is damaged: it does not name the files"):
        read_checkpoint(folder)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Died()], ids=["full disk", "death"])
def test_an_error_in_one_of_several_threads_leaves_the_old_one(
    tmp_path: Path, several_threads: None, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_in_three_files(tmp_path / "state", 1)
    sync, n_synced = os.fsync, [0]

    def fail_once(handle: int) -> None:
        n_synced[0] += 1
        if n_synced[0] == 2:
            raise error
        sync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_once)
        with pytest.raises(type(error)):
            write_in_three_files(tmp_path / "state", 2)
    assert has_step(tmp_path / "state", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]

import os
from pathlib import Path

import pytest
import torch

from trainable.runs.checkpoint import (
    CheckpointError,
    iter_checkpoints,
    read_checkpoint,
    write_checkpoint,
    write_rolling_checkpoint,
)

TENSORS = {
    "actor/weight": torch.arange(6.0).view(2, 3),
    "actor_optimizer/0/step": torch.tensor(7.0),
    "actor_optimizer/0/exp_avg": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(6.0).view(2, 3).T,
}
VALUES = {"step": 7, "kl_coef": 0.1 + 0.2, "totals": {"tokens": 12}, "text": "√"}
FILES = ("state.safetensors", "state.json", "checksums.json")


def written(folder: Path, step: int = 7) -> Path:
    write_checkpoint(folder, TENSORS, {**VALUES, "step": step})
    return folder


def same(folder: Path, step: int) -> bool:
    tensors, values = read_checkpoint(folder)
    assert tensors.keys() == TENSORS.keys()
    equal = all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    return equal and values == {**VALUES, "step": step}


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    assert same(written(tmp_path / "a" / "b" / "state"), 7)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["state"]
    assert sorted(path.name for path in (tmp_path / "a" / "b" / "state").iterdir()) == sorted(FILES)


def test_a_later_checkpoint_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        written(tmp_path / "state", step)
        assert same(tmp_path / "state", step)
        assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    written(tmp_path / "state")
    for name in FILES:
        start = (tmp_path / "state" / name).read_bytes()[:16]
        assert not start.startswith((b"\x80", b"PK"))
        assert b"{" in start


def test_gradients_and_views_are_no_obstacle(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    write_checkpoint(tmp_path / "state", {"w": weight, "part": torch.arange(12).view(3, 4)[:, 1:2]}, {})
    tensors, _ = read_checkpoint(tmp_path / "state")
    assert torch.equal(tensors["w"], torch.ones(3, 4))
    assert tensors["part"].tolist() == [[1], [5], [9]]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (written(tmp_path / "state") / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path / "state")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    path = written(tmp_path / "state") / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path / "state")


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_any_flipped_byte_is_detected_and_the_file_named(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "state") / name
    good = path.read_bytes()
    for place in range(0, len(good), 13):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            read_checkpoint(tmp_path / "state")


def test_flipped_bytes_of_the_checksums_are_detected(tmp_path: Path) -> None:
    path = written(tmp_path / "state") / "checksums.json"
    good = path.read_bytes()
    for place, bit in ((place, bit) for place in range(len(good)) for bit in (1, 128)):
        path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read_checkpoint(tmp_path / "state")


@pytest.mark.parametrize("text", ["[]", '"x"', "3", "null", "{}", '{"state.json": "0"}'])
def test_checksums_of_another_form_are_damaged(tmp_path: Path, text: str) -> None:
    (written(tmp_path / "state") / "checksums.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checksums\.json is damaged"):
        read_checkpoint(tmp_path / "state")


def test_there_is_nothing_where_nothing_was_written(tmp_path: Path) -> None:
    assert list(iter_checkpoints(tmp_path / "state")) == []
    with pytest.raises(CheckpointError, match="state"):
        read_checkpoint(tmp_path / "state")


class Died(BaseException):
    """The process dies here."""


def die_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die just before the rename of that number."""
    done, rename = [0], Path.rename

    def counted(self: Path, target: Path) -> Path:
        done[0] += 1
        if done[0] == number:
            raise Died
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", counted)


@pytest.mark.parametrize("number", [1, 2])
def test_a_death_before_either_rename_leaves_the_old_one_to_be_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "step_7", 1)
    with monkeypatch.context() as patched:
        die_at_rename(patched, number)
        with pytest.raises(Died):
            written(tmp_path / "step_7", 2)
    assert list(iter_checkpoints(tmp_path)) == [(7, tmp_path / "step_7")]
    assert same(tmp_path / "step_7", 1)
    written(tmp_path / "step_7", 3)  # whoever goes on leaves nothing lying about
    assert same(tmp_path / "step_7", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_7"]


def rolled(folder: Path, step: int, keep: int = 2) -> list[str]:
    write_rolling_checkpoint(folder, step, TENSORS, {**VALUES, "step": step}, keep)
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_rolling_states_are_kept(tmp_path: Path) -> None:
    assert [rolled(tmp_path, step) for step in (5, 10, 15)] == [
        ["step_5"],
        ["step_10", "step_5"],
        ["step_10", "step_15"],
    ]
    assert rolled(tmp_path, 20, keep=1) == ["step_20"]
    assert same(tmp_path / "step_20", 20)


def test_what_was_given_up_or_half_written_is_cleared_away(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        rolled(tmp_path, step)
    (tmp_path / ".step_4.writing").mkdir()
    assert rolled(tmp_path, 2) == ["step_2"]  # the run went back to step 1: 3 is of an attempt that was given up


def test_checkpoints_are_numbered_by_their_names_the_latest_first(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", ".step_11.writing", ".step_8.old", "step_x", "other", "global_step_12"):
        (tmp_path / name).mkdir()
    assert [(step, path.name) for step, path in iter_checkpoints(tmp_path)] == [
        (12, "global_step_12"),
        (10, "step_10"),
        (9, "step_9"),
        (8, "step_8"),
    ]


def test_two_deaths_in_a_row_lose_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "state", 1)
    for number in (2, 1):  # between the renames; then, with nothing at the place, before the only one
        with monkeypatch.context() as patched:
            die_at_rename(patched, number)
            with pytest.raises(Died):
                written(tmp_path / "state", 2)
        assert same(tmp_path / "state", 1)


def test_a_death_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "state", 1)

    def torn(handle: int) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", torn)
        with pytest.raises(Died):
            written(tmp_path / "state", 2)
    assert same(tmp_path / "state", 1)

"""A run's folder in storage, on a real S3-compatible server and in a shared folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.trials import Row, Straight, config, timeless
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint, write_rolling
from trainable.runs.failures import StorageError
from trainable.runs.run_files import SUMS, append_line, read_rows
from trainable.storage import mirror
from trainable.storage.mirror import Mirror, fetch_lines, is_whole, line_files, push_lines, put_sealed, sealed
from trainable.storage.remote import Place, get_bytes, listing, open_place, put_bytes, put_file
from trainable.trial import Trial


@pytest.fixture(params=["s3", "path"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    """A folder of its own in each kind of storage."""
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://shelf/{name}?{s3}" if request.param == "s3" else str(tmp_path / "shared")


def names(place: Place) -> list[str]:
    return sorted(listing(place))


def mirror_of(uri: str, node: Path) -> Mirror:
    return Mirror(open_place(uri), node / "run", node / "kept", patience=0.0, is_over=lambda: False)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(100.0) + step}


def write_step(node: Path, step: int, state: bool = True) -> None:
    """What a run writes in one step."""
    (node / "run").mkdir(parents=True, exist_ok=True)
    append_line(node / "run" / "metrics.jsonl", {"step": step})
    if state:
        write_rolling(node / "run" / "state", step, tensors(step), {"step": step}, 2)


# Rows.


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.binary(max_size=40), min_size=1, max_size=8), part=st.integers(1, 30))
def test_lines_that_were_copied_in_pieces_are_the_file(lines: list[bytes], part: int, tmp_path: Path) -> None:
    place = open_place(str(tmp_path / "storage"))
    shutil.rmtree(tmp_path / "storage", ignore_errors=True)
    source, whole, followed = tmp_path / "source", tmp_path / "whole", tmp_path / "followed"
    for path in (source, whole, followed):
        path.unlink(missing_ok=True)
    before, mirror.PART_BYTES = mirror.PART_BYTES, part
    try:
        pushed = 0
        for line in lines:
            with source.open("ab") as file:
                file.write(line)
            pushed = push_lines(place.at("metrics.jsonl"), source, pushed)
            sizes = line_files({name: info.size for name, info in listing(place).items()})
            fetch_lines(place.at("metrics.jsonl"), sizes.get("metrics.jsonl", 0), followed)
        fetch_lines(place.at("metrics.jsonl"), pushed, whole)
    finally:
        mirror.PART_BYTES = before
    content = b"".join(lines)
    assert (whole.read_bytes() if content else b"") == content
    assert (followed.read_bytes() if content else b"") == content
    assert {name: info.size for name, info in listing(place).items()} == {
        f"metrics.jsonl/{index:06}": min(part, len(content) - index * part) for index in range(-(-len(content) // part))
    }


def test_of_a_step_only_the_last_part_is_written_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PART_BYTES", 10)
    place, path = open_place(uri), tmp_path / "metrics.jsonl"
    path.write_bytes(b"0123456789abcde")
    pushed = push_lines(place, path, 0)
    put_bytes(place.at("000000"), b"untouched!")
    path.write_bytes(b"0123456789abcdefghijKL")
    assert push_lines(place, path, pushed) == 22
    assert [get_bytes(place.at(name)) for name in names(place)] == [b"untouched!", b"abcdefghij", b"KL"]


# Checkpoints.


def test_a_run_is_copied_after_each_step_and_fetched_elsewhere(uri: str, tmp_path: Path) -> None:
    here, there = mirror_of(uri, tmp_path / "a"), mirror_of(uri, tmp_path / "b")
    for step in (1, 2, 3):
        write_step(tmp_path / "a", step)
        (tmp_path / "a" / "run" / "other.json").write_text(str(step))
        here.push()
    assert names(here.place) == sorted([
        "metrics.jsonl/000000", "other.json",
        *(f"state/step_{step}/{name}" for step in (2, 3) for name in (SUMS, "state.json", "state.safetensors")),
    ])  # fmt: skip
    there.fetch(with_state=True)
    run = tmp_path / "b" / "run"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    assert (run / "other.json").read_text() == "3"
    assert [path.name for path in (run / "state").iterdir()] == ["step_3"]
    found, values = read_checkpoint(run / "state" / "step_3")
    assert torch.equal(found["w"], tensors(3)["w"])
    assert values == {"step": 3}
    assert there.notes == []


def test_a_state_that_was_cut_in_its_upload_is_not_used(uri: str, tmp_path: Path) -> None:
    write_step(tmp_path / "a", 1)
    here = mirror_of(uri, tmp_path / "a")
    here.push()
    write_step(tmp_path / "a", 2)
    whole = tmp_path / "a" / "run" / "state" / "step_2"
    for name in ("state.json", "state.safetensors"):  # the process dies before the checksums
        put_file(here.place.at(f"state/step_2/{name}"), whole / name)
    there = mirror_of(uri, tmp_path / "b")
    there.fetch(with_state=True)
    assert [path.name for path in (tmp_path / "b" / "run" / "state").iterdir()] == ["step_1"]
    write_step(tmp_path / "b", 2)
    there.push()
    assert [step for step, _ in sealed(listing(there.place))] == [2, 1]


def test_a_state_is_not_whole_while_another_of_its_name_is_copied(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = open_place(uri).at("state/step_1"), tmp_path / "state"
    write_checkpoint(folder, tensors(1), {"step": 1})
    put_sealed(place, folder)
    write_checkpoint(folder, tensors(7), {"step": 1})
    seen: list[list[str]] = []

    def put_and_look(target: Place, path: Path) -> None:
        put_file(target, path)
        seen.append(names(place))

    monkeypatch.setattr(mirror, "put_file", put_and_look)
    put_sealed(place, folder)
    assert [SUMS in found for found in seen] == [False, False, True]
    before = len(seen)
    put_sealed(place, folder)  # the same again is there already
    assert len(seen) == before


def test_a_file_of_the_same_size_and_time_is_another_one(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    for text in ("1", "2"):
        path = tmp_path / "a" / "run" / "other.json"
        path.write_text(text)
        os.utime(path, ns=(0, 0))
        here.push()
        assert get_bytes(here.place.at("other.json")) == text.encode()


def test_the_state_before_stays_until_the_next_is_whole_and_rows_come_first(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    here.push()
    write_step(tmp_path / "a", 2)
    shutil.rmtree(tmp_path / "a" / "run" / "state" / "step_1")

    def cut(place: Place, path: Path) -> None:
        raise PermissionError(13, "the storage refuses this")

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "put_file", cut)
        with pytest.raises(StorageError):
            here.push()
    assert sealed(listing(here.place)) == [(1, "state/step_1")]
    assert get_bytes(here.place.at("metrics.jsonl/000000")).count(b"\n") == 2
    here.push()
    assert sealed(listing(here.place)) == [(2, "state/step_2")]


def test_a_state_whose_removal_was_cut_is_not_whole(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    here.push()
    monkeypatch.setattr(mirror, "remove_folder", lambda place: None)
    mirror.remove_sealed(here.place.at("state/step_1"))
    assert sealed(listing(here.place)) == []
    assert "state/step_1/state.safetensors" in listing(here.place)


def test_a_damaged_state_in_storage_is_named_and_the_one_before_is_used(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step)
        here.push()
    put_bytes(here.place.at("state/step_2/state.safetensors"), b"something else")
    there = mirror_of(uri, tmp_path / "b")
    there.fetch(with_state=True)
    assert [path.name for path in (tmp_path / "b" / "run" / "state").iterdir()] == ["step_1"]
    assert there.notes == ["state/step_2 in storage is damaged and is not used"]


def test_what_a_node_has_beyond_storage_is_removed_and_what_it_has_is_not_fetched_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    first.push()
    write_step(tmp_path / "a", 2)  # and the process is killed before it could copy this
    fetched: list[str] = []
    monkeypatch.setattr(mirror, "get_file", lambda place, path: fetched.append(place.path))
    mirror_of(uri, tmp_path / "a").fetch(with_state=True)
    run = tmp_path / "a" / "run"
    assert [path.name for path in (run / "state").iterdir()] == ["step_1"]
    assert is_whole(run / "state" / "step_1")
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1]
    assert fetched == []


def test_a_state_that_was_not_asked_for_is_not_copied_over_a_newer_one(uri: str, tmp_path: Path) -> None:
    here, there = mirror_of(uri, tmp_path / "a"), mirror_of(uri, tmp_path / "b")
    write_step(tmp_path / "a", 1)
    here.push()
    there.fetch(with_state=True)
    write_step(tmp_path / "b", 2)
    there.push()
    newest = names(there.place)
    here.fetch(with_state=False)
    here.push()
    assert names(there.place) == newest


def test_a_state_that_is_damaged_on_the_node_alone_is_fetched_again(uri: str, tmp_path: Path) -> None:
    write_step(tmp_path / "a", 1)
    mirror_of(uri, tmp_path / "a").push()
    state = tmp_path / "a" / "run" / "state" / "step_1"
    (state / "state.safetensors").write_bytes(b"half of it")
    again = mirror_of(uri, tmp_path / "a")
    again.fetch(with_state=True)
    assert is_whole(state)
    assert again.notes == []


def test_kept_checkpoints_stay_in_storage_alone(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step, state=False)
        write_checkpoint(tmp_path / "a" / "kept" / f"global_step_{step}", tensors(step), {"step": step})
        here.push()
    assert list((tmp_path / "a" / "kept").iterdir()) == []
    assert sealed(listing(here.place)) == [(2, "kept/global_step_2"), (1, "kept/global_step_1")]
    mirror_of(uri, tmp_path / "b").fetch(with_state=True)  # without a rolling state a kept one will do
    assert is_whole(tmp_path / "b" / "kept" / "global_step_2")
    assert not (tmp_path / "b" / "kept" / "global_step_1").exists()


@pytest.mark.parametrize("name", [SUMS, "state.json", "state.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not_whole(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "state", tensors(1), {"step": 1})
    assert is_whole(tmp_path / "state")
    (tmp_path / "state" / name).unlink()
    assert not is_whole(tmp_path / "state")


# The real trial, as Ray Tune starts it, on one node after the other.


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Says on which node the next process starts: where its scratch folder is."""
    alive: list[Trial] = []
    monkeypatch.setattr(mirror, "_HOLD_PATIENCE_S", 0.0)

    def go(name: str, **given: Any) -> Trial:
        monkeypatch.setenv("TUNE_STUDY_SCRATCH", str(tmp_path / name))
        trial = Trial(given)
        alive.append(trial)
        return trial

    before = os.environ.get("TUNE_STUDY_RUN_DIR")
    yield go
    for trial in alive:
        trial.cleanup()
    if before is None:
        os.environ.pop("TUNE_STUDY_RUN_DIR", None)


def stored(uri: str, **changes: object) -> Row:
    return {**config(Path("/nowhere"), **changes), "storage": uri}


def kill(trial: Trial) -> None:
    """The process is gone, with its lock and without a word; what its node has on disk stays."""
    trial.mirrored._held.close()
    trial.training.close()
    trial.training = trial.mirrored = None


def stored_rows(uri: str, folder: Path) -> list[Row]:
    fetched = Mirror(open_place(uri).at("runs/kl-01-s0"), folder / "run", folder / "kept", 0.0, lambda: False)
    fetched.fetch(with_state=True)
    return read_rows(folder / "run" / "metrics.jsonl")


def test_a_run_killed_on_one_node_goes_on_on_another_with_the_same_rows(
    uri: str, tmp_path: Path, node: Callable[..., Trial], straight: Straight
) -> None:
    first = node("a", **stored(uri))
    assert [first.step()["step"] for _ in range(2)] == [1, 2]
    kill(first)
    second = node("b", **stored(uri))
    assert second.step()["step"] == 3
    assert not (tmp_path / "nowhere").exists()
    rows = stored_rows(uri, tmp_path / "look")
    assert [timeless(row) for row in rows] == [timeless(row) for row in read_rows(straight[0] / "runs/r/metrics.jsonl")]
    theirs, ours = (
        read_checkpoint(folder / "state" / "step_3")[0]
        for folder in (straight[0] / "runs" / "r", tmp_path / "look/run")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_finished_run_is_replayed_from_storage_without_its_state(
    uri: str, tmp_path: Path, node: Callable[..., Trial]
) -> None:
    first = node("a", **stored(uri, trainer__total_training_steps=1))
    row = first.step()
    first.cleanup()
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").rglob("*.jsonl"))
    again = node("b", **stored(uri, finished=True, trainer__total_training_steps=1))
    assert timeless(again.step()) == timeless({**row, "done": True})
    assert not list((tmp_path / "b").rglob(SUMS))


def test_two_processes_of_a_node_never_train_one_run(uri: str, node: Callable[..., Trial]) -> None:
    node("a", **stored(uri)).step()
    with pytest.raises(RuntimeError, match="is still held by another process") as raised:
        node("a", **stored(uri)).step()
    assert raised.value.failure.is_retried


def test_what_a_dead_process_of_the_run_left_on_the_node_is_ended(
    uri: str, tmp_path: Path, node: Callable[..., Trial]
) -> None:
    given = stored(uri, finished=False)
    run_dir = mirror.scratch(uri, {"TUNE_STUDY_SCRATCH": str(tmp_path / "a")}) / given["run_id"] / "run"
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    left, other = (
        subprocess.Popen(sleeps, env={**os.environ, "TUNE_STUDY_RUN_DIR": str(folder)}, start_new_session=True)
        for folder in (run_dir, run_dir.parent.parent / "another" / "run")
    )
    node("a", **given).step()
    assert not psutil.pid_exists(left.pid)
    assert other.poll() is None
    left.wait()
    other.kill()
    other.wait()


def test_a_request_to_stop_reaches_the_node_and_the_state_is_saved(uri: str, node: Callable[..., Trial]) -> None:
    run = node("a", **stored(uri, trainer__resume_every=3))
    assert run.step()["saved"] is False
    put_bytes(open_place(uri).at(mirror.INTERRUPT), b"")
    assert run.step()["saved"] is True
    assert [step for step, _ in sealed(listing(open_place(uri).at("runs/kl-01-s0")))] == [2]


def test_a_run_whose_storage_is_gone_fails_as_storage(tmp_path: Path, node: Callable[..., Trial]) -> None:
    folder = tmp_path / "shared"
    run = node("a", **stored(str(folder)))
    run.step()
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with pytest.raises(RuntimeError) as raised:
        run.step()
    assert (raised.value.failure.kind, raised.value.failure.is_retried) == ("storage", False)

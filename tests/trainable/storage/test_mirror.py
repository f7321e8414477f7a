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

from tests.fakes.trials import Row, UninterruptedRun, drop_times, make_trial_config
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint, write_rolling_checkpoint
from trainable.runs.failures import StorageError
from trainable.runs.run_files import CHECKSUMS_FILE, append_json_line, read_rows
from trainable.storage import mirror
from trainable.storage.mirror import (
    Mirror,
    compute_line_file_sizes,
    fetch_lines,
    find_complete_checkpoints,
    is_checkpoint_intact,
    push_lines,
    upload_checkpoint,
)
from trainable.storage.remote import StoragePath, get_bytes, list_files, open_storage, put_bytes, put_file
from trainable.trial import Trial


@pytest.fixture(params=["s3", "path"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    """A folder of its own in each kind of storage."""
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://shelf/{name}?{s3}" if request.param == "s3" else str(tmp_path / "shared")


def names(place: StoragePath) -> list[str]:
    return sorted(list_files(place))


def mirror_of(uri: str, node: Path) -> Mirror:
    return Mirror(open_storage(uri), node / "run", node / "kept", patience=0.0, should_stop=lambda: False)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(100.0) + step}


def write_step(node: Path, step: int, state: bool = True) -> None:
    """What a run writes in one step."""
    (node / "run").mkdir(parents=True, exist_ok=True)
    append_json_line(node / "run" / "metrics.jsonl", {"step": step})
    if state:
        write_rolling_checkpoint(node / "run" / "state", step, tensors(step), {"step": step}, 2)


# Rows.


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.binary(max_size=40), min_size=1, max_size=8), part=st.integers(1, 30))
def test_lines_that_were_copied_in_pieces_are_the_file(lines: list[bytes], part: int, tmp_path: Path) -> None:
    place = open_storage(str(tmp_path / "storage"))
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
            pushed = push_lines(place.joinpath("metrics.jsonl"), source, pushed)
            sizes = compute_line_file_sizes({name: info.size for name, info in list_files(place).items()})
            fetch_lines(place.joinpath("metrics.jsonl"), sizes.get("metrics.jsonl", 0), followed)
        fetch_lines(place.joinpath("metrics.jsonl"), pushed, whole)
    finally:
        mirror.PART_BYTES = before
    content = b"".join(lines)
    assert (whole.read_bytes() if content else b"") == content
    assert (followed.read_bytes() if content else b"") == content
    assert {name: info.size for name, info in list_files(place).items()} == {
        f"metrics.jsonl/{index:06}": min(part, len(content) - index * part) for index in range(-(-len(content) // part))
    }


def test_of_a_step_only_the_last_part_is_written_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PART_BYTES", 10)
    place, path = open_storage(uri), tmp_path / "metrics.jsonl"
    path.write_bytes(b"0123456789abcde")
    pushed = push_lines(place, path, 0)
    put_bytes(place.joinpath("000000"), b"untouched!")
    path.write_bytes(b"0123456789abcdefghijKL")
    assert push_lines(place, path, pushed) == 22
    assert [get_bytes(place.joinpath(name)) for name in names(place)] == [b"untouched!", b"abcdefghij", b"KL"]


# Checkpoints.


def test_a_run_is_copied_after_each_step_and_fetched_elsewhere(uri: str, tmp_path: Path) -> None:
    here, there = mirror_of(uri, tmp_path / "a"), mirror_of(uri, tmp_path / "b")
    for step in (1, 2, 3):
        write_step(tmp_path / "a", step)
        (tmp_path / "a" / "run" / "other.json").write_text(str(step))
        here.push()
    assert names(here.storage_path) == sorted(
        [
            "metrics.jsonl/000000",
            "other.json",
            *(
                f"state/step_{step}/{name}"
                for step in (2, 3)
                for name in (CHECKSUMS_FILE, "state.json", "state.safetensors")
            ),
        ]
    )
    there.fetch(with_checkpoint=True)
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
        put_file(here.storage_path.joinpath(f"state/step_2/{name}"), whole / name)
    there = mirror_of(uri, tmp_path / "b")
    there.fetch(with_checkpoint=True)
    assert [path.name for path in (tmp_path / "b" / "run" / "state").iterdir()] == ["step_1"]
    write_step(tmp_path / "b", 2)
    there.push()
    assert [step for step, _ in find_complete_checkpoints(list_files(there.storage_path))] == [2, 1]


def test_a_state_is_not_whole_while_another_of_its_name_is_copied(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = open_storage(uri).joinpath("state/step_1"), tmp_path / "state"
    write_checkpoint(folder, tensors(1), {"step": 1})
    upload_checkpoint(place, folder)
    write_checkpoint(folder, tensors(7), {"step": 1})
    seen: list[list[str]] = []

    def put_and_look(target: StoragePath, path: Path) -> None:
        put_file(target, path)
        seen.append(names(place))

    monkeypatch.setattr(mirror, "put_file", put_and_look)
    upload_checkpoint(place, folder)
    assert [CHECKSUMS_FILE in found for found in seen] == [False, False, True]
    before = len(seen)
    upload_checkpoint(place, folder)  # the same again is there already
    assert len(seen) == before


def test_a_file_of_the_same_size_and_time_is_another_one(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    for text in ("1", "2"):
        path = tmp_path / "a" / "run" / "other.json"
        path.write_text(text)
        os.utime(path, ns=(0, 0))
        here.push()
        assert get_bytes(here.storage_path.joinpath("other.json")) == text.encode()


def test_the_state_before_stays_until_the_next_is_whole_and_rows_come_first(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    here.push()
    write_step(tmp_path / "a", 2)
    shutil.rmtree(tmp_path / "a" / "run" / "state" / "step_1")

    def cut(place: StoragePath, path: Path) -> None:
        raise PermissionError(13, "the storage refuses this")

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "put_file", cut)
        with pytest.raises(StorageError):
            here.push()
    assert find_complete_checkpoints(list_files(here.storage_path)) == [(1, "state/step_1")]
    assert get_bytes(here.storage_path.joinpath("metrics.jsonl/000000")).count(b"\n") == 2
    here.push()
    assert find_complete_checkpoints(list_files(here.storage_path)) == [(2, "state/step_2")]


def test_a_state_whose_removal_was_cut_is_not_whole(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = mirror_of(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    here.push()
    monkeypatch.setattr(mirror, "remove_folder", lambda place: None)
    mirror.remove_checkpoint(here.storage_path.joinpath("state/step_1"))
    assert find_complete_checkpoints(list_files(here.storage_path)) == []
    assert "state/step_1/state.safetensors" in list_files(here.storage_path)


def test_a_damaged_state_in_storage_is_named_and_the_one_before_is_used(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step)
        here.push()
    put_bytes(here.storage_path.joinpath("state/step_2/state.safetensors"), b"something else")
    there = mirror_of(uri, tmp_path / "b")
    there.fetch(with_checkpoint=True)
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
    mirror_of(uri, tmp_path / "a").fetch(with_checkpoint=True)
    run = tmp_path / "a" / "run"
    assert [path.name for path in (run / "state").iterdir()] == ["step_1"]
    assert is_checkpoint_intact(run / "state" / "step_1")
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1]
    assert fetched == []


def test_a_state_that_was_not_asked_for_is_not_copied_over_a_newer_one(uri: str, tmp_path: Path) -> None:
    here, there = mirror_of(uri, tmp_path / "a"), mirror_of(uri, tmp_path / "b")
    write_step(tmp_path / "a", 1)
    here.push()
    there.fetch(with_checkpoint=True)
    write_step(tmp_path / "b", 2)
    there.push()
    newest = names(there.storage_path)
    here.fetch(with_checkpoint=False)
    here.push()
    assert names(there.storage_path) == newest


def test_a_state_that_is_damaged_on_the_node_alone_is_fetched_again(uri: str, tmp_path: Path) -> None:
    write_step(tmp_path / "a", 1)
    mirror_of(uri, tmp_path / "a").push()
    state = tmp_path / "a" / "run" / "state" / "step_1"
    (state / "state.safetensors").write_bytes(b"half of it")
    again = mirror_of(uri, tmp_path / "a")
    again.fetch(with_checkpoint=True)
    assert is_checkpoint_intact(state)
    assert again.notes == []


def test_kept_checkpoints_stay_in_storage_alone(uri: str, tmp_path: Path) -> None:
    here = mirror_of(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step, state=False)
        write_checkpoint(tmp_path / "a" / "kept" / f"global_step_{step}", tensors(step), {"step": step})
        here.push()
    assert list((tmp_path / "a" / "kept").iterdir()) == []
    assert find_complete_checkpoints(list_files(here.storage_path)) == [
        (2, "kept/global_step_2"),
        (1, "kept/global_step_1"),
    ]
    mirror_of(uri, tmp_path / "b").fetch(with_checkpoint=True)  # without a rolling state a kept one will do
    assert is_checkpoint_intact(tmp_path / "b" / "kept" / "global_step_2")
    assert not (tmp_path / "b" / "kept" / "global_step_1").exists()


@pytest.mark.parametrize("name", [CHECKSUMS_FILE, "state.json", "state.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not_whole(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "state", tensors(1), {"step": 1})
    assert is_checkpoint_intact(tmp_path / "state")
    (tmp_path / "state" / name).unlink()
    assert not is_checkpoint_intact(tmp_path / "state")


# The real trial, as Ray Tune starts it, on one node after the other.


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Says on which node the next process starts: where its scratch folder is."""
    alive: list[Trial] = []
    monkeypatch.setattr(mirror, "_LOCK_TIMEOUT_S", 0.0)

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
    return {**make_trial_config(Path("/nowhere"), **changes), "storage": uri}


def kill(trial: Trial) -> None:
    """The process is gone, with its lock and without a word; what its node has on disk stays."""
    trial.mirror._lock_file.close()
    trial.training.close()
    trial.training = trial.mirror = None


def stored_rows(uri: str, folder: Path) -> list[Row]:
    fetched = Mirror(open_storage(uri).joinpath("runs/kl-01-s0"), folder / "run", folder / "kept", 0.0, lambda: False)
    fetched.fetch(with_checkpoint=True)
    return read_rows(folder / "run" / "metrics.jsonl")


def test_a_run_killed_on_one_node_goes_on_on_another_with_the_same_rows(
    uri: str, tmp_path: Path, node: Callable[..., Trial], straight: UninterruptedRun
) -> None:
    first = node("a", **stored(uri))
    assert [first.step()["step"] for _ in range(2)] == [1, 2]
    kill(first)
    second = node("b", **stored(uri))
    assert second.step()["step"] == 3
    assert not (tmp_path / "nowhere").exists()
    rows = stored_rows(uri, tmp_path / "look")
    assert [drop_times(row) for row in rows] == [
        drop_times(row) for row in read_rows(straight[0] / "runs/r/metrics.jsonl")
    ]
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
    assert drop_times(again.step()) == drop_times({**row, "done": True})
    assert not list((tmp_path / "b").rglob(CHECKSUMS_FILE))


def test_two_processes_of_a_node_never_train_one_run(uri: str, node: Callable[..., Trial]) -> None:
    node("a", **stored(uri)).step()
    with pytest.raises(RuntimeError, match="is still in use by another process") as raised:
        node("a", **stored(uri)).step()
    assert raised.value.failure.is_retried


def test_what_a_dead_process_of_the_run_left_on_the_node_is_ended(
    uri: str, tmp_path: Path, node: Callable[..., Trial]
) -> None:
    given = stored(uri, finished=False)
    run_dir = mirror.make_scratch_path(uri, {"TUNE_STUDY_SCRATCH": str(tmp_path / "a")}) / given["run_id"] / "run"
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
    put_bytes(open_storage(uri).joinpath(mirror.INTERRUPT_FILE), b"")
    assert run.step()["saved"] is True
    assert [step for step, _ in find_complete_checkpoints(list_files(open_storage(uri).joinpath("runs/kl-01-s0")))] == [
        2
    ]


def test_a_run_whose_storage_is_gone_fails_as_storage(tmp_path: Path, node: Callable[..., Trial]) -> None:
    folder = tmp_path / "shared"
    run = node("a", **stored(str(folder)))
    run.step()
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with pytest.raises(RuntimeError) as raised:
        run.step()
    assert (raised.value.failure.kind, raised.value.failure.is_retried) == ("storage", False)

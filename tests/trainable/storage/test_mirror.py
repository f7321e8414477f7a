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
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fakes.lines import append_record
from tests.fakes.trials import Row, UninterruptedRun, drop_times, make_trial_config
from tests.strategies.examples import draw_examples
from trainable.runs.checkpoint import (
    iter_checkpoints,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
    write_rolling_checkpoint,
)
from trainable.runs.failures import StorageError
from trainable.runs.run_files import CHECKSUMS_FILE, read_rows
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
from trainable.trial import PPO


@pytest.fixture(params=["s3", "path"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    """A separate folder in each kind of storage."""
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://shelf/{name}?{s3}" if request.param == "s3" else str(tmp_path / "shared")


def list_names(place: StoragePath) -> list[str]:
    return sorted(list_files(place))


def make_mirror(uri: str, node: Path, best_column: str = "") -> Mirror:
    return Mirror(open_storage(uri), node / "run", node / "kept", 0.0, lambda: False, best_column)


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(100.0) + step}


def write_step(node: Path, step: int, with_state: bool = True) -> None:
    """Write the files that a run writes in one step."""
    (node / "run").mkdir(parents=True, exist_ok=True)
    append_record(node / "run" / "metrics.jsonl", {"step": step})
    if with_state:
        write_rolling_checkpoint(node / "run" / "state", step, make_tensors(step), {"step": step}, 2)


# Rows.


@draw_examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.binary(max_size=40), min_size=1, max_size=8), part_bytes=st.integers(1, 30))
def test_lines_that_were_copied_in_pieces_are_the_file(lines: list[bytes], part_bytes: int, tmp_path: Path) -> None:
    place = open_storage(str(tmp_path / "storage"))
    shutil.rmtree(tmp_path / "storage", ignore_errors=True)
    source, fetched, followed_copy = tmp_path / "source", tmp_path / "whole", tmp_path / "followed"
    for path in (source, fetched, followed_copy):
        path.unlink(missing_ok=True)
    part_bytes_before, mirror.PART_BYTES = mirror.PART_BYTES, part_bytes
    try:
        pushed = 0
        for line in lines:
            with source.open("ab") as file:
                file.write(line)
            pushed = push_lines(place.joinpath("metrics.jsonl"), source, pushed)
            sizes = compute_line_file_sizes({name: file_info.size for name, file_info in list_files(place).items()})
            fetch_lines(place.joinpath("metrics.jsonl"), sizes.get("metrics.jsonl", 0), followed_copy)
        fetch_lines(place.joinpath("metrics.jsonl"), pushed, fetched)
    finally:
        mirror.PART_BYTES = part_bytes_before
    content = b"".join(lines)
    assert (fetched.read_bytes() if content else b"") == content
    assert (followed_copy.read_bytes() if content else b"") == content
    assert {name: file_info.size for name, file_info in list_files(place).items()} == {
        f"metrics.jsonl/{index:06}": min(part_bytes, len(content) - index * part_bytes)
        for index in range(-(-len(content) // part_bytes))
    }


def test_only_the_last_part_of_a_line_file_is_written_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PART_BYTES", 10)
    place, path = open_storage(uri), tmp_path / "metrics.jsonl"
    path.write_bytes(b"0123456789abcde")
    pushed = push_lines(place, path, 0)
    put_bytes(place.joinpath("000000"), b"untouched!")
    path.write_bytes(b"0123456789abcdefghijKL")
    assert push_lines(place, path, pushed) == 22
    assert [get_bytes(place.joinpath(name)) for name in list_names(place)] == [b"untouched!", b"abcdefghij", b"KL"]


# Checkpoints.


def test_a_run_is_copied_after_each_step_and_fetched_elsewhere(uri: str, tmp_path: Path) -> None:
    first_mirror, second_mirror = make_mirror(uri, tmp_path / "a"), make_mirror(uri, tmp_path / "b")
    for step in (1, 2, 3):
        write_step(tmp_path / "a", step)
        (tmp_path / "a" / "run" / "other.json").write_text(str(step))
        first_mirror.push()
    assert list_names(first_mirror.storage_path) == sorted(
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
    second_mirror.fetch()
    run = tmp_path / "b" / "run"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    assert (run / "other.json").read_text() == "3"
    assert [path.name for path in (run / "state").iterdir()] == ["step_3"]
    state, values = read_checkpoint(run / "state" / "step_3")
    assert torch.equal(state["w"], make_tensors(3)["w"])
    assert values == {"step": 3}
    assert second_mirror.notes == []


def test_a_state_that_was_cut_in_its_upload_is_not_used(uri: str, tmp_path: Path) -> None:
    write_step(tmp_path / "a", 1)
    first_mirror = make_mirror(uri, tmp_path / "a")
    first_mirror.push()
    write_step(tmp_path / "a", 2)
    state_folder = tmp_path / "a" / "run" / "state" / "step_2"
    for name in ("state.json", "state.safetensors"):  # the process dies before it copies the checksums
        put_file(first_mirror.storage_path.joinpath(f"state/step_2/{name}"), state_folder / name)
    second_mirror = make_mirror(uri, tmp_path / "b")
    second_mirror.fetch()
    assert [path.name for path in (tmp_path / "b" / "run" / "state").iterdir()] == ["step_1"]
    write_step(tmp_path / "b", 2)
    second_mirror.push()
    assert [step for step, _ in find_complete_checkpoints(list_files(second_mirror.storage_path))] == [2, 1]


def test_a_state_is_not_whole_while_another_of_its_name_is_copied(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = open_storage(uri).joinpath("state/step_1"), tmp_path / "state"
    write_checkpoint(folder, make_tensors(1), {"step": 1})
    upload_checkpoint(place, folder)
    write_checkpoint(folder, make_tensors(7), {"step": 1})
    listings: list[list[str]] = []

    def put_and_list(target: StoragePath, path: Path) -> None:
        put_file(target, path)
        listings.append(list_names(place))

    monkeypatch.setattr(mirror, "put_file", put_and_list)
    upload_checkpoint(place, folder)
    assert [CHECKSUMS_FILE in listing for listing in listings] == [False, False, True]
    upload_count = len(listings)
    upload_checkpoint(place, folder)  # the same content is already there
    assert len(listings) == upload_count


def test_a_file_of_the_same_size_and_time_is_another_one(uri: str, tmp_path: Path) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    for text in ("1", "2"):
        path = tmp_path / "a" / "run" / "other.json"
        path.write_text(text)
        os.utime(path, ns=(0, 0))
        mirror_on_node.push()
        assert get_bytes(mirror_on_node.storage_path.joinpath("other.json")) == text.encode()


def test_the_state_before_stays_until_the_next_is_whole_and_rows_come_first(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    mirror_on_node.push()
    write_step(tmp_path / "a", 2)
    shutil.rmtree(tmp_path / "a" / "run" / "state" / "step_1")

    def refuse(place: StoragePath, path: Path) -> None:
        raise PermissionError(13, "the storage refuses this")

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "put_file", refuse)
        with pytest.raises(StorageError):
            mirror_on_node.push()
    assert find_complete_checkpoints(list_files(mirror_on_node.storage_path)) == [(1, "state/step_1")]
    assert get_bytes(mirror_on_node.storage_path.joinpath("metrics.jsonl/000000")).count(b"\n") == 2
    mirror_on_node.push()
    assert find_complete_checkpoints(list_files(mirror_on_node.storage_path)) == [(2, "state/step_2")]


def test_only_rolling_checkpoints_are_removed_from_storage(uri: str, tmp_path: Path) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    for name in ("step_7/file", "step_x/file", "my_step_7/file", "notes/file"):
        put_bytes(mirror_on_node.storage_path.joinpath(f"state/{name}"), b"")
    write_step(tmp_path / "a", 8)
    mirror_on_node.push()
    names = {name.split("/")[1] for name in list_files(mirror_on_node.storage_path) if name.startswith("state/")}
    assert names == {"step_8", "step_x", "my_step_7", "notes"}


def test_states_that_an_ended_run_removes_are_removed_from_storage(uri: str, tmp_path: Path) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step)
        mirror_on_node.push()
    remove_checkpoints(tmp_path / "a" / "run" / "state", kept_step=None)
    mirror_on_node.push()
    assert find_complete_checkpoints(list_files(mirror_on_node.storage_path)) == []
    assert get_bytes(mirror_on_node.storage_path.joinpath("metrics.jsonl/000000")).count(b"\n") == 2


@pytest.mark.long
@pytest.mark.parametrize(("best_column", "states"), [("val_success", [2, 5]), ("", [5])])
def test_the_state_of_the_best_validation_reaches_another_node(
    uri: str, tmp_path: Path, best_column: str, states: list[int]
) -> None:
    first, second = (make_mirror(uri, tmp_path / node, best_column) for node in "ab")
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.4), (4, 0.5), (5, 0.6)):
        folder = tmp_path / "a" / "run"
        folder.mkdir(parents=True, exist_ok=True)
        append_record(folder / "metrics.jsonl", {"step": step, "val_success": value})
        best_step = 2 if best_column and step > 2 else None
        write_rolling_checkpoint(folder / "state", step, make_tensors(step), {"step": step}, 2, best_step)
        first.push()
    second.fetch()
    fetched = tmp_path / "b" / "run" / "state"
    assert sorted(step for step, _ in iter_checkpoints(fetched)) == states
    # The next push does not take it for one that the run has removed.
    append_record(tmp_path / "b" / "run" / "metrics.jsonl", {"step": 6, "val_success": 0.2})
    write_rolling_checkpoint(fetched, 6, make_tensors(6), {"step": 6}, 2, 2 if best_column else None)
    second.push()
    stored = {step for step, _ in find_complete_checkpoints(list_files(second.storage_path))}
    assert stored == {*states, 6}


def test_a_state_whose_removal_was_cut_is_not_whole(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    mirror_on_node.push()
    monkeypatch.setattr(mirror, "remove_folder", lambda place: None)
    mirror.remove_checkpoint(mirror_on_node.storage_path.joinpath("state/step_1"))
    assert find_complete_checkpoints(list_files(mirror_on_node.storage_path)) == []
    assert "state/step_1/state.safetensors" in list_files(mirror_on_node.storage_path)


def test_a_damaged_state_in_storage_is_named_and_the_one_before_is_used(uri: str, tmp_path: Path) -> None:
    first_mirror = make_mirror(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step)
        first_mirror.push()
    put_bytes(first_mirror.storage_path.joinpath("state/step_2/state.safetensors"), b"something else")
    second_mirror = make_mirror(uri, tmp_path / "b")
    second_mirror.fetch()
    assert [path.name for path in (tmp_path / "b" / "run" / "state").iterdir()] == ["step_1"]
    assert second_mirror.notes == ["state/step_2 in storage is damaged and is not used"]


def test_what_a_node_has_beyond_storage_is_removed_and_what_it_has_is_not_fetched_again(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    write_step(tmp_path / "a", 1)
    mirror_on_node.push()
    write_step(tmp_path / "a", 2)  # the process is killed before it copies this step
    fetched: list[str] = []
    monkeypatch.setattr(mirror, "get_file", lambda place, path: fetched.append(place.path))
    make_mirror(uri, tmp_path / "a").fetch()
    run = tmp_path / "a" / "run"
    assert [path.name for path in (run / "state").iterdir()] == ["step_1"]
    assert is_checkpoint_intact(run / "state" / "step_1")
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1]
    assert fetched == []


def test_a_state_that_was_not_asked_for_is_not_copied_over_a_newer_one(uri: str, tmp_path: Path) -> None:
    first_mirror, second_mirror = make_mirror(uri, tmp_path / "a"), make_mirror(uri, tmp_path / "b")
    write_step(tmp_path / "a", 1)
    first_mirror.push()
    second_mirror.fetch()
    write_step(tmp_path / "b", 2)
    second_mirror.push()
    newest = list_names(second_mirror.storage_path)
    first_mirror.fetch(max_checkpoints=0)
    first_mirror.push()
    assert list_names(second_mirror.storage_path) == newest


def test_a_state_that_is_damaged_on_the_node_alone_is_fetched_again(uri: str, tmp_path: Path) -> None:
    write_step(tmp_path / "a", 1)
    make_mirror(uri, tmp_path / "a").push()
    state = tmp_path / "a" / "run" / "state" / "step_1"
    (state / "state.safetensors").write_bytes(b"half of it")
    resumed = make_mirror(uri, tmp_path / "a")
    resumed.fetch()
    assert is_checkpoint_intact(state)
    assert resumed.notes == []


def test_kept_checkpoints_stay_in_storage_alone(uri: str, tmp_path: Path) -> None:
    mirror_on_node = make_mirror(uri, tmp_path / "a")
    for step in (1, 2):
        write_step(tmp_path / "a", step, with_state=False)
        write_checkpoint(tmp_path / "a" / "kept" / f"global_step_{step}", make_tensors(step), {"step": step})
        mirror_on_node.push()
    assert list((tmp_path / "a" / "kept").iterdir()) == []
    assert find_complete_checkpoints(list_files(mirror_on_node.storage_path)) == [
        (2, "kept/global_step_2"),
        (1, "kept/global_step_1"),
    ]
    make_mirror(uri, tmp_path / "b").fetch()  # a saved checkpoint is enough without a rolling one
    assert is_checkpoint_intact(tmp_path / "b" / "kept" / "global_step_2")
    assert not (tmp_path / "b" / "kept" / "global_step_1").exists()


@pytest.mark.parametrize("name", [CHECKSUMS_FILE, "state.json", "state.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not_whole(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "state", make_tensors(1), {"step": 1})
    assert is_checkpoint_intact(tmp_path / "state")
    (tmp_path / "state" / name).unlink()
    assert not is_checkpoint_intact(tmp_path / "state")


# The real trial, started as Ray Tune starts it, on one node after the other.


@pytest.fixture
def start_on_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Start a trial on a named node, which means with the scratch folder of that node."""
    trials: list[PPO] = []
    monkeypatch.setattr(mirror, "_LOCK_TIMEOUT_S", 0.0)

    def start(name: str, **config: Any) -> PPO:
        monkeypatch.setenv("TUNE_STUDY_SCRATCH", str(tmp_path / name))
        trial = PPO(config)
        trials.append(trial)
        return trial

    run_dir_before = os.environ.get("TUNE_STUDY_RUN_DIR")
    yield start
    for trial in trials:
        trial.cleanup()
    if run_dir_before is None:
        os.environ.pop("TUNE_STUDY_RUN_DIR", None)


def make_stored_config(uri: str, **changes: object) -> Row:
    return {**make_trial_config(Path("/nowhere"), **changes), "storage": uri}


def kill(trial: PPO) -> None:
    """Drop a trial as if its process were killed: its lock is free, and the files on its node stay."""
    trial.mirror._lock_file.close()
    trial.training.close()
    trial.training = trial.mirror = None


def fetch_rows(uri: str, folder: Path) -> list[Row]:
    run_mirror = Mirror(
        open_storage(uri).joinpath("runs/kl-01-s0"), folder / "run", folder / "kept", 0.0, lambda: False
    )
    run_mirror.fetch()
    return read_rows(folder / "run" / "metrics.jsonl")


@pytest.mark.long
def test_a_run_killed_on_one_node_goes_on_on_another_with_the_same_rows(
    uri: str, tmp_path: Path, start_on_node: Callable[..., PPO], uninterrupted_run: UninterruptedRun
) -> None:
    first = start_on_node("a", **make_stored_config(uri))
    assert [first.step()["step"] for _ in range(2)] == [1, 2]
    kill(first)
    second = start_on_node("b", **make_stored_config(uri))
    assert second.step()["step"] == 3
    assert not (tmp_path / "nowhere").exists()
    rows = fetch_rows(uri, tmp_path / "look")
    assert [drop_times(row) for row in rows] == [
        drop_times(row) for row in read_rows(uninterrupted_run[0] / "runs/r/metrics.jsonl")
    ]
    expected_tensors, actual_tensors = (
        read_checkpoint(folder / "state" / "step_3")[0]
        for folder in (uninterrupted_run[0] / "runs" / "r", tmp_path / "look/run")
    )
    assert expected_tensors.keys() == actual_tensors.keys()
    assert all(torch.equal(expected_tensors[name], actual_tensors[name]) for name in expected_tensors)


@pytest.mark.long
def test_a_finished_run_is_replayed_from_storage_without_its_state(
    uri: str, tmp_path: Path, start_on_node: Callable[..., PPO]
) -> None:
    first = start_on_node("a", **make_stored_config(uri, trainer__total_training_steps=1))
    row = first.step()
    first.cleanup()
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").rglob("*.jsonl"))
    resumed = start_on_node("b", **make_stored_config(uri, finished=True, trainer__total_training_steps=1))
    assert drop_times(resumed.step()) == drop_times({**row, "done": True})
    assert not list((tmp_path / "b").rglob(CHECKSUMS_FILE))


def test_two_processes_of_a_node_never_train_one_run(uri: str, start_on_node: Callable[..., PPO]) -> None:
    start_on_node("a", **make_stored_config(uri)).step()
    with pytest.raises(RuntimeError, match="is still in use by another process") as raised:
        start_on_node("a", **make_stored_config(uri)).step()
    assert raised.value.failure.is_retried


def test_what_a_dead_process_of_the_run_left_on_the_node_is_ended(
    uri: str, tmp_path: Path, start_on_node: Callable[..., PPO]
) -> None:
    config = make_stored_config(uri, finished=False)
    run_dir = mirror.make_scratch_path(uri, {"TUNE_STUDY_SCRATCH": str(tmp_path / "a")}) / config["run_id"] / "run"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    orphan, other_process = (
        subprocess.Popen(command, env={**os.environ, "TUNE_STUDY_RUN_DIR": str(folder)}, start_new_session=True)
        for folder in (run_dir, run_dir.parent.parent / "another" / "run")
    )
    start_on_node("a", **config).step()
    assert not psutil.pid_exists(orphan.pid)
    assert other_process.poll() is None
    orphan.wait()
    other_process.kill()
    other_process.wait()


@pytest.mark.long
def test_a_request_to_stop_reaches_the_node_and_the_state_is_saved(uri: str, start_on_node: Callable[..., PPO]) -> None:
    trial = start_on_node("a", **make_stored_config(uri, trainer__resume_every=3))
    assert trial.step()["saved"] is False
    put_bytes(open_storage(uri).joinpath(mirror.INTERRUPT_FILE), b"")
    assert trial.step()["saved"] is True
    assert [step for step, _ in find_complete_checkpoints(list_files(open_storage(uri).joinpath("runs/kl-01-s0")))] == [
        2
    ]


def test_a_run_whose_storage_is_gone_fails_as_storage(tmp_path: Path, start_on_node: Callable[..., PPO]) -> None:
    folder = tmp_path / "shared"
    trial = start_on_node("a", **make_stored_config(str(folder)))
    trial.step()
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with pytest.raises(RuntimeError) as raised:
        trial.step()
    assert (raised.value.failure.kind, raised.value.failure.is_retried) == ("storage", False)


def test_the_default_scratch_folder_must_be_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror.tempfile, "gettempdir", lambda: str(tmp_path))
    base_folder = tmp_path / f"tune_study_{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    base_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link or belongs to another user: set TUNE_STUDY_SCRATCH"):
        mirror.make_scratch_folder("s3://a/b", {})
    assert list((tmp_path / "elsewhere").iterdir()) == []
    base_folder.unlink()
    folder = mirror.make_scratch_folder("s3://a/b", {})
    assert folder.parent == base_folder
    assert base_folder.stat().st_mode & 0o777 == 0o700
    # A folder that the user chose may have any mode, and may be a link.
    base_folder.rename(tmp_path / "chosen")
    base_folder.symlink_to(tmp_path / "chosen")
    assert mirror.make_scratch_folder("s3://a/b", {"TUNE_STUDY_SCRATCH": str(base_folder)}).is_dir()


# Trials of several runs.


def make_sandbox_config(uri: str | None, folder: Path, finished: bool = False) -> Row:
    """The configuration of a trial that trains two seeds of an update rule, as `make_trial_config` of a study."""
    sandbox_settings = {
        "task": "token_reversal",
        "seq_len": 4,
        "d_model": 8,
        "batch_size": 16,
        "method": "DG",
        "trainer.total_training_steps": 12,
        "trainer.test_freq": 2,
        "trainer.resume_every": 2,
    }
    runs = [
        {
            "run_id": f"DG-s{seed}",
            "seed": seed,
            "run_dir": str(folder / f"r{seed}"),
            "checkpoint_dir": str(folder / "k"),
        }
        for seed in (0, 1)
    ]
    return {
        **make_trial_config(folder, finished=finished),
        "run_id": "DG",
        "settings": sandbox_settings,
        "runs": runs,
        "side_by_side": True,
        "family": "trainable.families:UPDATE_RULES",
        "stop_rules": [],
        "storage": uri,
    }


def train_to_end(trial: PPO) -> None:
    while not trial.step()["done"]:
        continue


@pytest.mark.long
def test_the_seeds_of_an_arm_go_on_on_another_node_from_a_step_that_all_of_them_have(
    uri: str, tmp_path: Path, start_on_node: Callable[..., PPO]
) -> None:
    """The node died after it had pushed the newest checkpoint of one seed, and before that of the other."""
    train_to_end(start_on_node("plain", **make_sandbox_config(None, tmp_path / "plain")))
    first = start_on_node("a", **make_sandbox_config(uri, tmp_path / "nowhere"))
    while first.step()["step"] < 4:
        continue
    while first.training.step().last_step < 10:  # the run has removed all checkpoints that storage has
        continue
    first.mirror.mirrors["DG-s0"].push_new()
    kill(first)
    storage_folder = open_storage(uri)
    stored_names = [list_files(storage_folder.joinpath(f"runs/DG-s{seed}")) for seed in (0, 1)]
    first_newest_step, second_newest_step = (find_complete_checkpoints(names)[0][0] for names in stored_names)
    assert first_newest_step > second_newest_step > 0
    second = start_on_node("b", **make_sandbox_config(uri, tmp_path / "nowhere"))
    assert second.step()["step"] == second_newest_step
    train_to_end(second)
    for seed in (0, 1):
        run_mirror = Mirror(
            storage_folder.joinpath(f"runs/DG-s{seed}"), tmp_path / f"look{seed}", tmp_path / "kept", 0.0, lambda: False
        )
        run_mirror.fetch()
        rows, expected_rows = (
            [
                {name: value for name, value in row.items() if not name.startswith("seconds")}
                for row in read_rows(folder / "metrics.jsonl", first_step=0)
            ]
            for folder in (tmp_path / f"look{seed}", tmp_path / "plain" / f"r{seed}")
        )
        assert rows == expected_rows
        assert rows[-1]["step"] == 12
    assert not (tmp_path / "nowhere").exists()

"""Checkpoints that a trial uploads to a storage: when, in which order, and what a later start does with them."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSystem, FileType
from ray import tune

from sandboxes.update_rules.trial import UpdateRules
from tests.fakes.trials import SMALL_TRIAL, TOY, drop_times, save_trial
from trainable import uploads
from trainable.runs.failures import RunFailedError
from trainable.runs.run_files import CHECKSUMS_FILE, METRICS_FILE, read_rows
from trainable.trial import PPO
from trainable.uploads import COMPLETE_FILE, Uploads, list_stored_checkpoints, read_pointer, upload_folder
from tune_study.folder.storage import StoredFolder
from tune_study.plan.storage_uri import join_uri


@pytest.fixture
def make_trial(make_in_folder: Callable[..., PPO]) -> Callable[..., PPO]:
    """Return a function that makes a trial with a storage on a node, a folder of this test."""

    def make(node: str, uri: str, family: type[PPO] = PPO, **settings: object) -> PPO:
        base = SMALL_TRIAL if family is PPO else TOY
        return make_in_folder(family, node, {**base, "trainer.disk_patience": 0, "run": {"storage": uri}, **settings})

    return make


def list_checkpoints(uri: str, trial: str = "default") -> list[tuple[int, int, dict[int, int], bool]]:
    """Start, number, newest step by seed, and completeness of each checkpoint."""
    filesystem, path = FileSystem.from_uri(uri)
    stored_checkpoints = list_stored_checkpoints(filesystem, f"{path}/{trial}")
    return [
        (
            stored.start,
            stored.number,
            {seed: max(steps, default=0) for seed, steps in stored.steps.items()},
            stored.is_complete,
        )
        for stored in stored_checkpoints
    ]


def save(trial: PPO, folder: Path) -> str:
    """Let a trial save a checkpoint as Tune does at its end; return the folder of the checkpoint that it names."""
    save_trial(trial, folder)
    return read_pointer(*FileSystem.from_uri(folder.as_uri()))


# Files.


def test_a_folder_is_uploaded_whole_and_its_checksums_last(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}/weights" for number in range(12)] + [CHECKSUMS_FILE]
    for name in names:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(name.encode() * 1000)
    filesystem, root = FileSystem.from_uri(uri)
    order: list[str] = []
    copy = shutil.copyfileobj

    def copy_and_note(source: Any, target: Any, size: int) -> None:
        copy(source, target, size)
        order.append(Path(source.name).name)

    monkeypatch.setattr(uploads.shutil, "copyfileobj", copy_and_note)
    upload_folder(filesystem, tmp_path / "source", f"{root}/target")
    assert order[-1] == CHECKSUMS_FILE
    for name in names:
        with filesystem.open_input_stream(f"{root}/target/{name}") as stored_file:
            assert stored_file.read() == name.encode() * 1000


def test_checkpoints_are_listed_by_start_and_number_with_the_steps_of_their_states(uri: str) -> None:
    assert list_checkpoints(uri) == []
    for name in (
        "start_10_00000000/checkpoint_000001/0/state/step_3/checksums.json",
        f"start_10_00000000/checkpoint_000001/{COMPLETE_FILE}",
        "start_9_00000000/checkpoint_000010/0/state/step_2/checksums.json",
        "start_9_00000000/checkpoint_000010/0/state/step_10/checksums.json",
        "start_9_00000000/checkpoint_000010/0/state/step_11/state.json",  # without checksums: not all of it is there
        f"start_9_00000000/checkpoint_000010/1/{METRICS_FILE}",
        f"start_9_00000000/checkpoint_000002/0/{METRICS_FILE}",
        f"start_9_00000000/checkpoint_000002/{COMPLETE_FILE}",
        "checkpoint_000000/runs.json",
        "start_9_somewhere/checkpoint_000003/complete",
    ):
        StoredFolder(uri).put(f"default/{name}", b"x")
    assert list_checkpoints(uri) == [
        (9, 2, {0: 0}, True),
        (9, 10, {0: 10, 1: 0}, False),
        (10, 1, {0: 3}, True),
    ]


@pytest.mark.parametrize("folder", ["../elsewhere", "start_1_01234567", "/etc", None, 3])
def test_a_pointer_to_anything_but_a_checkpoint_of_its_trial_is_not_followed(folder: object, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(json.dumps({"folder": folder}))
    assert read_pointer(*FileSystem.from_uri(tmp_path.as_uri())) == ""


# One start.


def upload(trial_uploads: Uploads, folder: Path, seeds: tuple[int, ...] = (0,)) -> None:
    for seed in seeds:
        (folder / str(seed) / "state" / "step_1").mkdir(parents=True)
        for name in (METRICS_FILE, f"state/step_1/{CHECKSUMS_FILE}"):
            (folder / str(seed) / name).write_text("{}")
    trial_uploads.begin(folder, {})
    assert trial_uploads.finish(waits=True)


def start(uri: str) -> Uploads:
    return Uploads(uri, "default", lambda operation: operation())


def test_two_checkpoints_are_left_and_what_a_dead_start_has_begun_is_removed(uri: str, tmp_path: Path) -> None:
    first = start(uri)
    for number in range(3):
        upload(first, tmp_path / f"first{number}")
    StoredFolder(uri).put(f"default/start_1_00000000/checkpoint_000004/0/{METRICS_FILE}", b"x")
    assert [entry[:2] for entry in list_checkpoints(uri)] == [(1, 2), (1, 3), (1, 4)]
    second = start(uri)
    assert [checkpoint.number for checkpoint in second.earlier_checkpoints] == [2, 3]
    upload(second, tmp_path / "second0")
    assert [entry[:2] for entry in list_checkpoints(uri)] == [(1, 3), (1, 4), (2, 1)]
    upload(second, tmp_path / "second1")
    assert [entry[:2] for entry in list_checkpoints(uri)] == [(2, 1), (2, 2)]


def test_a_start_behind_a_partition_neither_writes_nor_removes_what_a_later_one_has(tmp_path: Path) -> None:
    uri = (tmp_path / "shared").as_uri()
    first = start(uri)
    upload(first, tmp_path / "first0")
    second = start(uri)
    upload(second, tmp_path / "second0")
    upload(second, tmp_path / "second1")
    for number in range(1, 4):  # the process of the first start goes on
        upload(first, tmp_path / f"first{number}")
    newest = list_checkpoints(uri)[-2:]
    assert [entry[:2] for entry in newest] == [(2, 1), (2, 2)]
    third = start(uri)
    assert (third.earlier_checkpoints[-1].start, third.earlier_checkpoints[-1].number) == (2, 2)
    fourth = start(uri)  # two that begin at once
    upload(third, tmp_path / "third0")
    upload(fourth, tmp_path / "fourth0")
    assert third.folder.startswith("start_3_")
    assert fourth.folder.startswith("start_3_")
    assert fourth.folder != third.folder


def test_the_last_checkpoint_of_a_seed_that_ended_earlier_stays(tmp_path: Path) -> None:
    uri = (tmp_path / "shared").as_uri()
    upload(start(uri), tmp_path / "both", seeds=(0, 1))
    later = start(uri)
    for number in range(3):
        upload(later, tmp_path / f"later{number}")
    assert [entry[:3] for entry in list_checkpoints(uri)] == [
        (1, 1, {0: 1, 1: 1}),
        (2, 2, {0: 1}),
        (2, 3, {0: 1}),
    ]


# Trials.


def test_a_trial_goes_on_while_its_state_is_uploaded(
    make_trial: Callable[..., PPO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, uri = threading.Event(), (tmp_path / "shared").as_uri()
    upload_now = uploads.upload_folder

    def upload_when_open(*args: Any) -> None:
        assert gate.wait(60)
        upload_now(*args)

    monkeypatch.setattr(uploads, "upload_folder", upload_when_open)
    trial = make_trial("a", uri)
    results = [trial.step() for _ in range(3)]
    assert [result["uploaded"] for result in results] == ["", "", ""]
    assert list_checkpoints(uri) == []
    gate.set()
    while not (result := trial.step())["uploaded"]:
        time.sleep(0.01)
    (stored, *_) = list_checkpoints(uri)
    assert stored == (1, 1, {0: 1}, True)  # the state after the first step, which was replaced long ago
    assert result["uploaded"].startswith("default/start_1_")


def test_a_trial_continues_on_another_node_from_the_newest_usable_checkpoint(
    make_trial: Callable[..., PPO], tmp_path: Path, s3: str
) -> None:
    uri = f"s3://shelf/another-node?{s3}"
    alone = make_trial("alone", (tmp_path / "alone-store").as_uri())
    while not alone.step()["done"]:
        pass
    first = make_trial("a", uri)
    for number in range(2):
        first.step()
        save(first, tmp_path / f"tune{number}" / "checkpoint_000000")
    assert [entry[2] for entry in list_checkpoints(uri)] == [{0: 1}, {0: 2}]
    second = make_trial("b", uri)
    assert second.step()["step"] == 3
    save(second, tmp_path / "tune2" / "checkpoint_000000")
    filesystem, path = FileSystem.from_uri(uri)
    newest = list_stored_checkpoints(filesystem, f"{path}/default")[-1]
    filesystem.delete_file(f"{path}/default/{newest.folder}/0/state/step_3/{CHECKSUMS_FILE}")
    result = make_trial("c", uri).step()
    assert (result["step"], "is not used" in result["note"]) == (3, True)
    for node in ("b", "c"):
        rows, expected_rows = (
            read_rows(tmp_path / name / "runs" / "default" / METRICS_FILE) for name in (node, "alone")
        )
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in expected_rows]


def test_a_trial_prefers_what_is_on_its_own_disk_if_that_is_newer(
    make_trial: Callable[..., PPO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "shared").as_uri()
    trial = make_trial("a", uri)
    trial.step()
    save(trial, tmp_path / "tune" / "checkpoint_000000")
    monkeypatch.setattr(uploads, "upload_folder", lambda *args: pytest.fail("nothing is uploaded any more"))
    trial.step()
    trial.cleanup()
    assert [entry[2] for entry in list_checkpoints(uri)] == [{0: 1}]
    assert make_trial("a", uri).step()["step"] == 3


def test_a_checkpoint_of_tune_names_the_uploaded_one(make_trial: Callable[..., PPO], tmp_path: Path) -> None:
    trial = make_trial("a", (tmp_path / "shared").as_uri())
    trial.step()
    folder = tmp_path / "shared" / "default" / "checkpoint_000000"
    stored = save(trial, folder)
    assert [path.name for path in folder.iterdir()] == ["runs.json"]
    assert FileSystem.from_uri(f"file://{stored}/{COMPLETE_FILE}")[0].get_file_info(stored).type == FileType.Directory
    assert save(trial, tmp_path / "again") == stored.replace(str(folder.parent), str(tmp_path))  # nothing is new
    trainer = PPO.from_checkpoint(tune.Checkpoint.from_directory(folder))
    assert trainer.step_index == 1
    trainer.close()
    other = make_trial("b", (tmp_path / "elsewhere").as_uri())
    other.restore(tune.Checkpoint.from_directory(folder))
    assert other.step()["step"] == 2


def test_a_trial_restores_its_newest_upload_even_if_the_one_that_tune_knows_is_gone(
    make_trial: Callable[..., PPO], tmp_path: Path
) -> None:
    trial = make_trial("a", (tmp_path / "shared").as_uri())
    trial.step()
    folder = tmp_path / "shared" / "default" / "checkpoint_000000"
    stored = Path(save(trial, folder))
    trial.cleanup()
    again = save(trial, tmp_path / "again")  # the same object begins again
    assert Path(again.replace(str(tmp_path), str(folder.parent))).is_dir()
    assert "start_2_" in again
    shutil.rmtree(stored)
    other = make_trial("b", (tmp_path / "shared").as_uri())
    other.restore(tune.Checkpoint.from_directory(folder))
    assert other.step()["step"] == 2


def test_an_upload_that_is_removed_while_it_is_fetched_is_an_error_that_is_retried(
    make_trial: Callable[..., PPO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "shared").as_uri()
    trial = make_trial("a", uri)
    trial.step()
    save(trial, tmp_path / "tune" / "checkpoint_000000")
    later = make_trial("b", uri)

    def fetch(folder: str) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(later, "_fetch", fetch)
    with pytest.raises(RunFailedError, match="was removed by an earlier start") as raised:
        later.step()
    assert raised.value.failure.is_retried


def test_of_a_run_that_keeps_no_state_the_last_upload_alone_is_left(
    make_trial: Callable[..., PPO], tmp_path: Path
) -> None:
    uri = (tmp_path / "shared").as_uri()
    trial = make_trial("a", uri, **{"trainer.keep_last": False})
    while not trial.step()["done"]:
        pass
    save(trial, tmp_path / "tune" / "checkpoint_000000")
    assert [entry[2] for entry in list_checkpoints(uri)] == [{0: 0}]
    folder = Path(read_pointer(*FileSystem.from_uri((tmp_path / "tune" / "checkpoint_000000").as_uri())))
    stored = tmp_path / "shared" / "default" / folder.relative_to(tmp_path / "tune")
    assert [row["step"] for row in read_rows(stored / "0" / METRICS_FILE)] == [1, 2, 3]


def test_saved_checkpoints_move_to_the_storage(make_trial: Callable[..., PPO], tmp_path: Path) -> None:
    uri = (tmp_path / "shared").as_uri()
    trial = make_trial("a", uri, **{"trainer.save_freq": 1, "trainer.resume_every": 50})
    trial.step()
    save(trial, tmp_path / "tune" / "checkpoint_000000")
    filesystem, path = FileSystem.from_uri(uri)
    info = filesystem.get_file_info(f"{path}/runs/default/global_step_1/{CHECKSUMS_FILE}")
    assert info.type == FileType.File
    assert not list((tmp_path / "a" / "saved").rglob("global_step_*"))


def test_a_drained_node_leaves_a_state_also_after_a_step_that_was_saved(
    make_trial: Callable[..., PPO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "shared").as_uri()
    rare = {"trainer.resume_every": 50, "trainer.resume_seconds": 1000, "trainer.save_freq": 2}
    trial = make_trial("a", uri, **rare)
    trial.step()
    monkeypatch.setattr(type(trial), "_is_node_draining", lambda self: True)
    result = trial.step()
    assert result["note"] == "the node is drained, so a state is saved"
    assert [entry[2] for entry in list_checkpoints(uri)] == [{0: 2}]
    assert make_trial("b", uri, **rare).step()["step"] == 3


def test_a_storage_that_refuses_fails_the_run_with_its_words(
    make_trial: Callable[..., PPO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("AWS Error SLOW_DOWN")

    trial = make_trial("a", (tmp_path / "shared").as_uri())
    monkeypatch.setattr(uploads, "upload_folder", refuse)
    trial.step()
    with pytest.raises(OSError, match="SLOW_DOWN"):
        save(trial, tmp_path / "tune")


def test_a_seed_that_joins_a_trial_does_not_continue_from_another_one(
    make_trial: Callable[..., PPO], tmp_path: Path
) -> None:
    uri = (tmp_path / "shared").as_uri()
    first = make_trial("first", uri, UpdateRules, seed=[0])
    while not first.step()["done"]:
        pass
    save(first, tmp_path / "tune")
    for seeds in ([1], [1, 2]):
        copy = join_uri((tmp_path / "copies").as_uri(), f"of{len(seeds)}")
        shutil.copytree(tmp_path / "shared", tmp_path / "copies" / f"of{len(seeds)}")
        joined = make_trial(f"joined{seeds}", copy, UpdateRules, seed=seeds)
        result = joined.step()
        assert (result["step"], result["finished"]) == (0, False)
        assert "has no runs of the seeds 1" in result["note"]
        assert {row["seed"] for row in result["rows"].values()} == set(seeds)
    assert make_trial("again", uri, UpdateRules, seed=[0]).step()["finished"]

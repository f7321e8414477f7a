"""An interrupted run continues from its newest complete checkpoint, to the rows of an uninterrupted one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.trials import (
    Row,
    UninterruptedRun,
    drop_times,
    find_newest_checkpoint,
    get_rows,
    make_trial_config,
    read_run_files,
    start_trial,
)
from trainable.runs import run
from trainable.runs.checkpoint import iter_checkpoints, read_checkpoint, write_checkpoint
from trainable.runs.run_files import RunLockedError, read_rows
from trainable.trial import Trial


def compare(folder: Path, straight: UninterruptedRun) -> None:
    """Rows and evaluations that count equal those of the run that was not interrupted."""
    rows, lines = read_run_files(folder)
    assert [drop_times(row) for row in rows] == [drop_times(row) for row in read_run_files(straight[0])[0]]

    def counting(found: list[Row]) -> dict[tuple[Any, ...], Row]:
        return {(line["step"], line["split"], line["mode"]): line for line in found}

    assert counting(lines) == counting(read_run_files(straight[0])[1])


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_interrupted_after_a_step_and_started_again(stop: int, tmp_path: Path, straight: UninterruptedRun) -> None:
    first = start_trial(tmp_path)
    for _ in range(stop):
        first.step()
    again = start_trial(tmp_path)
    assert [row["step"] for row in get_rows(again)] == list(range(1, stop + 1))
    assert [again.step()["step"] for _ in range(3 - stop)] == list(range(stop + 1, 4))
    compare(tmp_path, straight)


def test_rows_written_after_the_last_state_are_repeated(tmp_path: Path, straight: UninterruptedRun) -> None:
    first = start_trial(tmp_path, trainer__resume_every=2)
    rows = [first.step() for _ in range(3)][:2]
    # As if the process had died before the last state was written.
    shutil.rmtree(tmp_path / "runs" / "r" / "state")
    again = start_trial(tmp_path, trainer__resume_every=2)
    assert get_rows(again) == []
    repeated = [again.step() for _ in range(2)]
    assert [drop_times(row) for row in repeated] == [drop_times(row) for row in rows]
    later = start_trial(tmp_path, trainer__resume_every=2)
    assert [row["step"] for row in get_rows(later)] == [1, 2]
    assert later.step()["done"]
    compare(tmp_path, straight)


def test_death_between_row_and_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: UninterruptedRun
) -> None:
    first = start_trial(tmp_path)
    first.step()

    def dies(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "write_rolling_checkpoint", dies)
        with pytest.raises(KeyboardInterrupt):
            first.step()
    assert [row["step"] for row in read_rows(tmp_path / "runs" / "r" / "metrics.jsonl")] == [1, 2]
    again = start_trial(tmp_path)
    assert [row["step"] for row in get_rows(again)] == [1]
    assert [again.step()["step"] for _ in range(2)] == [2, 3]
    compare(tmp_path, straight)


def test_a_torn_last_row_is_written_again(tmp_path: Path, straight: UninterruptedRun) -> None:
    first = start_trial(tmp_path)
    first.step()
    with (tmp_path / "runs" / "r" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "train_suc')
    again = start_trial(tmp_path)
    again.step()
    again.step()
    compare(tmp_path, straight)


FILES = ("state.safetensors", "state.json", "checksums.json")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_state_is_named_and_the_one_before_is_used(
    tmp_path: Path, straight: UninterruptedRun, name: str, damage: Callable[[Path], None]
) -> None:
    first = start_trial(tmp_path)
    first.step()
    first.step()
    damaged = find_newest_checkpoint(tmp_path)
    damage(damaged / name)
    again = start_trial(tmp_path)
    assert [row["step"] for row in get_rows(again)] == [1]
    row = again.step()
    assert row["note"].startswith(f"{damaged} is not used: {damaged}")
    assert row["note"].endswith("training continues after step 1")
    assert again.step()["note"] == ""
    compare(tmp_path, straight)


def test_where_every_state_is_damaged_the_run_starts_over(tmp_path: Path, straight: UninterruptedRun) -> None:
    start_trial(tmp_path).step()
    cut(find_newest_checkpoint(tmp_path) / "state.safetensors")
    again = start_trial(tmp_path)
    rows = [again.step() for _ in range(3)]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["note"].endswith("training continues after step 0")
    compare(tmp_path, straight)


def test_a_kept_checkpoint_is_used_where_every_rolling_state_is_damaged(
    tmp_path: Path, straight: UninterruptedRun
) -> None:
    first = start_trial(tmp_path, trainer__save_freq=1)
    first.step()
    first.step()
    for _, path in iter_checkpoints(tmp_path / "runs" / "r" / "state"):
        cut(path / "state.json")
    cut(tmp_path / "saved" / "global_step_2" / "checksums.json")
    again = start_trial(tmp_path, trainer__save_freq=1)
    assert [again.step()["step"] for _ in range(2)] == [2, 3]
    compare(tmp_path, straight)


def other_settings(values: Row) -> Row:
    return {**values, "settings": {**values["settings"], "seed": 1}}


def no_settings(values: Row) -> Row:
    return {name: value for name, value in values.items() if name != "settings"}


def wrong_step(values: Row) -> Row:
    return {**values, "step": 1}


def lacking(values: Row) -> Row:
    return {name: value for name, value in values.items() if name != "kl_coef"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_settings, "written with other settings"),
        (no_settings, "RunConfig"),
        (wrong_step, "it contains step 1"),
        (lacking, "kl_coef"),
    ],
)
def test_a_whole_state_that_is_not_this_runs_is_not_used(
    tmp_path: Path, straight: UninterruptedRun, change: Callable[[Row], Row], why: str
) -> None:
    first = start_trial(tmp_path)
    first.step()
    first.step()
    tensors, values = read_checkpoint(find_newest_checkpoint(tmp_path))
    write_checkpoint(find_newest_checkpoint(tmp_path), tensors, change(values))
    again = start_trial(tmp_path)
    row = again.step()
    assert why in row["note"]
    assert row["step"] == 2
    again.step()
    compare(tmp_path, straight)


@pytest.mark.parametrize("change", ["missing", "reshaped", "added"])
def test_tensors_that_do_not_fit_leave_the_trainer_as_it_was(
    tmp_path: Path, straight: UninterruptedRun, change: str
) -> None:
    first = start_trial(tmp_path)
    first.step()
    first.step()
    tensors, values = read_checkpoint(find_newest_checkpoint(tmp_path))
    name = "critic_optimizer/0/exp_avg"
    odd = {
        "missing": {},
        "reshaped": {name: tensors[name].flatten()},
        "added": {name: tensors[name], "actor/x": tensors[name].clone()},
    }
    write_checkpoint(
        find_newest_checkpoint(tmp_path),
        {**{key: t for key, t in tensors.items() if key != name}, **odd[change]},
        values,
    )
    again = start_trial(tmp_path)
    row = again.step()
    assert "tensors do not match" in row["note"]
    assert row["step"] == 2
    again.step()
    compare(tmp_path, straight)


def test_a_state_without_its_rows_is_not_used(tmp_path: Path, straight: UninterruptedRun) -> None:
    first = start_trial(tmp_path)
    first.step()
    first.step()
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[1] + "\n")  # the row of step 1 is gone
    again = start_trial(tmp_path)
    rows = [again.step() for _ in range(3)]
    assert "rows up to step 2 are missing" in rows[0]["note"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    compare(tmp_path, straight)


def test_a_state_without_its_evaluations_is_not_used(tmp_path: Path, straight: UninterruptedRun) -> None:
    first = start_trial(tmp_path)
    first.step()
    first.step()
    (tmp_path / "runs" / "r" / "levels.jsonl").unlink()
    again = start_trial(tmp_path)
    row = again.step()
    assert "evaluations up to step 2 are missing" in row["note"]
    assert row["step"] == 2  # the one before was written before any evaluation but the first
    again.step()
    rows, _ = read_run_files(tmp_path)
    assert [drop_times(each) for each in rows] == [drop_times(each) for each in read_run_files(straight[0])[0]]


def test_a_restored_trainer_holds_no_file_that_was_deleted(tmp_path: Path) -> None:
    first = start_trial(tmp_path)
    first.step()
    again = start_trial(tmp_path)
    again.step()
    again.step()
    assert "step_1" not in {path.name for path in (tmp_path / "runs" / "r" / "state").iterdir()}
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped


def test_no_two_processes_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCK_TIMEOUT_S", 0.0)
    start_trial(tmp_path)
    with pytest.raises(RunLockedError, match=f"runs/r is still in use by another process .pid {os.getpid()} on "):
        Trial(make_trial_config(tmp_path)).begin()
    Trial(make_trial_config(tmp_path, finished=True)).begin()  # one that has ended is only read


def test_a_run_that_ended_unrecorded_reports_its_last_row_again(tmp_path: Path) -> None:
    """The process died after the last row and state, before anybody wrote that the run had ended."""
    first = start_trial(tmp_path, trainer__total_training_steps=1)
    last = first.step()
    before = (tmp_path / "runs" / "r" / "metrics.jsonl").read_bytes()
    again = start_trial(tmp_path, trainer__total_training_steps=1)
    assert again.step() == last
    assert (tmp_path / "runs" / "r" / "metrics.jsonl").read_bytes() == before

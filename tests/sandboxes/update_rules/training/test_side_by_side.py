"""Tests of a trial of several runs without Ray's driver: they make the calls of Tune in this process."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sandboxes.update_rules.trial import UpdateRules
from tests.fakes.ensembles import drop_times
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint
from trainable.runs.run_files import read_rows

Report = dict[str, Any]
SMALL = {
    "task": "token_reversal", "seq_len": 2, "d_model": 8, "num_layers": 1, "batch_size": 8,
    "trainer.total_training_steps": 7, "trainer.test_freq": 3, "trainer.resume_every": 2,
}  # fmt: skip
STOPPING_SETTINGS = {"method": "GRPO", "group_size": 4, "binary_reward": True, "seq_len": 8, "fallback_patience": 2}
"""Eight tokens that all have to be right: no group has a spread of rewards, so every member stops at step 1."""
StartTrial = Callable[..., UpdateRules]


def make_config(folder: Path, seeds: tuple[int, ...] = (0, 1), **settings: Any) -> dict[str, Any]:
    trial_settings = {**SMALL, **{name.replace("__", "."): value for name, value in settings.items()}}
    places = {seed: (str(folder / f"s{seed}"), str(folder / f"kept{seed}")) for seed in seeds}
    runs = [
        {"run_id": f"a-s{seed}", "seed": seed, "run_dir": run_dir, "checkpoint_dir": checkpoint_dir}
        for seed, (run_dir, checkpoint_dir) in places.items()
    ]
    options = {"study": "influence", "arm": "DG", "stop_rules": ["uniform_groups"], "interrupts": []}
    return {**trial_settings, "seed": list(seeds), "run": {**options, "runs": runs}}


@pytest.fixture
def start_trial() -> Iterator[StartTrial]:
    """Return a function that starts a trial as Tune does, after it has cleaned up the previous one."""
    trials: list[UpdateRules] = []

    def start(folder: Path, num_reports: int = 0, **settings: Any) -> UpdateRules:
        for trial in trials:
            trial.cleanup()
        trials.append(UpdateRules(make_config(folder, **settings)))
        trials[-1].begin()
        for _ in range(num_reports):
            trials[-1].step()
        return trials[-1]

    yield start
    for trial in trials:
        trial.cleanup()


def run_to_end(trial: UpdateRules) -> list[Report]:
    reports = [trial.step()]
    while not reports[-1]["done"]:
        reports.append(trial.step())
    return reports


def read_written_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the rows on disk by run, without times."""
    paths = sorted(folder.glob("s*"))
    return {path.name: [drop_times(row) for row in read_rows(path / "metrics.jsonl")] for path in paths}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Report]]:
    folder = tmp_path_factory.mktemp("straight")
    trial = UpdateRules(make_config(folder))
    reports = run_to_end(trial)
    trial.cleanup()
    return folder, reports


def test_a_report_has_the_rows_of_all_runs_and_they_are_on_disk(uninterrupted: tuple[Path, list[Report]]) -> None:
    folder, reports = uninterrupted
    assert [report["step"] for report in reports] == [0, 3, 6, 7]
    assert [report["training_iteration"] for report in reports] == [1, 2, 3, 4]
    assert [report["done"] for report in reports] == [False, False, False, True]
    assert [report["saved"] for report in reports] == [False, True, False, True]
    for seed in (0, 1):
        rows = [report["rows"][f"a-s{seed}"] for report in reports]
        assert rows == read_rows(folder / f"s{seed}" / "metrics.jsonl")
        for row in rows:
            assert {"run_id": f"a-s{seed}", "seed": seed, "study": "influence", "arm": "DG"}.items() <= row.items()
            assert 0 <= row["test_error"] <= 1
    first, second = ((row["test_error"], row["entropy"]) for row in reports[0]["rows"].values())
    assert first != second
    assert all(report["failed"] == {} and report["note"] == "" for report in reports)
    last_errors = [row["test_error"] for row in reports[-1]["rows"].values()]
    assert reports[-1]["test_error"] == sum(last_errors) / 2  # of the mean, which schedulers compare


@pytest.mark.parametrize("num_reports", [1, 3])
def test_a_resumed_trial_writes_the_rows_of_an_uninterrupted_one(
    tmp_path: Path, start_trial: StartTrial, uninterrupted: tuple[Path, list[Report]], num_reports: int
) -> None:
    start_trial(tmp_path, num_reports=num_reports)
    reports = run_to_end(start_trial(tmp_path))
    assert read_written_rows(tmp_path) == read_written_rows(uninterrupted[0])
    assert reports[-1]["training_iteration"] == 4
    for seed in (0, 1):
        states = [read_checkpoint(folder / f"s{seed}/state/step_7")[0] for folder in (tmp_path, uninterrupted[0])]
        assert torch.equal(*(state["adam/weights"] for state in states))


def drop_batches(folder: Path) -> None:
    """Leave states that are refused after a part of them was loaded."""
    for path in list(folder.glob("s*/state/*")):
        tensors, values = read_checkpoint(path)
        shutil.rmtree(path)
        write_checkpoint(path, tensors, {name: value for name, value in values.items() if name != "batches"})


DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "states of another form": (drop_batches, 0, ""),
    "a damaged state": (
        lambda folder: (folder / "s1/state/step_4/state.safetensors").write_bytes(b"x"),
        2,
        "s1/state/step_4 is not used: ",
    ),
    "a missing state": (lambda folder: shutil.rmtree(folder / "s0/state/step_4"), 2, "training continues after step 2"),
    "missing rows": (
        lambda folder: (folder / "s0/metrics.jsonl").unlink(),
        0,
        "step_4 is not used: rows or evaluations up to step 4 are damaged or missing",
    ),
}
"""What happens to the files of a trial -> the step after which it continues, and what it says."""


@pytest.mark.parametrize("name", DAMAGES)
def test_training_continues_from_the_newest_step_of_which_all_runs_have_whole_states(
    tmp_path: Path, start_trial: StartTrial, uninterrupted: Any, name: str
) -> None:
    damage, step, note = DAMAGES[name]
    start_trial(tmp_path, num_reports=2)
    damage(tmp_path)
    second_trial = start_trial(tmp_path)
    assert second_trial.training.trainer.step_index == step
    report = second_trial.step()
    assert note in report["note"]
    assert ("training continues after step 2" in report["note"]) == (step == 2)
    run_to_end(second_trial)
    assert read_written_rows(tmp_path) == read_written_rows(uninterrupted[0])


def test_runs_that_start_again_because_one_joins_them_say_so(tmp_path: Path, start_trial: StartTrial) -> None:
    start_trial(tmp_path, num_reports=2)
    second_trial = start_trial(tmp_path, seeds=(0, 1, 2))
    assert second_trial.training.trainer.step_index == 0
    assert "no checkpoint is common to all runs" in second_trial.step()["note"]
    steps = {run: [row["step"] for row in rows] for run, rows in read_written_rows(tmp_path).items()}
    assert steps == {"s0": [0], "s1": [0], "s2": [0]}
    assert start_trial(tmp_path / "new").training.notes == []


def test_runs_that_a_rule_stopped_end_with_its_name(tmp_path: Path, start_trial: StartTrial) -> None:
    reports = run_to_end(start_trial(tmp_path, **STOPPING_SETTINGS))
    row = reports[-1]["rows"]["a-s0"]
    assert (row["stop_rule"], row["stop_value"], row["stop_threshold"], row["stop_step"]) == ("uniform_groups", 2, 2, 1)
    assert read_checkpoint(tmp_path / "s0" / "state" / "step_1")[1]["step"] == 1
    assert start_trial(tmp_path, **STOPPING_SETTINGS).step()["rows"] == reports[-1]["rows"]


def test_a_run_of_a_trial_that_ended_is_left_as_it_is(
    tmp_path: Path, start_trial: StartTrial, uninterrupted: Any
) -> None:
    """The process was killed when the last row of one run was on disk and that of the other was not."""
    shutil.copytree(uninterrupted[0], tmp_path / "copy")
    start_trial(tmp_path, trainer__resume_every=100, num_reports=2)
    expected_bytes = (tmp_path / "copy" / "s0" / "metrics.jsonl").read_bytes()
    shutil.copytree(tmp_path / "copy" / "s0", tmp_path / "s0", dirs_exist_ok=True)
    reports = run_to_end(start_trial(tmp_path, trainer__resume_every=100))
    assert (tmp_path / "s0" / "metrics.jsonl").read_bytes() == expected_bytes
    assert all(set(report["rows"]) == {"a-s1"} for report in reports)
    assert reports[-1]["done"]
    assert [row["step"] for row in read_written_rows(tmp_path)["s1"]] == [0, 3, 6, 7]

"""A trial of several runs without Ray's driver: what Tune would call, in this process."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainable import families
from trainable.runs import run
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint
from trainable.runs.run_files import RunLockedError, read_rows
from trainable.sandbox.measure.records import TIME_COLUMNS
from trainable.trial import Trial

Report = dict[str, Any]
SMALL = {
    "task": "token_reversal",
    "seq_len": 2,
    "d_model": 8,
    "num_layers": 1,
    "batch_size": 8,
    "trainer.total_training_steps": 7,
    "trainer.test_freq": 3,
    "trainer.resume_every": 2,
}
GROUPED = {"method": "GRPO", "group_size": 4, "binary_reward": True, "seq_len": 8, "fallback_patience": 2}
"""Eight tokens that all have to be right: no group has a spread of rewards, so every member stops at step 1."""
Start = Callable[..., Trial]


def config(folder: Path, seeds: tuple[int, ...] = (0, 1), **settings: Any) -> dict[str, Any]:
    finished, interrupt = settings.pop("finished", False), settings.pop("interrupt", None)
    changed = {**SMALL, **{name.replace("__", "."): value for name, value in settings.items()}}
    runs = [
        {
            "run_id": f"a-s{seed}",
            "seed": seed,
            "run_dir": str(folder / f"s{seed}"),
            "checkpoint_dir": str(folder / f"kept{seed}"),
        }
        for seed in seeds
    ]
    return {
        "run_id": "a",
        "study": "influence",
        "arm": "DG",
        "settings": changed,
        "runs": runs,
        "side_by_side": True,
        "finished": finished,
        "family": "trainable.families:UPDATE_RULES",
        "stop_rules": ["uniform_groups"],
        "interrupt": interrupt,
        "storage": None,
        "storage_patience": 0.0,
    }


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a trial as Tune does it, in a process of its own: the one before is gone."""
    alive: list[Trial] = []

    def started(folder: Path, **settings: Any) -> Trial:
        for trial in alive:
            trial.cleanup()
        alive.append(Trial(config(folder, **settings)))
        alive[-1].begin()
        return alive[-1]

    yield started
    for trial in alive:
        trial.cleanup()


def to_the_end(trial: Trial) -> list[Report]:
    reports = [trial.step()]
    while not reports[-1]["done"]:
        reports.append(trial.step())
    return reports


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    times = {column.name for column in TIME_COLUMNS}
    return {name: value for name, value in row.items() if name not in times}


def written(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows on disk by run, without times."""
    paths = sorted(folder.glob("s*"))
    return {path.name: [timeless(row) for row in read_rows(path / "metrics.jsonl", first_step=0)] for path in paths}


def last_weights(folder: Path) -> list[torch.Tensor]:
    return [read_checkpoint(folder / f"s{seed}" / "state" / "step_7")[0]["adam/weights"] for seed in (0, 1)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Report]]:
    folder = tmp_path_factory.mktemp("straight")
    trial = Trial(config(folder))
    reports = to_the_end(trial)
    trial.cleanup()
    return folder, reports


def test_a_report_has_the_rows_of_all_runs_and_they_are_on_disk(straight: tuple[Path, list[Report]]) -> None:
    folder, reports = straight
    assert [report["step"] for report in reports] == [0, 3, 6, 7]
    assert [report["training_iteration"] for report in reports] == [1, 2, 3, 4]
    assert [report["done"] for report in reports] == [False, False, False, True]
    assert [report["saved"] for report in reports] == [False, True, False, True]
    for seed in (0, 1):
        rows = [report["rows"][f"a-s{seed}"] for report in reports]
        assert rows == read_rows(folder / f"s{seed}" / "metrics.jsonl", first_step=0)
        for row in rows:
            assert {"run_id": f"a-s{seed}", "seed": seed, "study": "influence", "arm": "DG"}.items() <= row.items()
            assert 0 <= row["test_error"] <= 1
    assert reports[0]["rows"]["a-s0"]["test_error"] != reports[0]["rows"]["a-s1"]["test_error"] or (
        reports[0]["rows"]["a-s0"]["entropy"] != reports[0]["rows"]["a-s1"]["entropy"]
    )
    assert all(report["failed"] == {} and report["note"] == "" for report in reports)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_trial_that_was_taken_up_again_writes_the_rows_that_one_run_through_does(
    tmp_path: Path, start: Start, straight: tuple[Path, list[Report]], cut: int
) -> None:
    first = start(tmp_path)
    for _ in range(cut):
        first.step()
    reports = to_the_end(start(tmp_path))
    assert written(tmp_path) == written(straight[0])
    assert reports[-1]["training_iteration"] == 4
    assert all(torch.equal(*pair) for pair in zip(last_weights(tmp_path), last_weights(straight[0]), strict=True))


def test_states_are_written_in_their_rhythm_and_the_last_one_is_kept_alone(
    tmp_path: Path, start: Start, straight: tuple[Path, list[Report]]
) -> None:
    trial = start(tmp_path, trainer__save_freq=3)
    trial.step()
    assert not (tmp_path / "s0" / "state").exists()
    trial.step()
    assert sorted(path.name for path in (tmp_path / "s0" / "state").iterdir()) == ["step_2", "step_4"]
    to_the_end(trial)
    for seed in (0, 1):
        assert [path.name for path in (tmp_path / f"s{seed}" / "state").iterdir()] == ["step_7"]
        kept = sorted(path.name for path in (tmp_path / f"kept{seed}").iterdir())
        assert kept == ["global_step_3", "global_step_6", "global_step_7"]
    assert not (straight[0] / "kept0").exists()


def test_an_interrupted_trial_writes_its_states_at_once(tmp_path: Path, start: Start, straight: Any) -> None:
    interrupt = tmp_path / "interrupt"
    trial = start(tmp_path, interrupt=str(interrupt), trainer__resume_every=100)
    trial.step()
    interrupt.touch()
    report = trial.step()
    assert (report["rows"], report["saved"], report["done"], report["training_iteration"]) == ({}, True, False, 1)
    assert [path.name for path in (tmp_path / "s1" / "state").iterdir()] == ["step_2"]
    interrupt.unlink()
    to_the_end(start(tmp_path, trainer__resume_every=100))
    assert written(tmp_path) == written(straight[0])


def test_nothing_stays_of_a_state_that_is_refused_in_part(tmp_path: Path, start: Start, straight: Any) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    for seed in (0, 1):
        for folder in list((tmp_path / f"s{seed}" / "state").iterdir()):
            tensors, values = read_checkpoint(folder)
            shutil.rmtree(folder)
            write_checkpoint(folder, tensors, {name: value for name, value in values.items() if name != "batches"})
    again = start(tmp_path, trainer__resume_every=100)
    assert again.training.trainer.step_index == 0
    to_the_end(again)
    assert written(tmp_path) == written(straight[0])


def test_a_damaged_state_is_named_and_the_one_before_is_used(tmp_path: Path, start: Start, straight: Any) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    (tmp_path / "s1" / "state" / "step_4" / "state.safetensors").write_bytes(b"x")
    again = start(tmp_path)
    assert again.training.trainer.step_index == 2
    report = again.step()
    assert "s1/state/step_4 is not used: " in report["note"]
    assert "training continues after step 2" in report["note"]
    to_the_end(again)
    assert written(tmp_path) == written(straight[0])


def test_the_newest_step_that_all_runs_have_is_gone_on_from(tmp_path: Path, start: Start, straight: Any) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    shutil.rmtree(tmp_path / "s0" / "state" / "step_4")
    again = start(tmp_path)
    assert again.training.trainer.step_index == 2
    assert again.training.notes == []
    to_the_end(again)
    assert written(tmp_path) == written(straight[0])


def test_runs_that_begin_again_with_one_that_joins_them_say_so(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    again = start(tmp_path, seeds=(0, 1, 2))
    assert again.training.trainer.step_index == 0
    assert "have no checkpoint at a common step: all start at step 0" in again.step()["note"]
    steps = {run: [row["step"] for row in rows] for run, rows in written(tmp_path).items()}
    assert steps == {"s0": [0], "s1": [0], "s2": [0]}
    assert start(tmp_path / "new").training.notes == []


def test_a_row_of_the_step_that_is_trained_again_does_not_count(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, trainer__resume_every=3)
    for _ in range(2):
        first.step()
    again = start(tmp_path, trainer__resume_every=3)
    assert again.training.trainer.step_index == 3
    assert [row["step"] for row in again.training.runs[0].rows] == [0]
    assert again.step()["training_iteration"] == 2


@pytest.mark.parametrize("changed", [{"lr": 0.5}, {"seeds": (1, 0)}])
def test_states_of_other_settings_or_seeds_are_not_used(tmp_path: Path, start: Start, changed: dict[str, Any]) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    if "seeds" in changed:  # the folders are exchanged
        first.cleanup()
        (tmp_path / "s0").rename(tmp_path / "x")
        (tmp_path / "s1").rename(tmp_path / "s0")
        (tmp_path / "x").rename(tmp_path / "s1")
    again = start(tmp_path, **changed)
    assert again.training.trainer.step_index == 0
    assert "other settings or another seed" in again.step()["note"]


def test_states_without_the_rows_before_them_are_not_used(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    for _ in range(2):
        first.step()
    (tmp_path / "s0" / "metrics.jsonl").unlink()
    again = start(tmp_path)
    assert again.training.trainer.step_index == 0
    assert "rows up to step 4 are missing" in again.step()["note"]


def test_a_trial_that_had_ended_reports_its_last_rows(start: Start, straight: tuple[Path, list[Report]]) -> None:
    folder, reports = straight
    before = written(folder)
    for finished in (True, False):
        report = start(folder, finished=finished).step()
        assert report["rows"] == reports[-1]["rows"]
        assert (report["done"], report["step"], report["training_iteration"]) == (True, 7, 4)
    assert written(folder) == before


def test_runs_that_a_rule_stopped_end_with_its_name(tmp_path: Path, start: Start) -> None:
    reports = to_the_end(start(tmp_path, **GROUPED))
    row = reports[-1]["rows"]["a-s0"]
    assert (row["stop_rule"], row["stop_value"], row["stop_threshold"], row["stop_step"]) == ("uniform_groups", 2, 2, 1)
    assert read_checkpoint(tmp_path / "s0" / "state" / "step_1")[1]["step"] == 1
    assert start(tmp_path, **GROUPED).step()["rows"] == reports[-1]["rows"]


def test_a_run_of_a_trial_that_ended_is_left_as_it_is(tmp_path: Path, start: Start, straight: Any) -> None:
    """The process died when one run's last row was on disk and the other's was not."""
    shutil.copytree(straight[0], tmp_path / "copy")
    first = start(tmp_path, trainer__resume_every=100)
    for _ in range(2):
        first.step()
    ended = (tmp_path / "copy" / "s0" / "metrics.jsonl").read_bytes()
    shutil.copytree(tmp_path / "copy" / "s0", tmp_path / "s0", dirs_exist_ok=True)
    reports = to_the_end(start(tmp_path, trainer__resume_every=100))
    assert (tmp_path / "s0" / "metrics.jsonl").read_bytes() == ended
    assert all(set(report["rows"]) == {"a-s1"} for report in reports)
    assert reports[-1]["done"]
    assert [row["step"] for row in written(tmp_path)["s1"]] == [0, 3, 6, 7]


def test_a_failed_run_is_told_and_does_not_begin_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer = families.UPDATE_RULES.make_trainer

    def breaking(*given: Any) -> Any:
        trainer = make_trainer(*given)
        objective = trainer.objective

        def broken(rollouts: Any, log_probs: Any, settings: Any) -> Any:
            found = objective(rollouts, log_probs, settings)
            factor = torch.tensor(
                [torch.nan if seed == 1 and trainer.step_index == 4 else 1.0 for seed in trainer.seeds]
            )
            return type(found)(found.loss * factor, found.metrics)

        trainer.learner = type(trainer.learner)(**{**vars(trainer.learner), "objective": broken})
        return trainer

    monkeypatch.setattr(families, "UPDATE_RULES", replace(families.UPDATE_RULES, make_trainer=breaking))
    reports = to_the_end(start(tmp_path))
    message = "loss or gradient of step 4 was not finite"
    assert [report["failed"] for report in reports] == [{}, {}, *[{"a-s1": message}] * 3]
    assert (reports[2]["rows"], reports[2]["saved"]) == ({}, True)
    assert [row["step"] for row in written(tmp_path)["s0"]] == [0, 3, 6, 7]
    assert written(tmp_path)["s1"][-1]["failure"] == message
    again = start(tmp_path).step()
    assert (again["failed"], again["done"]) == ({"a-s1": message}, True)


def test_a_process_serves_one_condition_after_another(tmp_path: Path, straight: tuple[Path, list[Report]]) -> None:
    trial = Trial(config(tmp_path / "other", seeds=(3,), method="REINFORCE"))
    trial.step()
    assert trial.reset_config(config(tmp_path / "mine"))
    to_the_end(trial)
    trial.cleanup()
    assert written(tmp_path / "mine") == written(straight[0])


def test_runs_are_held_while_they_are_trained(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path)
    monkeypatch.setattr(run, "LOCK_TIMEOUT_S", 0.0)
    with pytest.raises(RunLockedError, match="still in use by another process"):
        Trial(config(tmp_path, seeds=(1, 2))).begin()

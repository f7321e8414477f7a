"""A trial with one run and without Ray's driver: the test makes the calls that Tune would make."""

from pathlib import Path

import pytest
import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trials import (
    IDENTITY,
    UninterruptedRun,
    drop_times,
    find_newest_checkpoint,
    get_rows,
    make_trial_config,
    read_run_files,
    start_trial,
)
from trainable.files import step_phase
from trainable.files.step_phase import read_phase
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.records import DEFAULT_STEP_COLUMNS, STOP_COLUMNS, drop_carried, make_empty_row
from trainable.trial import PPO

ADDED_KEYS = ("training_iteration", "done", "finished", "note", "saved", "carried")
FAILURE_WORDS = {"failure": "", "failure_class": "", "failure_trace": ""}


def test_a_row_has_every_column_and_the_identity_of_its_run(uninterrupted_run: UninterruptedRun) -> None:
    columns = {column.name for column in (*DEFAULT_STEP_COLUMNS, *STOP_COLUMNS)}
    for step, row in enumerate(uninterrupted_run[1], start=1):
        assert set(row) == {*columns, *IDENTITY, *ADDED_KEYS, *FAILURE_WORDS, "step"}
        assert {name: row[name] for name in IDENTITY} == IDENTITY
        assert (row["step"], row["done"]) == (step, step == 3)
        assert (row["stop_rule"], drop_carried(row)["stop_value"]) == ("", None)


def test_rows_are_on_disk_as_they_were_reported(uninterrupted_run: UninterruptedRun) -> None:
    rows, _ = read_run_files(uninterrupted_run[0])
    # Columns without a measurement take no space on disk.
    assert not any(value is None for row in rows for value in row.values())
    rows = [{**make_empty_row(), **row} for row in rows]
    added = {"note": "", "saved": True, "carried": "", **FAILURE_WORDS}
    ends = [{"training_iteration": step, "finished": step == 3, "done": step == 3} for step in (1, 2, 3)]
    reported = [{**drop_carried(row), "carried": ""} for row in uninterrupted_run[1]]
    assert [{**row, **end, **added} for row, end in zip(rows, ends, strict=True)] == reported


def test_evaluations_are_on_disk(uninterrupted_run: UninterruptedRun) -> None:
    folder, rows = uninterrupted_run
    _, lines = read_run_files(folder)
    expected = [
        (0, "val", "sampled", "base_val_success"),
        (0, "val", "greedy", "base_val_greedy_success"),
        (2, "val", "sampled", "val_success"),
        (3, "val", "sampled", "val_success"),
        (3, "val", "greedy", "val_greedy_success"),
        (3, "test", "sampled", "test_success"),
        (3, "test", "greedy", "test_greedy_success"),
    ]
    for line, (step, split, mode, column) in zip(lines, expected, strict=True):
        assert (line["step"], line["split"], line["mode"]) == (step, split, mode)
        assert set(line) == {"step", "split", "mode", "levels", "clusters", "success"}
        assert len(line["levels"]) == len(line["clusters"]) == len(line["success"])
        assert rows[max(step, 1) - 1][column] == pytest.approx(line["success"].count("1") / len(line["success"]))


def test_the_rows_are_those_of_the_trainer(uninterrupted_run: UninterruptedRun) -> None:
    trainer = PPOTrainer(make_small_config(env__val_env_groups=4, env__test_env_groups=2))
    for expected_row in uninterrupted_run[1]:
        row = trainer.step().row
        if expected_row["step"] == 3:
            row = trainer.evaluate_final(row)[0]
        assert {name: expected_row[name] for name in drop_times(row)} == drop_times(row)


def test_checkpoints_are_kept_every_save_freq_steps_and_at_the_end(uninterrupted_run: UninterruptedRun) -> None:
    folder, _ = uninterrupted_run
    assert sorted(path.name for path in (folder / "saved").iterdir()) == ["global_step_2", "global_step_3"]
    assert read_checkpoint(folder / "saved" / "global_step_2")[1]["step"] == 2
    assert find_newest_checkpoint(folder).name == "step_3"
    rolling_tensors = read_checkpoint(find_newest_checkpoint(folder))[0]
    saved_tensors = read_checkpoint(folder / "saved" / "global_step_3")[0]
    assert all(torch.equal(rolling_tensors[name], saved_tensors[name]) for name in rolling_tensors)


def test_no_checkpoint_is_kept_unless_asked_for(tmp_path: Path) -> None:
    trainable = start_trial(tmp_path, trainer__save_freq=0, trainer__total_training_steps=1)
    assert trainable.step()["done"]
    assert not (tmp_path / "saved").exists()
    assert (tmp_path / "runs" / "r" / "state").exists()


def test_an_interrupted_run_writes_a_checkpoint_whatever_resume_every_is(tmp_path: Path) -> None:
    interrupt = tmp_path / "interrupt"
    trainable = start_trial(tmp_path, interrupt=str(interrupt), trainer__resume_every=100)
    trainable.step()
    assert not (tmp_path / "runs" / "r" / "state").exists()
    interrupt.touch()
    trainable.step()
    assert find_newest_checkpoint(tmp_path).name == "step_2"


def test_a_finished_run_reports_its_last_row_and_trains_nothing(uninterrupted_run: UninterruptedRun) -> None:
    folder, rows = uninterrupted_run
    files_before = read_run_files(folder)
    trainable = PPO(make_trial_config(folder))
    assert drop_carried(trainable.step()) == drop_carried(rows[-1])
    trainable.cleanup()
    assert read_run_files(folder) == files_before


STOPS = {
    "early_stop__success_threshold": 1.0,
    "early_stop__success_patience": 2,
    "trainer__test_freq": 1,
    "trainer__total_training_steps": 5,
}


def test_the_row_at_which_a_rule_fires_has_the_final_evaluation(tmp_path: Path) -> None:
    # Success below 1 in two validations in a row: the rule fires at step 2.
    trainable = start_trial(tmp_path, **STOPS)
    first, second = trainable.step(), trainable.step()
    for name in ("val_greedy_success", "test_success", "test_greedy_success"):
        assert drop_carried(first)[name] is None
        assert 0 <= second[name] <= 1
    assert second["done"]
    decision = {name: second[f"stop_{name}"] for name in ("rule", "threshold", "step")}
    assert decision == {"rule": "low_validation_success", "threshold": 1.0, "step": 2}
    assert second["stop_value"] == max(first["val_success"], second["val_success"])
    assert get_rows(trainable)[-1]["stop_rule"] == "low_validation_success"
    last_lines = [(line["step"], line["split"]) for line in read_run_files(tmp_path)[1][-3:]]
    assert last_lines == [(2, "val"), (2, "test"), (2, "test")]


@pytest.mark.long
def test_a_run_that_a_rule_has_stopped_does_not_continue(tmp_path: Path) -> None:
    trainable = start_trial(tmp_path, **STOPS)
    trainable.step()
    last_row = trainable.step()
    assert drop_carried(trainable.step()) == drop_carried(last_row)
    resumed = start_trial(tmp_path, **STOPS)
    assert drop_carried(resumed.step()) == drop_carried(last_row)
    assert [row["step"] for row in read_run_files(tmp_path)[0]] == [1, 2]


@pytest.mark.long
def test_an_actor_that_is_used_again_serves_the_other_run_as_a_fresh_one_would(
    tmp_path: Path, uninterrupted_run: UninterruptedRun
) -> None:
    trainable = start_trial(tmp_path / "other", seed=1, actor__entropy_coeff=0.1)
    other_row = trainable.step()
    assert trainable.reset_config(make_trial_config(tmp_path / "mine"))
    rows = [trainable.step() for _ in range(3)]
    assert [drop_times(row) for row in rows] == [drop_times(row) for row in uninterrupted_run[1]]
    assert drop_times(other_row) != drop_times(rows[0])
    assert trainable.reset_config(make_trial_config(uninterrupted_run[0]))
    assert drop_carried(trainable.step()) == drop_carried(uninterrupted_run[1][-1])
    assert trainable.reset_config(make_trial_config(tmp_path / "mine"))
    assert drop_times(trainable.step()) == drop_times(uninterrupted_run[1][-1])


LAST_EVALUATIONS = ("val_greedy_success", "test_success", "test_greedy_success")


@pytest.mark.parametrize("save_freq", [-1, 2])
def test_a_run_that_is_made_longer_has_the_rows_of_one_that_was_planned_so(
    tmp_path: Path, uninterrupted_run: UninterruptedRun, save_freq: int
) -> None:
    short = start_trial(tmp_path, trainer__total_training_steps=2, trainer__save_freq=save_freq)
    short.step()
    assert short.step()["done"]
    longer = start_trial(tmp_path, trainer__save_freq=save_freq)  # 3 steps
    assert longer.step()["done"]
    rows, straight_rows = get_rows(longer), read_run_files(uninterrupted_run[0])[0]
    # The evaluations of the first end, and the levels that were known to be trained on, are what differs.
    assert {*rows[1]} - {*straight_rows[1]} == {*LAST_EVALUATIONS}
    left_out = {*LAST_EVALUATIONS, "base_val_success_unseen", "val_success_unseen", "ends"}
    for row, straight_row in zip(rows[:2], straight_rows[:2], strict=True):
        one, other = (drop_times(either) for either in (row, straight_row))
        assert {name: one[name] for name in one.keys() - left_out} == {
            name: other[name] for name in other.keys() - left_out
        }
    assert drop_times(rows[2]) == drop_times(straight_rows[2])


def test_a_long_step_names_its_phases_in_a_file_that_is_gone_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_phase, "QUIET_SECONDS", 0.0)  # every step is a long one
    phases: list[str] = []

    def write_phase(run_dir: Path, step: int, phase: str) -> None:
        step_phase.write_phase(run_dir, step, phase)
        phases.append(read_phase(run_dir, 1))

    monkeypatch.setattr("trainable.runs.training.write_phase", write_phase)
    trial = start_trial(tmp_path, trainer__total_training_steps=1, actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    trial.step()
    names = [phase.partition(",")[0] for phase in phases]
    order = ["validation", "rollout", "values", "reference", "update critic", "update actor", "sync weights"]
    assert [*dict.fromkeys(names)] == [*order, "final evaluation"]
    assert any(phase.startswith("rollout, turn 2 of 5, ") for phase in phases)
    assert "update actor, mini-batch 1 of 2" in phases
    assert not (tmp_path / "runs" / "r" / "phase.json").exists()
    # Nor does a run show what a process did that was killed.
    step_phase.write_phase(tmp_path / "runs" / "r", 2, "rollout")
    start_trial(tmp_path, trainer__total_training_steps=2)
    assert read_phase(tmp_path / "runs" / "r", 2) == ""
    assert read_run_files(tmp_path)[0][0]["step"] == 1

"""Runs whose trainer writes them into the folder of a study itself."""

import csv
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback, TrainerState, TrainingArguments

from analysis.data.load import load
from analysis.report.pages import summarize_study
from analysis.sources import attach
from analysis.sources.attach import AttachedRun, StudyCallback
from tests.analysis.sources.tiny_trainer import make_trainer
from tests.fakes.command_line import read_files
from tests.fakes.run_folders import FakeRun, write_study
from trainable.files.json_values import read_object
from trainable.runs.history import RunHistory
from trainable.runs.run_files import RunLockedError, acquire_lock, read_rows
from trainable.runs.study_record import StudyRecord, read_record
from tune_study.commands.reading.importing import import_study


class Probe(TrainerCallback):  # type: ignore[misc]
    """Reads the run while it trains, and fails after the log of a step."""

    def __init__(self, run_dir: Path, fails_at: int = -1) -> None:
        self.run_dir, self.fails_at = run_dir, fails_at
        self.seen: list[tuple[int, str, list[int]]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        history = RunHistory.read(self.run_dir, 4)
        self.seen.append((state.global_step, history.status.status, [row["step"] for row in history.rows]))
        if state.global_step == self.fails_at:
            raise RuntimeError("the disk is on fire")


def train(study: Path, output: Path, arm: str, seed: int, successes: list[float], **names: Any) -> None:
    trainer = make_trainer(output, successes, seed)
    trainer.add_callback(StudyCallback(study, arm, seed, **names))
    trainer.train()


def test_a_row_is_written_when_the_next_step_begins_and_has_their_names_beside_ours(tmp_path: Path) -> None:
    trainer, run_dir = make_trainer(tmp_path / "out", [0.1, 0.2, 0.4]), tmp_path / "study/runs/a-s1"
    probe = Probe(run_dir)
    trainer.add_callback(StudyCallback(tmp_path / "study", arm="a", seed=1))
    trainer.add_callback(probe)
    trainer.train()
    # Steps 2 and 4 are logged twice, for training and validation, and step 4 once more when training ends.
    assert [(step, len(rows)) for step, _, rows in probe.seen] == [
        (0, 0), (1, 0), (2, 1), (2, 1), (3, 2), (4, 3), (4, 3), (4, 3),
    ]  # fmt: skip
    assert {status for _, status, _ in probe.seen} == {"running"}
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [(row["step"], row.get("val_success"), row.get("eval_reward")) for row in rows] == [
        (1, None, None),
        (2, 0.2, 0.2),
        (3, None, None),
        (4, 0.4, 0.4),
    ]
    assert rows[0]["base_val_success"] == 0.1
    assert all(row["actor_grad_norm"] == row["grad_norm"] for row in rows)
    history = RunHistory.read(run_dir, 4)
    assert (history.status.status, history.lines.find_damage()) == ("completed", [])


def test_a_resumed_training_continues_its_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "study/runs/a-s1"
    trainer = make_trainer(tmp_path / "out", [0.1, 0.2])
    trainer.add_callback(StudyCallback(tmp_path / "study", arm="a", seed=1))
    trainer.add_callback(Probe(run_dir, fails_at=3))
    with pytest.raises(RuntimeError, match="on fire"):
        trainer.train()
    losses = [row["loss"] for row in read_rows(run_dir / "metrics.jsonl")]
    assert len(losses) == 2
    resumed = make_trainer(tmp_path / "out", [0.3, 0.4])
    resumed.add_callback(StudyCallback(tmp_path / "study", arm="a", seed=1))
    probe = Probe(run_dir)
    resumed.add_callback(probe)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert probe.seen[0] == (2, "running", [1, 2, 3]), "the first training has ended"
    rows = read_rows(run_dir / "metrics.jsonl")
    # It validated at step 2 again, whose row has kept what was measured in training.
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("val_success") for row in rows] == [None, 0.3, None, 0.4]
    assert [row["loss"] for row in rows[:2]] == losses
    assert [row.get("base_val_success") for row in rows[:2]] == [0.1, None]
    status = RunHistory.read(run_dir, 4).status
    assert status.status == "completed"
    assert status.started_at is not None
    assert len(read_record(StudyRecord, tmp_path / "study").runs) == 1


@pytest.mark.long
def test_the_verdict_is_that_of_the_same_logs_imported(tmp_path: Path) -> None:
    successes = {("b", 1): 0.6, ("b", 2): 0.7, ("b", 3): 0.8, ("a", 1): 0.2, ("a", 2): 0.3, ("a", 3): 0.1}
    for (arm, seed), success in successes.items():
        values = [0.1, success, success]
        train(tmp_path / "study", tmp_path / f"out/{arm}{seed}", arm, seed, values, baseline="a")
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["log", "arm", "seed"])
        # The first arm of an import is its baseline.
        writer.writerows(
            (f"out/{arm}{seed}/checkpoint-4/trainer_state.json", arm, seed) for arm, seed in sorted(successes)
        )
    import_study([], tmp_path / "imported/study", [], None, [], runs_file=tmp_path / "runs.csv")
    attached, imported = load(tmp_path / "study"), load(tmp_path / "imported/study")
    summary = summarize_study(attached)
    assert (summary["baseline"], [arm["arm"] for arm in summary["arms"]]) == ("a", ["a", "b"])
    assert summary["arms"][1]["difference"] == pytest.approx(0.5)
    assert summary["arms"][1] == summarize_study(imported)["arms"][1]
    columns = ["arm", "seed", "step", "val_success", "base_val_success", "actor_grad_norm"]
    rows, other_rows = (
        frames.steps[columns].sort_values(columns[:3], ignore_index=True) for frames in (attached, imported)
    )
    # The last row of trainer_state.json was saved before training ended.
    assert rows.equals(other_rows)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    callback = StudyCallback(tmp_path / "study", arm="a", seed=1)
    state = TrainerState(is_world_process_zero=False, max_steps=4, global_step=1)
    callback.on_train_begin(TrainingArguments(str(tmp_path)), state, None)
    callback.on_log(None, state, None, logs={"loss": 1.0})
    callback.on_train_end(None, state, None)
    assert not (tmp_path / "study").exists()


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    kept = {"loss_agg_mode": "token-mean", "max_token_len": 512, "path": "s3://bucket/a", "modules": ["k_proj"]}
    secrets = {
        "env_vars": {"WANDB_API_KEY": "staple-1"},
        "hub_token": "staple-2",
        "proxy": "http://user:staple-3@host",
        "extra": ["--api-key", "staple-4"],
        "arguments": "--token=staple-5",
        "note": "hf_staple6staple",
        "judge": "correct-horse-battery",
    }
    AttachedRun(tmp_path / "study", "a", 1, "", {}, "verl", {"model": kept, **secrets}).close()
    text = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "staple" not in text
    assert "correct-horse" not in text
    config = read_object(tmp_path / "study/runs/a-s1/run.json")["config"]
    assert config == {f"model.{key}": value for key, value in kept.items()}


def test_columns_names_a_measurement_as_import_does(tmp_path: Path) -> None:
    run = AttachedRun(tmp_path / "study", "a", 1, "", {"val_success": "eval_pass"}, "trl", {"max_steps": 2})
    for step in (1, 2):
        run.log({"eval_pass": np.float32(step / 4), "loss": 1.0}, step)
    run.close()
    rows = read_rows(tmp_path / "study/runs/a-s1/metrics.jsonl")
    assert [(row["step"], row["val_success"], row["eval_pass"]) for row in rows] == [(1, 0.25, 0.25), (2, 0.5, 0.5)]


def test_what_is_no_run_and_a_folder_of_another_study_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="seed='1' name no run: give a text and a whole number"):
        AttachedRun(tmp_path / "study", "a", "1", "", {}, "trl", {})  # type: ignore[arg-type]
    assert not (tmp_path / "study").exists()
    folder = write_study(tmp_path / "ours", [FakeRun("0", 1)])
    files = read_files(folder)
    with pytest.raises(ValueError, match=f"{folder} has a study that tune_study trains: name another folder"):
        AttachedRun(folder, "a", 1, "", {}, "trl", {})
    assert {**read_files(folder), "runs/.lock": b""} == {**files, "runs/.lock": b""}
    monkeypatch.setattr(attach, "_RUN_SECONDS", 0.0)
    (tmp_path / "study/runs/a-s1").mkdir(parents=True)
    with closing(acquire_lock(tmp_path / "study/runs/a-s1", 0)), pytest.raises(RunLockedError, match="still in use by"):
        AttachedRun(tmp_path / "study", "a", 1, "", {}, "trl", {})
    assert not (tmp_path / "study/study.json").exists()


def test_how_a_run_ends_whose_trainer_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exceptions are those that ended this process, or an earlier cell of its notebook."""
    monkeypatch.setattr(sys, "last_value", RuntimeError("earlier"), raising=False)
    for arm, error, expected in (
        ("a", None, ("interrupted", "interrupted after step 1 of 9")),
        ("b", KeyboardInterrupt(), ("interrupted", "interrupted after step 1 of 9")),
        ("c", RuntimeError("now"), ("failed", "RuntimeError: now")),
    ):
        run = AttachedRun(tmp_path / "study", arm, 1, "", {}, "trl", {"max_steps": 9})
        run.log({"reward": 0.5}, 1)
        run_dir = tmp_path / f"study/runs/{arm}-s1"
        child = os.fork()
        if child == 0:
            attach.end_open_runs()
            os._exit(0)
        os.waitpid(child, 0)
        assert RunHistory.read(run_dir, 9).status.status == "running", "a data loader's process ends no run"
        if error is not None:
            monkeypatch.setattr(sys, "last_value", error)
        attach.end_open_runs()
        status = RunHistory.read(run_dir, 9).status
        assert (status.status, status.reason) == expected

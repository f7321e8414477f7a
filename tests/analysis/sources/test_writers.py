"""Logs that the trackers and trainers themselves write: W&B, and TRL where it is installed (make bench)."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from analysis.sources.log_files import list_runs
from analysis.sources.names import translate_rows
from tests.analysis.sources.logs import read_log
from trainable.models.load import find_model

pytestmark = pytest.mark.processes

WANDB_SCRIPT = """
import sys, wandb
config = {"seed": 3, "model": {"path": "m"}}
with wandb.init(project="p", id="abc", dir=sys.argv[1], mode="offline", resume="allow", config=config) as run:
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        run.log({"train/reward": step / 8, "eval": {"reward": 1}, "train/global_step": step})
"""
TRL_SCRIPT = """
import os, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
folder, model = sys.argv[1:]
os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder}
config = GRPOConfig(
    output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=4,
    per_device_eval_batch_size=4, num_generations=4, steps_per_generation=1, max_completion_length=4, max_steps=4,
    report_to=["tensorboard", "wandb"], save_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2,
    eval_on_start=True, disable_tqdm=True, seed=3,
)
prompts = Dataset.from_dict({"prompt": ["##_#", "__##", "#__#"]})
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(model), args=config, train_dataset=prompts, eval_dataset=prompts.select([0]),
    reward_funcs=lambda completions, **_: [float(row % 2) for row in range(len(completions))],
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
"""


def run_script(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=True, capture_output=True)


def test_runs_that_wandb_has_written_and_resumed(tmp_path: Path) -> None:
    for first, end in ((1, 5), (3, 7)):
        run_script(WANDB_SCRIPT, tmp_path, first, end)
    assert (tmp_path / "wandb" / "latest-run").is_symlink()
    typed = sorted((tmp_path / "wandb").glob("*/run-*.wandb"))
    assert len(typed) == 3, "the link counts the last run twice"
    places: Sequence[Sequence[Path]] = ([tmp_path], [tmp_path / "wandb"], typed)
    for paths in places:
        (files,) = list_runs(paths)
        assert len(files) == 2
        log = read_log(*files)
        assert [(row.step, row.values["train/reward"]) for row in log.rows] == [
            (step, step / 8) for step in range(1, 7)
        ]
        assert log.settings == {"seed": 3, "model.path": "m"}
        assert len(log.notes) == 1
    (files,) = list_runs([typed[0].parent])
    assert len(read_log(*files).rows) == 4


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: make .venv-bench/ready")
def test_what_trl_writes_is_the_same_in_its_state_tensorboard_and_wandb(tmp_path: Path) -> None:
    run_script(TRL_SCRIPT, tmp_path, find_model("sokoban-tiny"))
    (state,) = list_runs([tmp_path])
    assert state == (tmp_path / "checkpoint-4" / "trainer_state.json",)
    tables = []
    for files in (state, *list_runs([tmp_path / "runs"]), *list_runs([tmp_path / "wandb"])):
        log = read_log(*files)
        assert log.settings["seed"] == 3
        assert log.settings["num_generations"] == 4
        assert not log.notes
        tables.append(translate_rows(log))
    for row in tables[0]:
        assert json.dumps(row)
        assert row["train_reward"] == 0.5
        assert "kl_to_reference" not in row, "without beta, TRL measures none"
    assert [row.get("val_success") for row in tables[0]] == [None, 0.5, None, 0.5]
    assert tables[0][0]["base_val_success"] == 0.5
    columns = ("step", "val_success", "entropy", "actor_grad_norm", "train_response_tokens", "zero_std_fraction")
    for rows, other_rows in pairwise(tables):
        for row, other_row in zip(rows, other_rows, strict=True):
            assert [other_row.get(column) for column in columns] == pytest.approx(
                [row.get(column) for column in columns]
            )

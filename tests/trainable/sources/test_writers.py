"""What trackers and trainers themselves write: logs, and runs of studies. Those of TRL and verl in make test-trl."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from analysis.data.episodes import read_episodes_of_run
from analysis.sources.importing import import_logs, name_runs
from tests.trainable.sources.logs import read_log
from trainable.models.load import find_model
from trainable.runs.history import RunHistory
from trainable.runs.run_files import read_rows
from trainable.runs.study_record import StudyRecord, read_record
from trainable.sources.log_files import list_runs
from trainable.sources.names import translate_rows
from tune_study.commands.describe import read_status

pytestmark = pytest.mark.processes

WANDB_SCRIPT = """
import sys, wandb
config = {"seed": 3, "model": {"path": "m"}}
# What it finds out about the machine takes longer than the run.
quick = {"x_disable_stats": True, "x_disable_machine_info": True, "disable_git": True, "x_save_requirements": False}
with wandb.init(
    project="p", id="abc", dir=sys.argv[1], mode="offline", resume="allow", config=config, settings=quick
) as run:
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        run.log({"train/reward": step / 8, "eval": {"reward": 1}, "train/global_step": step})
"""
TRL_SCRIPT = """
import os, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from analysis.sources.attach import StudyCallback
folder, model = sys.argv[1:]
os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder}
config = GRPOConfig(
    output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=4,
    per_device_eval_batch_size=4, num_generations=4, steps_per_generation=1, max_completion_length=4, max_steps=4,
    report_to=["tensorboard", "wandb"], save_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2,
    eval_on_start=True, disable_tqdm=True, seed=3, log_completions=True, num_completions_to_print=1,
)
def is_odd(completions, **_):
    return [float(row % 2) for row in range(len(completions))]
prompts = Dataset.from_dict({"prompt": ["##_#", "__##", "#__#"]})
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(model), args=config, train_dataset=prompts, eval_dataset=prompts.select([0]),
    reward_funcs=is_odd,
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.add_callback(StudyCallback(folder + "/attached", arm="beta=0", seed=3))
trainer.train()
"""
ATTACHED_SCRIPT = """
import sys, time
from pathlib import Path
from transformers import TrainerCallback
from analysis.sources.attach import StudyCallback
from tests.analysis.sources.tiny_trainer import make_trainer
folder, arm, seed, end = sys.argv[1:]

class End(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and end == "raises":
            raise RuntimeError("the disk is on fire")
        if state.global_step == 3 and end == "waits":
            print("waiting", flush=True)
            time.sleep(600)

trainer = make_trainer(Path(folder, arm + seed), [0.1, 0.2, 0.3], int(seed))
trainer.add_callback(StudyCallback(Path(folder, "study"), arm, int(seed), baseline="b"))
trainer.add_callback(End())
trainer.train()
"""
VERL_SCRIPT = """
import os, sys
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pprint import pprint

def load(name):
    # The package itself imports Ray and tensordict.
    spec = spec_from_file_location(name.rpartition("/")[2], distribution("verl").locate_file(f"verl/utils/{name}.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

os.environ["VERL_FILE_LOGGER_PATH"] = sys.argv[1]
logger = load("tracking").FileLogger("project", "run")
console = load("logger/aggregate_logger").LocalLogger()
pprint({"data": {"seed": 3, "train_files": "gsm8k/train.parquet"}, "algorithm": {"kl_ctrl": {"kl_coef": 0.001}}})
for step in range(1, 5):
    row = {"critic/score/mean": step / 8, "actor/entropy": 1 / 3, "response_length/clip_ratio": 0.0}
    if step % 2 == 0:
        row["val-core/openai/gsm8k/reward/mean@1"] = step / 16
    for writer in (logger, console):
        writer.log(row, step)
"""
VERL_ATTACHED_SCRIPT = """
import os, sys
from importlib.metadata import distribution
from types import ModuleType
import numpy as np
from analysis.sources.attach import add_verl_backend

# The package itself imports Ray and tensordict.
for name in ("verl", "verl.utils"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(distribution("verl").locate_file(name.replace(".", "/")))]
folder = sys.argv[1]
os.environ["VERL_FILE_LOGGER_PATH"] = folder + "/run.jsonl"
add_verl_backend(folder + "/study", arm="kl=0", seed=3)

from verl.utils.tracking import Tracking
config = {"trainer": {"total_training_steps": 4, "env_vars": {"WANDB_API_KEY": "staple"}}}
tracking = Tracking("project", "run", ["file", "tune_study"], config)
try:
    tracking.log({"val-core/openai/gsm8k/reward/mean@1": 0.25}, step=0)
    for step in range(1, 5):
        row = {"critic/score/mean": np.float32(step / 8), "actor/entropy": 1 / 3, "training/global_step": step}
        if step % 2 == 0:
            row["val-core/openai/gsm8k/reward/mean@1"] = np.float64(step / 16)
        tracking.log(row, step)
        if sys.argv[2:] == [str(step)]:
            raise RuntimeError("the disk is on fire")
finally:
    tracking.finish()
"""
TINKER_SCRIPT = """
import sys
from tinker_cookbook.utils.ml_log import JsonLogger
logger = JsonLogger(sys.argv[1])
logger.log_hparams({"seed": 3, "loss": {"kl_coef": 0.1}})
for step in range(4):
    row = {"env/all/reward/total": step / 8, "optim/entropy": 1 / 3, "progress/batch": step}
    if step % 2 == 0:
        row["test/env/all/reward/total"] = step / 16
    logger.log_metrics(row, step=step)
"""


def run_script(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


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


@pytest.mark.slow
def test_processes_write_one_study_at_the_same_time(tmp_path: Path) -> None:
    folder = tmp_path / "study"

    def read() -> tuple[str, dict[str, tuple[str, int, str]], str | None]:
        status = read_status(folder, str(folder), read_record(StudyRecord, folder), is_running=False)
        runs = {run["run"]: (run["status_text"], run["step"], run["reason"]) for run in status["runs"]}
        return status["state"], runs, status["resume_command"]

    with ExitStack() as stack:
        ended, failed, waiting = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ATTACHED_SCRIPT, str(tmp_path), *run],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for run in (("a", "0", "ends"), ("a", "1", "raises"), ("b", "0", "waits"))
        )
        stack.callback(waiting.kill)
        assert (ended.wait(), failed.wait()) == (0, 1)
        assert waiting.stdout is not None
        assert "waiting\n" in iter(waiting.stdout.readline, "")
        expected = {
            "b-s0": ("running", 2, ""),
            "a-s0": ("completed", 4, "trained 4 of 4 steps"),
            "a-s1": ("failed (error)", 2, "RuntimeError: the disk is on fire"),
        }
        assert read() == ("running", expected, None)
    expected["b-s0"] = ("interrupted", 2, "the process that ran the study is gone, after step 2")
    assert read() == ("unfinished", expected, None), "no command continues a run of another trainer"
    study = read_record(StudyRecord, folder)
    assert (study.baseline, study.seeds, study.total_steps) == ("b", (0, 1), 4)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="make test-trl")
@pytest.mark.slow
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
    # The evaluations of steps 2 and 4 have replaced the completions of the training.
    log = read_log(*state)
    import_logs([log], name_runs([log]), tmp_path / "study", ())
    assert log.notes[-2].startswith("2 steps have completions of the training, of which 8 of 8 are")
    assert log.notes[-1].startswith("At 2 steps, such as 2, the completions of an evaluation have replaced")
    episodes = read_episodes_of_run(tmp_path / "study", "all-s0")
    assert [(episode.step, episode.rollout, episode.score) for episode in episodes] == [
        (step, rollout, rollout % 2) for step in (1, 3) for rollout in range(4)
    ]
    assert {episode.turns[0].observation for episode in episodes} <= {"##_#", "__##", "#__#"}
    assert [episode.advantage for episode in episodes] == pytest.approx([-0.866, 0.866] * 4, abs=0.001)
    columns = ("step", "val_success", "entropy", "actor_grad_norm", "train_response_tokens", "zero_std_fraction")
    attached = read_rows(tmp_path / "attached/runs/beta=0-s3/metrics.jsonl")
    origin = {"source", "file", "line"}
    for row, attached_row in zip(tables[0], attached, strict=True):
        # When training ends, TRL logs further measurements of the last step.
        assert {**attached_row, **row} == {**attached_row, **{name: row[name] for name in origin}}
    assert "train_runtime" in attached[-1]
    for rows, other_rows in pairwise(tables):
        for row, other_row in zip(rows, other_rows, strict=True):
            assert [other_row.get(column) for column in columns] == pytest.approx(
                [row.get(column) for column in columns]
            )


needs_trainers = pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="make test-trl")


@needs_trainers
def test_what_verl_prints_is_what_it_writes_to_a_file(tmp_path: Path) -> None:
    console = tmp_path / "console.log"
    console.write_text(run_script(VERL_SCRIPT, tmp_path / "run.jsonl"))
    printed, written = read_log(console), read_log(tmp_path / "run.jsonl")
    assert printed.settings == {
        "data.seed": 3,
        "data.train_files": "gsm8k/train.parquet",
        "algorithm.kl_ctrl.kl_coef": 0.001,
    }
    columns = ("step", "train_reward", "entropy", "train_truncated", "val_success")
    expected = [[step, step / 8, 1 / 3, 0.0, None if step % 2 else step / 16] for step in range(1, 5)]
    for log in (printed, written):
        assert [[row.get(column) for column in columns] for row in translate_rows(log)] == expected


@needs_trainers
def test_a_run_that_verl_writes_is_what_it_writes_to_a_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "study/runs/kl=0-s3"
    with pytest.raises(subprocess.CalledProcessError):
        run_script(VERL_ATTACHED_SCRIPT, tmp_path, 3)
    history = RunHistory.read(run_dir, 4)
    assert [row["step"] for row in history.rows] == [1, 2, 3]
    assert history.status.display_text == "failed (error)"
    assert history.status.reason == "RuntimeError: the disk is on fire"
    run_script(VERL_ATTACHED_SCRIPT, tmp_path)
    history = RunHistory.read(run_dir, 4)
    assert history.status.status == "completed"
    columns = ("step", "train_reward", "entropy", "val_success", "base_val_success", "critic/score/mean")
    rows = translate_rows(read_log(tmp_path / "run.jsonl"))
    assert [row.get("base_val_success") for row in rows] == [0.25, None, None, None]
    assert [[row.get(column) for column in columns] for row in history.rows] == [
        [row.get(column) for column in columns] for row in rows
    ]
    assert "staple" not in (run_dir / "run.json").read_text()


@needs_trainers
def test_what_tinker_cookbook_writes(tmp_path: Path) -> None:
    run_script(TINKER_SCRIPT, tmp_path)
    (files,) = list_runs([tmp_path])
    log = read_log(*files)
    assert log.settings == {"seed": 3, "loss.kl_coef": 0.1}
    columns = ("step", "train_reward", "entropy_sampled", "base_val_success", "val_success")
    # Steps count from 0, and a validation is made before the update of its row.
    assert [[row.get(column) for column in columns] for row in translate_rows(log)] == [
        [1, 0.0, 1 / 3, 0.0, None],
        [2, 0.125, 1 / 3, None, 0.125],
        [3, 0.25, 1 / 3, None, None],
        [4, 0.375, 1 / 3, None, None],
    ]

"""A study with adapters by the real command: two steps, whose checkpoints are restored, scored and probed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import analysis
from trainable.files.json_lines import read_lines
from trainable.models.lora import find_adapters
from tune_study.commands import probe
from tune_study.plan.errors import PlanError

pytestmark = pytest.mark.slow  # tests/trainable/models/test_lora.py tests the trainer without a study

OPTIONS = (
    "model.lora_rank=8",
    "actor.lr=1e-3",
    "env.env_groups=2",
    "env.group_size=4",
    "env.val_env_groups=8",
    "env.test_env_groups=4",
    "actor.ppo_mini_batch_size=4",
    "critic.ppo_mini_batch_size=4",
    "trainer.save_freq=1",
)
RUN = Path("results/kl_sweep_sokoban-tiny")


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run([sys.executable, "-m", "tune_study", *words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process


def train_study(folder: Path) -> Path:
    changes = [f"--set={option}" for option in OPTIONS]
    words = ["run", "kl", "--preset", "laptop", "--kl-values", "0.1", "--seeds", "1", "--steps", "2", "--output"]
    run_command(*words, str(folder), *changes)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_study(tmp_path_factory.mktemp("adapters") / "out")


def find_run_dir(study: Path) -> Path:
    (run_dir,) = (study / RUN / "runs").iterdir()
    return run_dir


def find_checkpoint(study: Path, step: int) -> Path:
    (checkpoint,) = study.glob(f"model_saving/*/*/*/global_step_{step}")
    return checkpoint


def test_the_run_is_completed_and_a_checkpoint_holds_adapters_alone(study: Path) -> None:
    frames = analysis.load(study)
    assert list(frames.trials["status"]) == ["completed"]
    assert list(frames.steps["step"]) == [1, 2]
    assert frames.steps["kl_to_reference"].iloc[-1] > 1e-6
    tensors = load_file(find_checkpoint(study, 2) / "state.safetensors")
    trained_names = [name for name in tensors if "_optimizer/" not in name]
    assert all(".lora_" in name or name.startswith("critic/score.") for name in trained_names)
    assert json.loads((find_checkpoint(study, 2) / "state.json").read_text())["base"]


def test_resumed_from_its_first_state_it_ends_as_it_did(study: Path, tmp_path: Path) -> None:
    resumed_study = tmp_path / "out"
    shutil.copytree(study, resumed_study)
    run_dir = find_run_dir(resumed_study)
    for path in (run_dir / "state").iterdir():
        shutil.rmtree(path)
    shutil.copytree(find_checkpoint(resumed_study, 1), run_dir / "state" / "step_1")
    shutil.rmtree(find_checkpoint(resumed_study, 2))
    (run_dir / "status.json").unlink()  # as if the machine had stopped before the second step
    for name in ("metrics.jsonl", "levels.jsonl"):
        lines = (run_dir / name).read_text().splitlines(keepends=True)
        (run_dir / name).write_text("".join(line for line in lines if json.loads(line)["step"] < 2))
    run_command("resume", str(resumed_study / RUN))
    assert analysis.diff_frames(analysis.load(study).steps, analysis.load(resumed_study).steps) == []
    resumed_tensors, expected_tensors = (
        load_file(find_checkpoint(folder, 2) / "state.safetensors") for folder in (resumed_study, study)
    )
    assert resumed_tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(resumed_tensors[name], value) for name, value in expected_tensors.items())


def test_a_restored_run_has_its_adapters(study: Path) -> None:
    trainer = probe.restore(study / RUN, step=2)
    tensors = load_file(find_checkpoint(study, 2) / "state.safetensors")
    for name, layer in find_adapters(trainer.model):
        assert torch.equal(layer.lora_B["default"].weight, tensors[f"actor/{name}.lora_B.default.weight"])
    other_trainer = probe.restore(study / RUN, step=1)
    episodes, other_episodes = (t.roll_out(trainer.val_levels[:2], 1, "sampling") for t in (trainer, other_trainer))
    logprobs, other_logprobs = episodes[0].logprobs, other_episodes[0].logprobs
    assert logprobs.shape != other_logprobs.shape or not np.array_equal(logprobs, other_logprobs)


def test_a_probe_measures_gradients_of_adapters(study: Path) -> None:
    sizes = ("trainer.gradient_analysis_env_groups=4", "trainer.gradient_analysis_group_size=4")
    process = run_command("probe", str(study / RUN), *(word for size in sizes for word in ("--set", size)))
    assert "nothing is trained" in process.stdout
    rows = [row for line in read_lines(find_run_dir(study) / "probes.jsonl").records for row in line["rows"]]
    all_bucket_rows = {row["component"]: row for row in rows if row["bucket"] == "all"}
    assert all(all_bucket_rows[name]["mean_norm"] > 0 for name in ("task", "kl", "entropy"))


def test_another_base_under_the_same_name_is_refused(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    shutil.copytree(find_checkpoint(study, 2), folder)
    values = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(values | {"base": "0" * 64}))
    checksums = json.loads((folder / "checksums.json").read_text())
    checksums["state.json"] = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(PlanError, match=r"cannot be used: it has adapters of the base 000000000000, and this run"):
        probe.restore(study / RUN, path=folder)

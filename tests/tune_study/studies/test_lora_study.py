"""A study with adapters by the real command: two steps, its checkpoints restored, questioned and probed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import analysis
from trainable.config.seeds import make_rng
from trainable.diagnostics.token_scores import format_transcript, score_tokens
from trainable.models.lora import find_adapters
from trainable.runs.run_files import read_json_lines
from tune_study.commands import probe
from tune_study.plan.study_plan import PlanError

pytestmark = pytest.mark.slow  # tests/trainable/models/test_lora.py has the same of the trainer alone

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


def command(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "tune_study", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def trained(folder: Path) -> Path:
    changes = [word for option in OPTIONS for word in ("--set", option)]
    command("run", "kl", "--preset", "laptop", "--kl-values", "0.1", "--steps", "2", "--output", str(folder), *changes)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("adapters") / "out")


def run_of(study: Path) -> Path:
    (found,) = (study / RUN / "runs").iterdir()
    return found


def kept(study: Path, step: int) -> Path:
    (found,) = study.glob(f"model_saving/*/*/*/global_step_{step}")
    return found


def test_the_run_is_completed_and_a_checkpoint_holds_adapters_alone(study: Path) -> None:
    frames = analysis.load(study)
    assert list(frames.trials["status"]) == ["completed"]
    assert list(frames.steps["step"]) == [1, 2]
    assert frames.steps["kl_to_reference"].iloc[-1] > 1e-6
    tensors = load_file(kept(study, 2) / "state.safetensors")
    learned = [name for name in tensors if "_optimizer/" not in name]
    assert all(".lora_" in name or name.startswith("critic/score.") for name in learned)
    assert json.loads((kept(study, 2) / "state.json").read_text())["base"]


def test_resumed_from_its_first_state_it_ends_as_it_did(study: Path, tmp_path: Path) -> None:
    other = tmp_path / "out"
    shutil.copytree(study, other)
    run = run_of(other)
    for path in (run / "state").iterdir():
        shutil.rmtree(path)
    shutil.copytree(kept(other, 1), run / "state" / "step_1")
    shutil.rmtree(kept(other, 2))
    (run / "status.json").unlink()  # as if the machine had stopped before the second step
    for name in ("metrics.jsonl", "levels.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] < 2))
    command("resume", str(other / RUN))
    assert analysis.diff_frames(analysis.load(study).steps, analysis.load(other).steps) == []
    ours, theirs = (load_file(kept(folder, 2) / "state.safetensors") for folder in (other, study))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_restored_run_is_its_adapters_and_says_what_it_says(study: Path) -> None:
    trainers = {step: probe.restore(study / RUN, step=step) for step in (1, 2)}
    tensors = load_file(kept(study, 2) / "state.safetensors")
    for name, layer in find_adapters(trainers[2].model):
        assert torch.equal(layer.lora_B["default"].weight, tensors[f"actor/{name}.lora_B.default.weight"])
    episodes = trainers[2].roll_out(trainers[2].val_levels[:2], 1, make_rng(0, "sampling", 1))
    assert f"level {episodes[0].level_seed}" in format_transcript(episodes[0], trainers[2].codec)
    asked = {step: score_tokens(trainer, episodes) for step, trainer in trainers.items()}
    for episode, said in zip(episodes, asked[2], strict=True):
        assert [token.logprob for token in said] == pytest.approx(episode.logprobs[episode.mask].tolist(), abs=1e-4)
        assert all(token.value is not None for token in said)
    assert asked[1] != asked[2]


def test_a_probe_measures_gradients_of_adapters(study: Path) -> None:
    sizes = ("trainer.gradient_analysis_env_groups=4", "trainer.gradient_analysis_group_size=4")
    said = command("probe", str(study / RUN), *(word for size in sizes for word in ("--set", size)))
    assert "nothing is trained" in said.stdout
    rows = [row for line in read_json_lines(run_of(study) / "probes.jsonl") for row in line["rows"]]
    found = {row["component"]: row for row in rows if row["bucket"] == "all"}
    assert all(found[name]["mean_norm"] > 0 for name in ("task", "kl", "entropy"))


def test_another_base_under_the_same_name_is_refused(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    shutil.copytree(kept(study, 2), folder)
    values = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(values | {"base": "0" * 64}))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["state.json"] = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(PlanError, match=r"cannot be used: it has adapters of the base 000000000000, and this run"):
        probe.restore(study / RUN, path=folder)

"""Benchmarks of a step and of passes run on a processor, and count operations as they are made."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
PHASES = ["rollout_stand_in", "collapse", "values", "reference", "update_critic", "update_actor"]


@pytest.fixture
def gpu_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_step")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(FOLDER / "gpu_step.py"), "--shape", "tiny", "--device", "cpu"]
    return subprocess.run([*command, *options], capture_output=True, text=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_the_tiny_shape_is_measured_phase_by_phase(dtype: str) -> None:
    done = run("--episodes", "16", "--tokens", "4", "--dtype", dtype)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert list(found["phases"]) == PHASES
    assert found["episodes"] == 16
    assert 16 * 5 <= found["trained_tokens"] <= 16 * 5 * 4
    for row in found["phases"].values():
        assert row["seconds"] > 0
        assert row["utilisation"] > 0
        assert row["peak_gib"] is None


def test_the_share_is_operations_over_seconds_times_the_rate(
    gpu_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_step, "clocked", lambda run, kind: 2.0)
    found = gpu_step.measured(gpu_step.Phase(lambda: None, 5e12), torch.device("cpu"), rate=1e13)
    assert found == {"seconds": 2.0, "tflop": 5.0, "utilisation": 0.25, "peak_gib": None}


def test_passes_without_padding_are_measured_beside_padded_ones() -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / "packing.py"), "--device", "cpu", "--repetitions", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for case in ("laptop", "laptop, every token four times"):
        for work in ("update", "reference"):
            assert 0 < found[case][work]["padding_share"] < 1
            assert found[case][work]["relative_difference"] < 1e-5


@pytest.mark.parametrize(("options", "message"), [
    (("--episodes", "20"), "--episodes is 20; it must be a multiple of 16"),
    (("--tokens", "1"), "--tokens is 1; it must be at least 2"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 111_232), ("0.5b", 494_032_768), ("3b", 3_085_938_688)])
def test_shapes_are_those_of_the_models_they_are_named_for(gpu_step: ModuleType, name: str, parameters: int) -> None:
    sizes = gpu_step.shape_of(name)
    with torch.device("meta"):
        model = gpu_step.Qwen2(sizes)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.mark.slow
def test_the_sandbox_is_measured_together_and_one_by_one() -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / "update_rules.py"), "--steps", "1", "--seeds", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert list(found["conditions"]) == ["DG", "GRPO, 4 inner epochs", "TPOToken, 4 inner epochs"]
    assert all(each["one_by_one_over_ensemble"] > 0 for each in found["conditions"].values())

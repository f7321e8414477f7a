"""Every benchmark runs with short options; those of a step and of forward passes also count operations."""

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.fakes.forked_python import run_python

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
TINY_OPTIONS = ("--shape", "tiny", "--device", "cpu", "--episodes", "16", "--tokens", "4")
SHORT: dict[str, tuple[str, ...]] = {
    "cross_scoring.py": ("--repetitions", "1", "--steps", "1", "--samples", "8"),
    "environment.py": ("--repetitions", "1"),
    "gpu_step.py": (*TINY_OPTIONS, "--dtype", "float32"),
    "grid_report.py": ("--arms", "2", "--steps", "5", "--levels", "8"),
    "packing.py": ("--device", "cpu", "--repetitions", "2"),
    "ppo_step.py": ("--steps", "1", "--levels", "2"),
    "rollout.py": ("--repetitions", "1", "--validation-levels", "8"),
    "rollout_engines.py": ("--repetitions", "1"),
    "sweep_overhead.py": ("--arms", "1", "--steps", "1", "--levels", "8"),
    "trl_grpo.py": ("--repetitions", "1"),
    "update_rules.py": ("--steps", "1", "--seeds", "1"),
    "edge_coverage.py": ("--studies", "2", "--shift-studies", "1"),
    "verdict_errors.py": ("--reports", "5", "--seeds", "1", "3", "--grids", "2"),
}
"""Options with which a benchmark takes a few seconds."""

REQUIRED_PACKAGES = {"rollout_engines.py": "vllm", "trl_grpo.py": "trl"}
"""Packages that only some environments have: `make bench` and `make bench-engines` install them."""

ALLOWED_WARNINGS = {
    # TRL uses names that transformers has deprecated.
    "trl_grpo.py": ("FutureWarning",),
    # The imports of vLLM itself warn.
    "rollout_engines.py": ("DeprecationWarning", "FutureWarning", "UserWarning"),
}
SLOW_SCRIPTS = ("sweep_overhead.py",)
"""Benchmarks that start Ray several times."""
PHASES = ["rollout_stand_in", "collapse", "values", "reference", "update_critic", "update_actor"]


@pytest.fixture
def gpu_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_step")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("machine")


@functools.cache
def run_benchmark(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark once for all tests that need the same options."""
    if script not in ALLOWED_WARNINGS and script not in SLOW_SCRIPTS:
        return run_python(["-W", "error", str(FOLDER / script), *options], Path.cwd())
    warning_options = [word for category in ALLOWED_WARNINGS.get(script, ()) for word in ("-W", f"default::{category}")]
    command = [sys.executable, "-W", "error", *warning_options, str(FOLDER / script), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_SCRIPTS)) for name in SCRIPTS]
)
def test_every_benchmark_prints_what_it_measured_and_where(script: str, machine: ModuleType) -> None:
    assert script in SHORT, f"add options to SHORT with which benchmarks/{script} takes a few seconds"
    package = REQUIRED_PACKAGES.get(script)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{script} needs {package}, which is not installed here")
    process = run_benchmark(script, *SHORT[script])
    assert process.returncode == 0, process.stderr[-2000:]
    figures = json.loads(process.stdout)
    assert figures["benchmark"] == script.removesuffix(".py")
    assert set(machine.describe()) < set(figures)


def test_what_a_machine_lacks_or_does_not_tell_is_null(machine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_os_error() -> None:
        raise OSError

    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(os, "getloadavg", raise_os_error)
    description = machine.describe()
    assert description["packages"] == {"torch": torch.__version__, "no-such-package": None}
    assert description["load_average"] is None


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_count_below_one_is_refused(value: str) -> None:
    process = run_benchmark("environment.py", "--repetitions", value)
    assert process.returncode == 2
    assert f"argument --repetitions: '{value}' is not an integer of at least 1" in process.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_the_tiny_shape_is_measured_phase_by_phase(dtype: str) -> None:
    process = run_benchmark("gpu_step.py", *TINY_OPTIONS, "--dtype", dtype)
    assert process.returncode == 0, process.stderr[-2000:]
    figures = json.loads(process.stdout)
    assert list(figures["phases"]) == PHASES
    assert figures["episodes"] == 16
    assert 16 * 5 <= figures["trained_tokens"] <= 16 * 5 * 4
    for row in figures["phases"].values():
        assert row["seconds"] > 0
        assert row["mfu"] > 0
        assert row["peak_gib"] is None


def test_the_share_is_operations_over_seconds_times_the_rate(
    gpu_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_step, "time_call", lambda run, device_type: 2.0)
    figures = gpu_step.measure_phase(gpu_step.Phase(lambda: None, 5e12), torch.device("cpu"), peak_flops_per_s=1e13)
    assert figures == {"seconds": 2.0, "tflop": 5.0, "mfu": 0.25, "peak_gib": None}


def test_passes_without_padding_are_measured_beside_padded_ones() -> None:
    process = run_benchmark("packing.py", *SHORT["packing.py"])
    assert process.returncode == 0, process.stderr[-2000:]
    figures = json.loads(process.stdout)
    for case in ("laptop", "laptop, every token four times"):
        for work in ("update", "reference"):
            assert 0 < figures[case][work]["padding_fraction"] < 1
            assert figures[case][work]["relative_difference"] < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--episodes", "20"), "--episodes=20: must be a multiple of 16"),
        (("--tokens", "1"), "--tokens=1: must be at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], message: str) -> None:
    process = run_benchmark("gpu_step.py", *TINY_OPTIONS, *options)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 111_232), ("0.5b", 494_032_768), ("3b", 3_085_938_688)])
def test_shapes_are_those_of_the_models_they_are_named_for(gpu_step: ModuleType, name: str, parameters: int) -> None:
    sizes = gpu_step.make_shape(name)
    with torch.device("meta"):
        model = gpu_step.Qwen2(sizes)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.mark.slow
def test_the_sandbox_is_measured_together_and_one_by_one() -> None:
    process = run_benchmark("update_rules.py", "--steps", "1", "--seeds", "2")
    assert process.returncode == 0, process.stderr[-2000:]
    figures = json.loads(process.stdout)
    assert list(figures["conditions"]) == ["DG", "GRPO, 4 inner epochs", "TPOToken, 4 inner epochs"]
    assert all(condition["sequential_over_ensemble"] > 0 for condition in figures["conditions"].values())

"""Every benchmark runs with short options; those of a step and of forward passes also count operations."""

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fakes.forked_python import run_python
from tests.fakes.hub_models import ARCHITECTURES, make_model, write_model
from tests.strategies.examples import thin_out

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(
    path.name
    for path in FOLDER.glob("*.py")
    if path.name not in ("figures.py", "gpu_checks.py", "model_agreement.py")
    and "__main__" in path.read_text(encoding="utf-8")
)
TINY_OPTIONS = ("--shape", "tiny", "--device", "cpu", "--episodes", "16", "--tokens", "4")
SHORT: dict[str, tuple[str, ...]] = {
    "cluster_scale.py": ("--runs", "2", "--nodes", "2", "--steps", "3", "--wait-seconds", "0.1"),
    "environment.py": ("--repetitions", "1"),
    "gpu_step.py": (*TINY_OPTIONS, "--dtype", "float32"),
    "grid_report.py": ("--runs", "2", "3", "--steps", "5", "--levels", "8"),
    "ppo_step.py": ("--steps", "1", "--levels", "2"),
    "rollout.py": ("--repetitions", "1", "--validation-levels", "8"),
    "sweep_growth.py": ("--runs", "2"),
    "sweep_overhead.py": ("--arms", "1", "--seeds", "1", "--steps", "1", "--levels", "8"),
    "tree_step.py": ("--steps", "1", "--questions", "1"),
    "trl_equivalence.py": ("--seeds", "1", "--steps", "1"),
    "trl_grpo.py": ("--repetitions", "1"),
    "trl_ppo.py": ("--seeds", "1", "--steps", "1"),
    "edge_coverage.py": ("--studies", "2", "--shift-studies", "1"),
    "verdict_errors.py": ("--reports", "5", "--seeds", "1", "3"),
}
"""Options with which a benchmark takes a few seconds."""

REQUIRED_PACKAGES = {"trl_ppo.py": "trl.experimental.ppo"}
"""Modules that only some environments have."""

TRL_SCRIPTS = ("trl_equivalence.py", "trl_grpo.py", "trl_ppo.py")
"""Benchmarks that may warn: TRL uses names that transformers has deprecated."""
RAY_SCRIPTS = ("cluster_scale.py", "sweep_growth.py", "sweep_overhead.py")
"""Benchmarks that start Ray."""
SLOW_SCRIPTS = (
    *RAY_SCRIPTS,
    "edge_coverage.py",
    "environment.py",
    "gpu_step.py",
    "grid_report.py",
    "ppo_step.py",
    "rollout.py",
    "trl_equivalence.py",
    "trl_grpo.py",
)
"""Benchmarks that take longer than four seconds even with short options."""
PHASES = ["collapse", "values", "reference", "update_critic", "update_actor"]


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, Warning):  # of a parent, such as an experimental part of TRL
        return False


def import_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture
def gpu_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_benchmark("gpu_step", monkeypatch)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_benchmark("machine", monkeypatch)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_benchmark("figures", monkeypatch)


@functools.cache
def run_benchmark(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark once for all tests that need the same options."""
    words = ["-W", "error", *["-W", "default::FutureWarning"] * (script in TRL_SCRIPTS), str(FOLDER / script), *options]
    if script not in (*TRL_SCRIPTS, *RAY_SCRIPTS):
        return run_python(words, Path.cwd())
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def measure(script: str, *options: str) -> dict[str, Any]:
    """Run a benchmark, with its short options unless others are given, and return what it prints."""
    process = run_benchmark(script, *(options or SHORT[script]))
    assert process.returncode == 0, process.stderr[-2000:]
    figures: dict[str, Any] = json.loads(process.stdout)
    return figures


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_SCRIPTS)) for name in SCRIPTS]
)
def test_every_benchmark_prints_what_it_measured_and_where(script: str, machine: ModuleType) -> None:
    assert script in SHORT, f"add options to SHORT with which benchmarks/{script} takes a few seconds"
    package = REQUIRED_PACKAGES.get(script)
    if package is not None and not has_module(package):
        pytest.skip(f"{script} needs {package}, which is not installed here")
    figures = measure(script)
    assert figures["benchmark"] == script.removesuffix(".py")
    assert set(machine.describe()) < set(figures)


def test_a_package_that_a_machine_lacks_is_null(machine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert machine.describe()["packages"] == {"torch": torch.__version__, "no-such-package": None}


COUNT = "argument --repetitions: '{}' is not an integer of at least 1"


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        *(("environment.py", ("--repetitions", value), COUNT.format(value)) for value in ("0", "many")),
        ("gpu_step.py", (*TINY_OPTIONS, "--episodes", "20"), "--episodes=20: must be a multiple of 16"),
        ("gpu_step.py", (*TINY_OPTIONS, "--tokens", "1"), "--tokens=1: must be at least 2"),
        ("figures.py", ("rolout",), "'rolout' is no script of the table of figures. Allowed: environment, rollout, "),
    ],
)
def test_what_cannot_be_measured_is_refused(script: str, options: tuple[str, ...], message: str) -> None:
    process = run_benchmark(script, *options)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.parametrize("dtype", thin_out(["bfloat16", "float32"], 2))
def test_a_step_of_the_tiny_shape_is_measured_phase_by_phase(dtype: str) -> None:
    figures = measure("gpu_step.py", *TINY_OPTIONS, "--dtype", dtype)
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


@pytest.mark.slow
def test_a_model_agrees_with_transformers_however_it_is_trained(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # multiples of 64, for weights in 4 bits
    folder = write_model(make_model("llama", ARCHITECTURES["llama"] | sizes, std=0.15), tmp_path)
    figures = measure("model_agreement.py", str(folder), "--conversations", "8")
    variants = {name: row for name, row in figures.items() if "LoRA" in name or "full" in name}
    assert list(variants) == ["full, float32", "LoRA, float32", "LoRA, bfloat16", "LoRA on 4 bits, float32"]
    for name, row in variants.items():
        assert row["conversations"] == row["tokens_of_the_template"] == row["masks_of_the_reply"] == 8
        assert row["trained_as_sampled"] == row["ended_by_the_end_token"] + row["ended_by_length"] == 8
        limit = 0.2 if "bfloat16" in name else 1e-4
        assert max(row["sampler_minus_transformers"]["max"], row["trainer_minus_transformers"]["max"]) < limit
        assert "bfloat16" in name or row["greedy_replies_of_the_export"] == row["greedy_replies"] == 2


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 111_232), ("0.5b", 494_032_768), ("3b", 3_085_938_688)])
def test_shapes_are_those_of_the_models_they_are_named_for(gpu_step: ModuleType, name: str, parameters: int) -> None:
    sizes = gpu_step.make_shape(name)
    with torch.device("meta"):
        model = gpu_step.Qwen2(sizes)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


ROWS = """# Results

## Figures

| script | keys | last | better | spread | meaning |
|---|---|---|---|---|---|
| environment | env_steps_per_cpu_second | 1 | more | 25% | steps |
| environment | batch | 128 | less | 10% | levels per batch |
| environment | no such key |  | less | 10% | nothing |

## History

| environment | batch | 1 | less | 10% | no row of the table above |
"""


def test_every_figure_of_the_table_is_printed_by_its_script(figures: ModuleType) -> None:
    text = figures.RESULTS.read_text(encoding="utf-8")
    rows = figures.read_figures(text)
    assert all(row.format() in text for row in rows)  # so that --save can replace it
    assert {row.better for row in rows} == {"more", "less"}
    assert {f"{row.script}.py" for row in rows} == set(SCRIPTS) - {"trl_ppo.py"}
    for script in dict.fromkeys(row.script for row in rows):
        if f"{script}.py" in SLOW_SCRIPTS or f"{script}.py" in REQUIRED_PACKAGES:
            continue
        result = measure(f"{script}.py")
        for row in rows:
            # The short options of a grid make two of its four reports.
            if row.script == script and not row.keys.startswith(("grids > 2", "grids > 3")):
                assert figures.find_value(result, row.keys) is not None, row


@pytest.mark.slow
def test_new_figures_stand_beside_the_last_ones(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text(ROWS, encoding="utf-8")
    command = ("--results", str(path), "--json", str(tmp_path / "figures.json"), "--save")
    process = run_benchmark("figures.py", *command)
    assert process.returncode == 1, process.stderr  # a key is missing
    lines = [line for line in process.stdout.splitlines() if "environment" in line]
    verdicts = ["better", "same", "missing"]
    assert [word for line in lines for word in verdicts if word in line] == verdicts
    assert "1 of 3 figures moved." in process.stdout
    result = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["environment"]
    rate = result["env_steps_per_cpu_second"]
    row = "| environment | env_steps_per_cpu_second | {:g} | more | 25% | steps |"
    assert path.read_text(encoding="utf-8") == ROWS.replace(row.format(1), row.format(rate))


@pytest.mark.parametrize(
    ("last", "now", "better", "verdict"),
    [
        (100.0, 109.0, "more", "same"),
        (100.0, 92.0, "more", "same"),
        (100.0, 111.0, "more", "better"),
        (100.0, 90.0, "more", "worse"),
        (100.0, 111.0, "less", "worse"),
        (100.0, 90.0, "less", "better"),
        (None, 1.0, "less", "new"),
        (100.0, None, "less", "missing"),
    ],
)
def test_a_figure_moves_by_more_than_its_spread(
    figures: ModuleType, last: float | None, now: float | None, better: str, verdict: str
) -> None:
    assert figures.Comparison(figures.Figure("a", "b", last, better, 0.1, "c"), now).judge() == verdict


def test_keys_lead_through_objects_and_lists(figures: ModuleType) -> None:
    result = {"grids": [{"a, b": 1}, {"a, b": 2}], "text": "1", "flag": None}
    assert figures.find_value(result, "grids > 1 > a, b") == 2
    for keys in ("grids > 2 > a, b", "grids > -1 > a, b", "grids > a", "text", "flag", "grids > 0 > c"):
        assert figures.find_value(result, keys) is None


def run_gpu_checks(*options: str) -> list[dict[str, object]]:
    process = run_python([str(FOLDER / "gpu_checks.py"), "--short", "--device", "cpu", *options], Path.cwd())
    assert process.returncode == 0, process.stderr[-2000:] + process.stdout[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.slow
def test_every_check_of_a_gpu_runs_or_says_what_is_missing(tmp_path: Path) -> None:
    lines = run_gpu_checks("--groups", "torch", "step", "system", "--output", str(tmp_path / "checks.jsonl"))
    assert {line["status"] for line in lines} == {"ok", "skipped"}
    skipped = ["pinned", "share", "gpu tests", "step 3b without recomputation"]
    assert [line["check"] for line in lines if line["status"] == "skipped"] == skipped
    assert [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()] == lines


@pytest.mark.slow
def test_checks_of_torch_need_torch_alone() -> None:
    blocker = (
        "import runpy, sys; "
        "sys.modules.update(dict.fromkeys(['pydantic', 'ray', 'transformers', 'safetensors', 'tokenizers'])); "
        "sys.argv[1:] = ['--short', '--device', 'cpu', '--only', 'swap']; "
        f"runpy.run_path({str(FOLDER / 'gpu_checks.py')!r}, run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    assert json.loads(process.stdout)["seconds_both_ways"] > 0


def test_a_check_without_its_packages_is_skipped_and_a_failure_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_checks = import_benchmark("gpu_checks", monkeypatch)
    check = gpu_checks.Check("torch", gpu_checks.measure_versions, 60, needs=("no_such_package",))
    line = gpu_checks.run_check("versions", check, [], "cpu")
    assert (line["status"], line["reason"]) == ("skipped", "not installed: no_such_package")
    slow_check = gpu_checks.Check("torch", gpu_checks.measure_versions, 0)
    assert gpu_checks.run_check("versions", slow_check, [], "cpu")["status"] == "timeout"
    wrong_line = gpu_checks.run_check("versions", gpu_checks.CHECKS["versions"], ["--model"], "cpu")
    assert wrong_line["status"] == "failed"
    assert "expected one argument" in wrong_line["reason"]


def test_the_sweep_report_repeats_cells_of_the_simulated_studies() -> None:
    """The short table of docs/sweep_report.md has numbers of the long ones in benchmarks/verdict_errors.md."""
    full = (FOLDER / "verdict_errors.md").read_text(encoding="utf-8")
    errors, powers = (read_rows(part) for part in full.split("<!-- end of errors -->")[:2])
    names = {"0.015, baseline 0.075": "baseline 5 times as noisy"}
    page = (FOLDER.parent / "docs" / "sweep_report.md").read_text(encoding="utf-8")
    rows = read_rows(page.split("### How often a verdict is wrong")[1].split("###")[0])
    assert len(rows) == 6
    for name, cells in list(rows.items())[1:]:
        error_row, power_row = (table[names.get(name, name)] for table in (errors, powers))
        assert cells[:2] == error_row[2].split(" / "), name
        assert cells[2:] == [cell.partition(" (")[0] for cell in power_row[2:]], name


def read_rows(text: str) -> dict[str, list[str]]:
    """Read the rows of a table in Markdown by the text of their first cell."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}

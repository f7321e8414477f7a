import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainable.config.constants import ShippedModel
from trainable.config.run_config import RunConfig
from tune_study.commands import doctor
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.host.machine_checks import CheckResult
from tune_study.placement import resources
from tune_study.plan.errors import PlanError

H100 = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3")
KILL_ITSELF = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
SECRETS = {"HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "0123s3cret"}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path that is short enough for Ray."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def shadow_modules(folder: Path, **modules: str) -> dict[str, str]:
    """Make an environment in which Python imports these modules instead of the installed ones."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def get_severities(findings: list[CheckResult]) -> dict[str, str]:
    return {finding.name: finding.severity for finding in findings}


# Python and packages


def write_distribution(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write an installed distribution as pip does."""
    info_folder = folder / f"{name}-{version}.dist-info"
    info_folder.mkdir()
    (info_folder / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    )


@pytest.mark.parametrize(
    ("requirement", "version", "severity"),
    [
        (">=3.11", "3.11.0", "ok"),
        (">=3.11", "3.10.14", "problem"),
        (">=3.11,<3.14", "3.14.0", "problem"),
        ("", "3.9", "ok"),
    ],
)
def test_the_version_of_python(requirement: str, version: str, severity: str) -> None:
    result = doctor.check_python(requirement, version)
    assert result.severity == severity
    assert requirement in result.advice or severity == "ok"


def test_what_is_not_met_is_named_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "fancy", "2.1.0+cpu")
    write_distribution(tmp_path, "early", "3.0.dev1")
    monkeypatch.syspath_prepend(tmp_path)
    requirements = [
        "fancy>=2,<2.2",
        "fancy[gpu]>=2.2",
        "early>=2.9",
        "no-such-package",
        'no-such-either; python_version < "3"',
        'no-third>=1; extra == "more"',
        'fancy>=1; extra == "more"',
    ]
    assert doctor.find_unmet(requirements, "") == {
        "fancy[gpu]>=2.2": "2.1.0+cpu is installed",
        "no-such-package": "not installed",
    }
    assert doctor.find_unmet(requirements, "more") == {"no-third>=1": "not installed"}
    assert doctor.find_unmet(requirements, "less") == {}
    required_result, extra_result = doctor.check_packages(requirements, ["more"])
    assert (required_result.severity, extra_result.severity, extra_result.name) == (
        "problem",
        "remark",
        "optional: more",
    )
    assert required_result.advice == "Type `pip install 'fancy[gpu]>=2.2' 'no-such-package'`."
    assert extra_result.advice == "Type `pip install 'no-third>=1'` if you need it."


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_versions_are_compared_as_numbers(installed: tuple[int, int], minimum: tuple[int, int]) -> None:
    result = doctor.check_python(f">={minimum[0]}.1{minimum[1]}", f"{installed[0]}.1{installed[1]}")
    assert (result.severity == "ok") == (installed >= minimum)


def test_a_distribution_is_checked_by_its_own_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "ours", "1", "Requires-Python: >=99", "Requires-Dist: absent", "Provides-Extra: more")
    write_distribution(tmp_path, "modest", "1")
    monkeypatch.syspath_prepend(tmp_path)
    results = doctor.check_requirements("ours")
    assert get_severities(results) == {"Python": "problem", "packages": "problem", "optional: more": "ok"}
    assert get_severities(doctor.check_requirements("modest")) == {"Python": "ok", "packages": "ok"}


def test_without_metadata_the_requirements_are_not_known() -> None:
    (result,) = doctor.check_requirements("no-such-distribution")
    assert result.severity == "remark"
    assert "pip install -e ." in result.advice


# Imports in separate processes


def test_an_import_that_crashes_is_a_problem(tmp_path: Path) -> None:
    result = doctor.check_import("transformers", shadow_modules(tmp_path, transformers=KILL_ITSELF))
    assert (result.name, result.severity, result.detail) == (
        "import transformers",
        "problem",
        "it was ended by SIGKILL",
    )


def test_an_import_that_fails_says_why(tmp_path: Path) -> None:
    environ = shadow_modules(tmp_path, torch="raise ImportError('libcudart.so.99: no such file')")
    (result,) = doctor.check_torch((), environ)
    assert (result.severity, result.detail) == ("problem", "ImportError: libcudart.so.99: no such file")


TORCH = """
import types, warnings
__version__ = "2.9.0"
version = types.SimpleNamespace(cuda={cuda!r})
def is_available():
    warnings.warn("The NVIDIA driver is too old (Triggered internally at x.cpp:1.)" + " " * 400)
    return {devices} > 0
cuda = types.SimpleNamespace(is_available=is_available, device_count=lambda: {devices})
"""


@pytest.mark.parametrize(
    ("cuda", "devices", "gpus", "severity", "words"),
    [
        (None, 0, (), "ok", "no GPU"),
        (None, 0, (H100,), "problem", "torch 2.9.0 is built without CUDA"),
        ("13.0", 0, (H100,), "problem", "can use no GPU: The NVIDIA driver is too old"),
        ("13.0", 1, (H100, H100), "remark", "can use 1 of 2 visible GPUs"),
        ("13.0", 2, (H100, H100), "ok", "can use 2 of 2 visible GPUs"),
    ],
)
def test_the_build_of_torch_against_the_gpus(
    tmp_path: Path, cuda: str | None, devices: int, gpus: tuple[Gpu, ...], severity: str, words: str
) -> None:
    environ = shadow_modules(tmp_path, torch=TORCH.format(cuda=cuda, devices=devices))
    import_result, gpu_result = doctor.check_torch(gpus, environ)
    assert (import_result.severity, gpu_result.severity) == ("ok", severity)
    assert words in gpu_result.detail
    assert "Triggered" not in gpu_result.detail


def test_a_python_of_its_own_answers() -> None:
    outcome = doctor.run_python("import os; print('first'); print(os.environ['WORD'])", {"WORD": "last"}, 60)
    assert (outcome.output_line, outcome.problem) == ("last", "")
    assert doctor.run_python("raise SystemExit(7)", {}, 60).problem == "it ended with exit code 7"
    assert len(doctor.run_python("raise ValueError('x' * 9999)", {}, 60).problem) < 400


def test_what_hangs_is_ended() -> None:
    outcome = doctor.run_python("import time; time.sleep(600)", {}, 0.1)
    assert outcome.problem == "it did not end within 0.1 s"
    assert not psutil.pid_exists(outcome.pid)


def test_a_process_is_ended_with_its_children() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        doctor.kill_process_tree(parent)
        assert parent.returncode == -9
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    doctor.kill_process_tree(
        parent
    )  # A process that has ended is not killed, because its id may belong to another one.


# Model and Ray


@pytest.mark.parametrize(("is_needed", "severity"), [(False, "remark"), (True, "problem")])
def test_a_model_that_is_not_here_comes_with_the_command(tmp_path: Path, is_needed: bool, severity: str) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    result = doctor.check_preset_model("paper", environ, is_needed=is_needed)
    assert (result.severity, result.advice.split(",")[0]) == (severity, "Type `hf download Qwen/Qwen2.5-3B`")
    model_folder = tmp_path / "models--Qwen--Qwen2.5-3B" / "snapshots" / "abc"
    model_folder.mkdir(parents=True)
    (model_folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (model_folder / "model.safetensors").touch()
    assert "no tokenizer.json" in doctor.check_preset_model("paper", environ, is_needed=is_needed).detail
    (model_folder / "tokenizer.json").touch()
    assert doctor.check_preset_model("paper", environ, is_needed=is_needed).severity == "ok"


def test_the_shipped_model_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_preset_model("laptop", {}, is_needed=True).severity == "ok"
    monkeypatch.setattr(doctor, "SHIPPED_MODELS", {"sokoban-tiny": ShippedModel(tmp_path, "sokoban")})
    assert doctor.check_preset_model("laptop", {}, is_needed=True).severity == "problem"


def list_severities(gpus: Sequence[Gpu], output: Path) -> dict[str, str]:
    return {result.name: result.severity for result in doctor.check_preset_needs("paper", gpus, output, {})}


def test_a_preset_for_gpus_needs_a_gpu_its_engine_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.check_preset_needs("laptop", (), tmp_path, {})) == []
    monkeypatch.setattr(resources, "check_sampler", lambda config, environ: None)
    gpu = Gpu("0", "GPU-0", "NVIDIA H100 80GB HBM3")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**14))
    names = ("GPU of the preset", "engines of the preset", "disk of a KL sweep")
    assert list_severities([gpu], tmp_path) == dict.fromkeys(names, "ok")
    assert list_severities([], tmp_path) == {**dict.fromkeys(names, "ok"), names[0]: "problem"}

    def refuse(config: RunConfig, environ: Mapping[str, str]) -> None:
        raise PlanError("rollout.name=vllm needs vLLM, which is not installed: type `pip install vllm`.")

    monkeypatch.setattr(resources, "check_sampler", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * 10**11))  # 3 states: 222 GB
    engine, room = list(doctor.check_preset_needs("paper", [gpu], tmp_path, {}))[1:]
    assert (engine.severity, engine.advice) == ("problem", "Type `pip install vllm`.")
    assert engine.detail == "rollout.name=vllm needs vLLM, which is not installed"
    assert (room.severity, "200.0 GB free" in room.detail) == ("problem", True)


def test_a_ray_that_cannot_start_names_its_logs(short_folder: Path) -> None:
    folder = short_folder / ("x" * 60)
    assert machine_checks.check_socket_path(folder).severity == "problem"
    result = doctor.check_ray_start(folder, {**os.environ, "RAY_TMPDIR": str(folder)}, 120)
    assert result.severity == "problem"
    assert "AF_UNIX path length cannot exceed" in result.detail
    (log_folder,) = re.findall(r"logs in (\S+),", result.advice)
    assert Path(log_folder).is_dir()
    assert Path(log_folder).is_relative_to(folder)


# All together


def test_a_preset_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="There is no preset `desk`: type --preset paper or --preset laptop"):
        doctor.run_checks(tmp_path, "desk", {"CUDA_VISIBLE_DEVICES": ""}, print)


def test_a_check_that_breaks_is_a_problem_and_not_the_end() -> None:
    messages: list[str] = []

    def raise_error() -> list[CheckResult]:
        raise RuntimeError("no module\nnamed x")

    (result,) = doctor._run_check("Importing x ...", raise_error, messages.append)
    assert messages == ["Importing x ..."]
    assert (result.name, result.severity) == ("Importing x", "problem")
    assert result.detail == "this check failed: RuntimeError: no module\\nnamed x"


def print_report_lines(*findings: CheckResult) -> list[str]:
    console = Console(file=StringIO(), width=40)
    doctor.print_report(console, findings)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_report_says_what_to_do() -> None:
    fine, remark = CheckResult("a", "ok", "good"), CheckResult("b", "remark", "so so", "Look " + "closely " * 9)
    problem = CheckResult("c", "problem", "bad", "Mend it.")
    assert print_report_lines(fine, remark)[-2:] == [
        f"remark: b: {remark.advice}",
        "No problems found: this machine is ready for a run.",
    ]
    assert print_report_lines(problem, remark)[-2:] == ["problem: c: Mend it.", "1 problem to solve before a run."]
    lines = print_report_lines(problem, fine, problem)
    assert lines[0].split() == ["check", "severity", "result"]
    assert lines[2].split() == ["a", "ok", "good"]
    assert lines[-1] == "2 problems to solve before a run."


def test_on_a_broken_machine_every_check_answers(tmp_path: Path) -> None:
    environ = shadow_modules(tmp_path, torch=KILL_ITSELF, ray=KILL_ITSELF, transformers="import no_such_module")
    environ |= {"CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": str(tmp_path / ("x" * 99)), **SECRETS}
    environ |= {"HF_HOME": str(tmp_path / "hub")}
    (tmp_path / "taken").touch()
    console = Console(file=StringIO(), width=40)
    assert doctor.diagnose(console, tmp_path / "taken" / "below", "paper", environ) == 1
    text = console.file.getvalue()  # type: ignore[attr-defined]
    problem_names = [
        "write access",
        "Ray's sockets",
        "model",
        "GPU of the preset",
        "import torch",
        "import ray.tune",
        "import transformers",
        "start Ray",
    ]
    names = re.findall(r"^problem: (.*?): ", text, flags=re.MULTILINE)
    # Whether vLLM is installed, and whether a 3B sweep fits on the disk, depends on the machine.
    assert [name for name in names if name not in ("engines of the preset", "disk of a KL sweep")] == problem_names
    assert text.splitlines()[-1] == f"{len(names)} problems to solve before a run."
    assert "s3cret" not in text


def test_this_machine_without_a_gpu_has_no_problem(tmp_path: Path, short_folder: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": str(short_folder), **SECRETS}
    messages: list[str] = []
    findings = doctor.run_checks(tmp_path / "output", None, environ, messages.append)
    assert [finding for finding in findings if finding.severity == "problem"] == []
    assert get_severities(findings)["GPU"] == "remark"
    assert get_severities(findings)["model"] == "ok"
    assert messages == [
        "Importing torch ...",
        "Importing ray.tune ...",
        "Importing transformers ...",
        "Starting Ray ...",
    ]
    assert re.fullmatch(r"started and ran a task in \d+\.\d s", findings[-1].detail)
    assert list(tmp_path.iterdir()) == []
    assert "s3cret" not in str(findings)
    assert list(short_folder.iterdir()) == []

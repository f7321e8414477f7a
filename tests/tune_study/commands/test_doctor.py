import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from search_spaces.catalog import STUDIES
from trainable.config.run_config import RunConfig
from tune_study.commands import doctor
from tune_study.commands.requests import LaunchRequest
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.host.machine_checks import CheckResult
from tune_study.placement import resources
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import make_plan

H100 = Gpu("0", "GPU-5a4b", "NVIDIA H100 80GB HBM3")
KILL_ITSELF = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for Ray, with a path that is short enough."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def shadow_modules(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Let Python processes that are started import these modules instead of the installed ones."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


# The checks of a study


def check_preset(name: str, preset: str, output: Path, gpus: tuple[Gpu, ...] = ()) -> CheckResult:
    plan = make_plan(STUDIES["kl"], preset, "a test", {}, None, None, output)
    return doctor.run_check(doctor.list_checks(plan, LaunchRequest(), gpus)[name])


def test_a_model_that_is_not_here_comes_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = check_preset("model", "paper", tmp_path)
    assert result.severity == "problem"
    assert "Download it with `hf download Qwen/Qwen2.5-3B`" in result.text
    assert check_preset("model", "laptop", tmp_path).severity == "ok"


def test_a_preset_for_gpus_needs_a_gpu_its_engine_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "check_sampler", lambda config, environ: None)
    assert check_preset("engines", "paper", tmp_path).severity == "ok"
    result = check_preset("start of a KL sweep", "paper", tmp_path)
    assert result.severity == "problem"
    assert "no GPU is visible" in result.text
    assert check_preset("start of a KL sweep", "laptop", tmp_path).severity == "ok"

    def refuse(config: RunConfig, environ: Mapping[str, str]) -> None:
        raise PlanError("rollout.name=vllm needs vLLM, which is not installed: type `pip install vllm`.")

    monkeypatch.setattr(resources, "check_sampler", refuse)
    assert check_preset("engines", "paper", tmp_path).text.endswith("not installed: type `pip install vllm`.")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    monkeypatch.setattr(resources, "check_sampler", lambda config, environ: None)
    result = check_preset("start of a KL sweep", "laptop", tmp_path)
    assert (result.severity, "0 bytes free" in result.text) == ("problem", True)


def test_a_check_that_breaks_is_a_problem_and_not_the_end() -> None:
    def raise_error() -> CheckResult:
        raise RuntimeError("no module\nnamed x")

    result = doctor.run_check(raise_error)
    assert result == CheckResult("problem", "this check failed: RuntimeError: no module\\nnamed x")


# Ray, torch and engines


def test_a_ray_that_cannot_start_names_its_logs(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = short_folder / ("x" * 60)
    assert "Type `export RAY_TMPDIR=/tmp`" in machine_checks.explain_long_path(folder)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    result = doctor.check_ray_start(folder, 0, 120)
    assert result.severity == "problem"
    assert "AF_UNIX path length cannot exceed" in result.text
    (log_folder,) = re.findall(r"logs are in (\S+);", result.text)
    assert Path(log_folder).is_dir()
    assert Path(log_folder).is_relative_to(folder)


def test_an_import_that_fails_in_a_worker_says_why(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_modules(tmp_path, monkeypatch, torch="raise ImportError('libcudart.so.99: no such file')")
    result = doctor.check_ray_start(short_folder, 0, 120)
    assert result.severity == "problem"
    assert result.text.startswith("ImportError: libcudart.so.99: no such file. The logs are in ")


def test_what_crashes_or_hangs_is_ended(tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor.check_ray_start(short_folder, 0, 0.1)
    assert result.text.startswith("it did not end within 0.1 s. Ray created no session")
    shadow_modules(tmp_path, monkeypatch, ray=KILL_ITSELF)
    assert doctor.check_ray_start(short_folder, 0, 120).text.startswith("it was ended by SIGKILL. ")


def test_what_hangs_is_ended_with_the_processes_of_ray(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_modules(tmp_path, monkeypatch, transformers="import time\ntime.sleep(600)")
    result = doctor.check_ray_start(short_folder, 0, 20)
    assert result.text.startswith("it did not end within 20 s. The logs are in ")

    def list_processes() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if str(short_folder) in str(process.info)]

    psutil.wait_procs(list_processes(), timeout=30)
    assert list_processes() == []


# All together


def diagnose(output: Path, preset: str | None) -> tuple[int, list[str]]:
    console = Console(file=StringIO(), width=40)
    code = doctor.diagnose(console, output, preset)
    return code, console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "0123s3cret", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)


def test_a_preset_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="There is no preset `desk`: type --preset paper or --preset laptop"):
        diagnose(tmp_path, "desk")


@pytest.mark.usefixtures("secrets")
def test_on_a_broken_machine_every_check_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow_modules(tmp_path, monkeypatch, torch=KILL_ITSELF, ray=KILL_ITSELF)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "taken").touch()
    code, lines = diagnose(tmp_path / "taken" / "below", "paper")
    assert code == 1
    names = [line.split(": ")[1] for line in lines if line.startswith("problem: ")]
    problem_names = ["write access", "model", "start of a KL sweep", "start of Ray"]
    assert [name for name in names if name != "engines"] == problem_names  # vLLM may be installed or not
    assert lines[-1] == f"{len(names)} problems to solve before a run."
    assert "s3cret" not in str(lines)


def test_a_problem_that_also_stops_a_study_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("There is no engine: type `pip install engine`.")

    monkeypatch.setattr(resources, "check_sampler", refuse)
    monkeypatch.setattr(doctor, "check_ray_start", lambda *_: None)
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    problems = [line for line in lines if line.startswith("problem: ")]
    assert problems == ["problem: engines: There is no engine: type `pip install engine`."]
    assert lines[-1] == "1 problem to solve before a run."


@pytest.mark.usefixtures("secrets")
def test_this_machine_without_a_gpu_has_no_problem(tmp_path: Path, short_folder: Path) -> None:
    code, lines = diagnose(tmp_path / "output", None)
    assert code == 0
    assert [line for line in lines if line.startswith("remark: GPU: ")]
    assert "ok: model: as a run needs it" in lines
    assert lines[-3] == "Starting Ray ..."
    assert re.fullmatch(
        r"ok: start of Ray: started in \d+\.\d s; a worker imported torch .* and uses 0 GPUs", lines[-2]
    )
    assert lines[-1] == "No problems found: this machine is ready for a run."
    assert list(tmp_path.iterdir()) == []
    assert "s3cret" not in str(lines)
    assert list(short_folder.iterdir()) == []

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
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.host.machine_checks import CheckResult
from tune_study.placement import resources
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import make_plan

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


# The checks of a study


def check_preset(name: str, preset: str, output: Path, gpus: tuple[Gpu, ...] = ()) -> CheckResult:
    plan = make_plan(STUDIES["kl"], preset, "a test", {}, None, None, output)
    return doctor.run_check(doctor.list_checks(plan, gpus, {"HF_HUB_CACHE": str(output)})[name])


def test_a_model_that_is_not_here_comes_with_the_command(tmp_path: Path) -> None:
    result = check_preset("model", "paper", tmp_path)
    assert result.severity == "problem"
    assert "Download it with `hf download Qwen/Qwen2.5-3B`" in result.text
    assert check_preset("model", "laptop", tmp_path).severity == "ok"


def test_a_preset_for_gpus_needs_a_gpu_its_engine_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "check_sampler", lambda config, environ: None)
    assert check_preset("engines", "paper", tmp_path).severity == "ok"
    result = check_preset("KL sweep", "paper", tmp_path)
    assert result.severity == "problem"
    assert "no GPU is visible" in result.text
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**14))
    assert check_preset("KL sweep", "paper", tmp_path, (H100,)).severity == "ok"
    assert check_preset("KL sweep", "laptop", tmp_path).severity == "ok"

    def refuse(config: RunConfig, environ: Mapping[str, str]) -> None:
        raise PlanError("rollout.name=vllm needs vLLM, which is not installed: type `pip install vllm`.")

    monkeypatch.setattr(resources, "check_sampler", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * 10**11))  # 3 states: 222 GB
    assert check_preset("engines", "paper", tmp_path).text.endswith("not installed: type `pip install vllm`.")
    result = check_preset("KL sweep", "paper", tmp_path, (H100,))
    assert (result.severity, "200.0 GB free" in result.text) == ("problem", True)


def test_a_check_that_breaks_is_a_problem_and_not_the_end() -> None:
    def raise_error() -> CheckResult:
        raise RuntimeError("no module\nnamed x")

    result = doctor.run_check(raise_error)
    assert result == CheckResult("problem", "this check failed: RuntimeError: no module\\nnamed x")


# Ray, torch and engines


def test_a_ray_that_cannot_start_names_its_logs(short_folder: Path) -> None:
    folder = short_folder / ("x" * 60)
    assert machine_checks.check_socket_path(folder).severity == "problem"
    result = doctor.check_ray_start(folder, 0, {**os.environ, "RAY_TMPDIR": str(folder)}, 120)
    assert result.severity == "problem"
    assert "AF_UNIX path length cannot exceed" in result.text
    (log_folder,) = re.findall(r"logs are in (\S+);", result.text)
    assert Path(log_folder).is_dir()
    assert Path(log_folder).is_relative_to(folder)


def test_an_import_that_fails_in_a_worker_says_why(tmp_path: Path, short_folder: Path) -> None:
    environ = shadow_modules(tmp_path, torch="raise ImportError('libcudart.so.99: no such file')")
    environ["RAY_TMPDIR"] = str(short_folder)
    result = doctor.check_ray_start(short_folder, 0, environ, 120)
    assert result.severity == "problem"
    assert result.text.startswith("ImportError: libcudart.so.99: no such file. The logs are in ")


def test_what_crashes_or_hangs_is_ended(tmp_path: Path, short_folder: Path) -> None:
    environ = {**os.environ, "RAY_TMPDIR": str(short_folder)}
    result = doctor.check_ray_start(short_folder, 0, environ, 0.1)
    assert result.text.startswith("it did not end within 0.1 s. Ray created no session")
    result = doctor.check_ray_start(short_folder, 0, shadow_modules(tmp_path, ray=KILL_ITSELF), 120)
    assert result.text.startswith("it was ended by SIGKILL. ")


def test_what_hangs_is_ended_with_the_processes_of_ray(tmp_path: Path, short_folder: Path) -> None:
    environ = shadow_modules(tmp_path, transformers="import time\ntime.sleep(600)")
    result = doctor.check_ray_start(short_folder, 0, {**environ, "RAY_TMPDIR": str(short_folder)}, 20)
    assert result.text.startswith("it did not end within 20 s. The logs are in ")

    def list_processes() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if str(short_folder) in str(process.info)]

    psutil.wait_procs(list_processes(), timeout=30)
    assert list_processes() == []


# All together


def diagnose(output: Path, preset: str | None, environ: dict[str, str]) -> tuple[int, list[str]]:
    console = Console(file=StringIO(), width=40)
    code = doctor.diagnose(console, output, preset, environ)
    return code, console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_preset_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="There is no preset `desk`: type --preset paper or --preset laptop"):
        diagnose(tmp_path, "desk", {"CUDA_VISIBLE_DEVICES": ""})


def test_on_a_broken_machine_every_check_answers(tmp_path: Path) -> None:
    environ = shadow_modules(tmp_path, torch=KILL_ITSELF, ray=KILL_ITSELF)
    environ |= {"CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": str(tmp_path / ("x" * 99)), **SECRETS}
    environ |= {"HF_HOME": str(tmp_path / "hub")}
    (tmp_path / "taken").touch()
    code, lines = diagnose(tmp_path / "taken" / "below", "paper", environ)
    assert code == 1
    names = [line.split(": ")[1] for line in lines if line.startswith("problem: ")]
    problem_names = ["write access", "Ray's sockets", "model", "KL sweep", "start of Ray"]
    assert [name for name in names if name != "engines"] == problem_names  # vLLM may be installed or not
    assert lines[-1] == f"{len(names)} problems to solve before a run."
    assert "s3cret" not in str(lines)


def test_this_machine_without_a_gpu_has_no_problem(tmp_path: Path, short_folder: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": str(short_folder), **SECRETS}
    code, lines = diagnose(tmp_path / "output", None, environ)
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

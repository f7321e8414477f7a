import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tune_study.commands import doctor
from tune_study.placement import resources
from tune_study.plan.errors import PlanError

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


def find_problem(ray_folder: Path, timeout_s: float) -> str:
    """Why Ray does not start."""
    with pytest.raises(PlanError) as error:
        doctor.try_ray(ray_folder, 0, timeout_s)
    return str(error.value)


def test_a_ray_that_cannot_start_names_its_logs(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = short_folder / ("x" * 60)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    problem = find_problem(folder, 120)
    assert problem.startswith(f"Ray does not start (exit code 1): Ray cannot start in {folder} (")
    assert "AF_UNIX path length cannot exceed" in problem
    (logs,) = re.findall(r"\): set RAY_TMPDIR to another folder: read gcs_server\.\* in (\S+)\.$", problem)
    assert [path for path in Path("/").glob(logs[1:]) if path.is_relative_to(folder)]


@pytest.mark.parametrize(
    ("module", "text", "problem"),
    [
        ("torch", "raise ImportError('no libcudart.so.99')", "(exit code 1): ImportError: no libcudart.so.99: read "),
        ("ray", KILL_ITSELF, "(exit code -9): no message: read "),
    ],
)
def test_what_fails_in_a_worker_says_why(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, problem: str
) -> None:
    shadow_modules(tmp_path, monkeypatch, **{module: text})
    assert find_problem(short_folder, 120).startswith(f"Ray does not start {problem}")


def test_what_hangs_is_ended_with_the_processes_of_ray(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_modules(tmp_path, monkeypatch, transformers="import time\ntime.sleep(600)")
    assert "Ray does not start (no end within 20 s): " in find_problem(short_folder, 20)

    def list_processes() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if str(short_folder) in str(process.info)]

    psutil.wait_procs(list_processes(), timeout=30)
    assert list_processes() == []


def diagnose(output: Path, preset: str | None) -> tuple[int, list[str]]:
    console = Console(file=StringIO(), width=40)
    code = doctor.diagnose(console, output, preset)
    return code, console.file.getvalue().splitlines()


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "0123s3cret", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets")
def test_on_a_broken_machine_every_check_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow_modules(tmp_path, monkeypatch, torch=KILL_ITSELF, ray=KILL_ITSELF)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code, lines = diagnose(tmp_path, "paper")
    assert code == 1
    problems = [line.removeprefix("Problem: ") for line in lines if line.startswith("Problem: ")]
    assert "Download it with `hf download Qwen/Qwen2.5-3B`" in problems[0]
    assert "asks for 1 GPU per run and no GPU is visible" in problems[-2]
    assert problems[-1].startswith("Ray does not start (exit code -9): no message: ")
    assert len(problems) - 3 == len([problem for problem in problems if "not installed" in problem])  # vLLM may be
    assert lines[-1] == f"{len(problems)} problems to solve before a run."
    assert "s3cret" not in str(lines)
    (tmp_path / "taken").touch()
    lines = diagnose(tmp_path / "taken" / "below", "laptop")[1]
    assert f"Problem: --output {tmp_path / 'taken' / 'below'} cannot be written ({tmp_path / 'taken'}: " in str(lines)


def test_a_problem_that_also_stops_a_study_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("There is no engine: type `pip install engine`.")

    def break_down(*_: object) -> str:
        raise RuntimeError("no module\nnamed x")

    monkeypatch.setattr(resources, "check_sampler", refuse)
    monkeypatch.setattr(doctor, "try_ray", break_down)
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    assert [line for line in lines if line.startswith("Problem: ")] == [
        "Problem: There is no engine: type `pip install engine`.",
        r"Problem: a check failed: RuntimeError: no module\nnamed x",
    ]
    assert lines[-1] == "2 problems to solve before a run."


def test_a_disk_without_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    monkeypatch.setattr(doctor, "try_ray", lambda *_: "started")
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    assert [line for line in lines if line.startswith("Problem: The study needs up to") and "0 bytes free" in line]
    assert "Ray: started" in lines
    assert lines[-1] == "1 problem to solve before a run."


@pytest.mark.usefixtures("secrets")
def test_this_machine_without_a_gpu_has_no_problem(tmp_path: Path, short_folder: Path) -> None:
    code, lines = diagnose(tmp_path / "output", None)
    assert code == 0
    assert lines[0].startswith("GPU: ")
    assert lines[1].startswith("Disk: needs at most ")
    assert lines[2] == "Starting Ray ..."
    assert re.fullmatch(r"Ray: started in \d+\.\d s; a worker imported torch .* and uses 0 GPUs", lines[3])
    assert lines[4:] == ["No problems found: this machine is ready for a run."]
    assert list(tmp_path.iterdir()) == []
    assert "s3cret" not in str(lines)
    assert list(short_folder.iterdir()) == []

"""The command `doctor`, which trains one step of a real study, on machines on which this works or fails."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tune_study.commands import doctor
from tune_study.plan.errors import PlanError


@pytest.fixture(autouse=True)
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for Ray, with a path that is short enough, on a machine without a GPU and with secrets."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    for name, value in {"HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "0123s3cret", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    yield folder
    shutil.rmtree(folder)


def shadow_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Let Python processes that are started import this module instead of the installed one."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def diagnose(output: Path, preset: str | None = None) -> tuple[int, list[str]]:
    console = Console(file=StringIO(), width=40)
    code = doctor.diagnose(console, output, preset)
    text = console.file.getvalue()
    assert "s3cret" not in text
    return code, text.splitlines()


def test_where_a_study_can_be_trained_there_is_no_problem(tmp_path: Path, ray_folder: Path) -> None:
    code, lines = diagnose(tmp_path / "output")
    assert code == 0, lines
    assert lines[0].startswith("GPU: none is visible; ")
    assert lines[1:] == [
        "Training one step of the study kl ...",
        "No problems found: it was trained, evaluated and reported.",
    ]
    assert list(tmp_path.iterdir()) == list(ray_folder.iterdir()) == []


def test_what_refuses_a_study_is_printed(tmp_path: Path) -> None:
    code, lines = diagnose(tmp_path, "paper")
    assert (code, lines[-1]) == (1, "Problem: the study ended with exit code 2")
    assert lines[-2].startswith("tune_study: The study asks for 1 GPU per run and no GPU is visible: type ")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").touch()
    with pytest.raises(PlanError, match="/taken/below cannot be written "):
        diagnose(tmp_path / "taken" / "below", "laptop")


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_leaves_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow_module(tmp_path, monkeypatch, "torch", "raise ImportError('no libcudart.so.99')")
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    assert "no libcudart.so.99" in "".join(lines)
    (folder,) = tmp_path.glob("doctor-*")
    assert lines[-1].startswith(f"Problem: the study ended with exit code 1: its files are in {folder}, and Ray's ")
    assert list(folder.glob("results/*/study.json"))


def test_a_folder_whose_sockets_would_have_too_long_paths_is_refused(
    tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ray_folder / ("x" * 60)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    assert lines[-2].startswith(f"tune_study: Ray cannot start here: the path {folder} has ")
    assert lines[-2].endswith(" bytes; at most 29 are possible: type `export RAY_TMPDIR=/tmp`, or another short path.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_hangs_is_ended_with_the_processes_of_ray(
    tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_module(tmp_path, monkeypatch, "torch", "import time\ntime.sleep(600)")
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 25.0)
    code, lines = diagnose(tmp_path, "laptop")
    assert code == 1
    assert lines[-1].startswith("Problem: the study did not end within 25 s: its files are in ")

    def list_processes() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if str(ray_folder) in str(process.info)]

    psutil.wait_procs(list_processes(), timeout=30)
    assert list_processes() == []

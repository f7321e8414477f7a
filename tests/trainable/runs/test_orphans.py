import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainable.runs.orphans import MARK_ENV, make_ray_mark, terminate_orphans

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def children() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def start(
    children: list["subprocess.Popen[str]"], mark: Path | str | None, code: str = SLEEPS
) -> "subprocess.Popen[str]":
    """Start a process with its own session, which outlives the process that started it."""
    environment = {**os.environ, **({MARK_ENV: str(mark)} if mark else {})}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    children.append(child)
    return child


def test_only_processes_of_the_runs_of_the_folder_are_terminated(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    orphan = start(children, tmp_path / "study" / "runs" / "a")
    other_processes = [
        start(children, tmp_path / "study-2" / "runs" / "a"),
        start(children, tmp_path / "stud"),
        start(children, None),
    ]
    terminated = terminate_orphans(tmp_path / "study")
    assert terminated == [f"{orphan.pid} ({psutil.Process().name()})"]
    assert not psutil.pid_exists(orphan.pid)
    assert [child.poll() for child in other_processes] == [None, None, None]
    assert terminate_orphans(tmp_path / "study") == []


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_ray_started_for_several_studies_belongs_to_each_once_its_driver_is_gone(
    tmp_path: Path, children: list["subprocess.Popen[str]"], name: str
) -> None:
    code = (
        "import sys; from pathlib import Path; from trainable.runs.orphans import make_ray_mark; "
        "print(make_ray_mark(map(Path, sys.argv[1:])), end='')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    orphan = start(children, subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    own_process = start(children, make_ray_mark([tmp_path / "a", tmp_path / "b"]))
    terminate_orphans(tmp_path / "c")
    assert orphan.poll() is None
    terminate_orphans(tmp_path / name)
    assert not psutil.pid_exists(orphan.pid)
    assert own_process.poll() is None


def test_another_process_with_the_id_of_a_driver_is_not_the_driver(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    process = psutil.Process()
    times = (str(process.create_time()), str(process.create_time() - 60))
    orphan = start(children, make_ray_mark([tmp_path]).replace(*times))
    terminate_orphans(tmp_path)
    assert not psutil.pid_exists(orphan.pid)


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, children: list["subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainable.runs.orphans._TERMINATE_TIMEOUT_S", 1.0)
    orphan = start(children, tmp_path, IGNORES_SIGTERM)
    terminate_orphans(tmp_path)
    assert not psutil.pid_exists(orphan.pid)

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainable.runs.orphans import MARK_ENV, make_ray_mark, terminate_orphans

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
QUIET = "import time; print('up', flush=True); time.sleep(600)"


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
    children: list["subprocess.Popen[str]"], marked: Path | str | None, code: str = QUIET
) -> "subprocess.Popen[str]":
    """A process with a session of its own, which outlives whoever started it."""
    environment = {**os.environ, **({MARK_ENV: str(marked)} if marked else {})}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    children.append(child)
    return child


def test_only_what_the_runs_of_the_folder_started_is_ended(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    mine = start(children, tmp_path / "study" / "runs" / "a")
    others = [
        start(children, tmp_path / "study-2" / "runs" / "a"),
        start(children, tmp_path / "stud"),
        start(children, None),
    ]
    named = terminate_orphans(tmp_path / "study")
    assert named == [f"{mine.pid} ({psutil.Process().name()})"]
    assert not psutil.pid_exists(mine.pid)
    assert [child.poll() for child in others] == [None, None, None]
    assert terminate_orphans(tmp_path / "study") == []


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_ray_started_for_several_studies_belongs_to_each_once_its_driver_is_gone(
    tmp_path: Path, children: list["subprocess.Popen[str]"], name: str
) -> None:
    code = (
        "import sys; from pathlib import Path; from trainable.runs.orphans import make_ray_mark; "
        "print(make_ray_mark(map(Path, sys.argv[1:])), end='')"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    of_the_gone = start(children, subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    of_mine = start(children, make_ray_mark([tmp_path / "a", tmp_path / "b"]))
    terminate_orphans(tmp_path / "c")
    assert of_the_gone.poll() is None
    terminate_orphans(tmp_path / name)
    assert not psutil.pid_exists(of_the_gone.pid)
    assert of_mine.poll() is None


def test_another_process_with_the_id_of_a_driver_is_not_the_driver(
    tmp_path: Path, children: list["subprocess.Popen[str]"]
) -> None:
    me = psutil.Process()
    later = start(children, make_ray_mark([tmp_path]).replace(str(me.create_time()), str(me.create_time() - 60)))
    terminate_orphans(tmp_path)
    assert not psutil.pid_exists(later.pid)


def test_one_run_of_several(tmp_path: Path, children: list["subprocess.Popen[str]"]) -> None:
    a, b = (start(children, tmp_path / "runs" / name) for name in ("a", "ab"))
    terminate_orphans(tmp_path / "runs" / "a")
    assert not psutil.pid_exists(a.pid)
    assert b.poll() is None


def test_what_does_not_listen_is_killed(
    tmp_path: Path, children: list["subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainable.runs.orphans._TERMINATE_TIMEOUT_S", 0.2)
    deaf = start(children, tmp_path, DEAF)
    terminate_orphans(tmp_path)
    assert not psutil.pid_exists(deaf.pid)

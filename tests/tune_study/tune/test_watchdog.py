import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tune_study.host.interrupt import Interrupt
from tune_study.tune import watchdog
from tune_study.tune.watchdog import Daemon, DiskSpaceGuard, has_exited, watch_daemons

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "_WAIT_INTERVAL_S", 0.01)


def test_the_last_will_is_called_once_a_daemon_is_gone() -> None:
    child = subprocess.Popen(SLEEPS)
    daemon = Daemon("raylet", psutil.Process(child.pid))
    told: list[str] = []
    called = threading.Event()

    def last_will(lost: str) -> None:
        told.append(lost)
        called.set()

    with watch_daemons([daemon], last_will):
        assert not called.wait(0.1)
        assert not has_exited(daemon)
        child.kill()
        assert called.wait(30)
    assert has_exited(daemon)
    child.wait()
    assert has_exited(daemon)
    assert told == [f"Ray's process raylet ({child.pid}) has exited"]


def test_nothing_is_called_where_all_is_well() -> None:
    told: list[str] = []
    with watch_daemons([Daemon("raylet", psutil.Process())], told.append):
        pass
    with watch_daemons([], told.append):
        pass
    assert told == []


def disk_space(folder: Path, patience: float, said: list[str]) -> DiskSpaceGuard:
    return DiskSpaceGuard([folder, folder / "missing"], patience, Interrupt(folder / ".interrupt"), said.append)


def test_the_driver_waits_while_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0, 0, 0, 10**9, 10**9, 10**9])
    monkeypatch.setattr(watchdog.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": next(free)}))
    said: list[str] = []
    disk_space(tmp_path, 60, said).on_step_begin(1, [])
    assert said == [
        f"The disk of {tmp_path} is full: waiting up to 60 s for disk space.",
        "Disk space is available again.",
    ]


def test_its_patience_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    said: list[str] = []
    watch = disk_space(tmp_path, 0.05, said)
    watch.on_step_begin(1, [])
    assert said[-1] == "The disk is still full."
    watch._next_check = 0.0
    watch.on_step_begin(2, [])
    assert len(said) == 2  # it does not begin to wait again
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 0)
    watch._next_check = 0.0
    watch.on_step_begin(3, [])
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    watch._next_check = 0.0
    watch.on_step_begin(4, [])
    assert len(said) == 4  # there was room in between


def test_an_interruption_ends_its_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    said: list[str] = []
    watch = disk_space(tmp_path, 600, said)
    watch._interrupt.request()
    watch.on_step_begin(1, [])
    assert len(said) == 2


def test_it_says_nothing_where_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    watch = disk_space(tmp_path, 600, said)
    for iteration in range(3):
        watch.on_step_begin(iteration, [])
    assert said == []

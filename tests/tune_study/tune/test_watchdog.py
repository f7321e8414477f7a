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
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "_WAIT_INTERVAL_S", 0.01)


def test_the_last_will_is_called_once_a_daemon_is_gone() -> None:
    child = subprocess.Popen(SLEEPS)
    daemon = Daemon("raylet", psutil.Process(child.pid))
    messages: list[str] = []
    was_called = threading.Event()

    def last_will(message: str) -> None:
        messages.append(message)
        was_called.set()

    with watch_daemons([daemon], last_will):
        assert not was_called.wait(0.1)
        assert not has_exited(daemon)
        child.kill()
        assert was_called.wait(30)
    assert has_exited(daemon)
    child.wait()
    assert has_exited(daemon)
    assert messages == [f"Ray's process raylet ({child.pid}) has exited"]


def test_nothing_is_called_where_all_is_well() -> None:
    messages: list[str] = []
    with watch_daemons([Daemon("raylet", psutil.Process())], messages.append):
        pass
    with watch_daemons([], messages.append):
        pass
    assert messages == []


def make_disk_guard(folder: Path, patience: float, messages: list[str]) -> DiskSpaceGuard:
    return DiskSpaceGuard([folder, folder / "missing"], patience, Interrupt(folder / ".interrupt"), messages.append)


def test_the_driver_waits_while_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = iter([0, 0, 0, 10**9, 10**9, 10**9])
    monkeypatch.setattr(watchdog.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": next(free_bytes)}))
    messages: list[str] = []
    make_disk_guard(tmp_path, 60, messages).on_step_begin(1, [])
    assert messages == [
        f"The disk of {tmp_path} is full: waiting up to 60 s for disk space.",
        "Disk space is available again.",
    ]


def test_its_patience_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    messages: list[str] = []
    guard = make_disk_guard(tmp_path, 0.05, messages)
    guard.on_step_begin(1, [])
    assert messages[-1] == "The disk is still full."
    guard._next_check = 0.0
    guard.on_step_begin(2, [])
    assert len(messages) == 2  # the guard does not start to wait again
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 0)
    guard._next_check = 0.0
    guard.on_step_begin(3, [])
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    guard._next_check = 0.0
    guard.on_step_begin(4, [])
    assert len(messages) == 4  # there was free space in between


def test_an_interruption_ends_its_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_FREE_BYTES", 10**18)
    messages: list[str] = []
    guard = make_disk_guard(tmp_path, 600, messages)
    guard._interrupt.request()
    guard.on_step_begin(1, [])
    assert len(messages) == 2


def test_it_says_nothing_where_there_is_room(tmp_path: Path) -> None:
    messages: list[str] = []
    guard = make_disk_guard(tmp_path, 600, messages)
    for iteration in range(3):
        guard.on_step_begin(iteration, [])
    assert messages == []

"""Requests to stop: signals, a time limit, and files that another process makes."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tune_study.host.interrupt import Interrupt, TimeLimit, make_interrupt, start_time_limit


@pytest.fixture(autouse=True)
def _separate_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", 0.0)


@pytest.fixture
def interrupt(tmp_path: Path) -> Interrupt:
    return make_interrupt(tmp_path)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_an_end(
    interrupt: Interrupt, signal_number: signal.Signals
) -> None:
    messages = list[str]()
    old_handler = signal.getsignal(signal_number)
    with interrupt.handle_signals(messages.append):
        assert not interrupt.is_requested
        os.kill(os.getpid(), signal_number)
        assert interrupt.is_requested
        assert interrupt.path.exists()
        assert messages == [
            f"{signal_number.name}: stopping after the current steps, which are finished and saved. "
            f"Press Ctrl-C again to stop immediately."
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal_number)
    assert signal.getsignal(signal_number) is old_handler


@pytest.mark.parametrize(
    ("signals", "window"),
    [((signal.SIGINT, signal.SIGINT, signal.SIGTERM), 60.0), ((signal.SIGHUP, signal.SIGHUP, signal.SIGHUP), 0.0)],
)
def test_two_signals_at_once_and_any_hang_up_are_one_request(
    interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...], window: float
) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", window)
    messages = list[str]()
    with interrupt.handle_signals(messages.append):
        for signal_number in signals:
            os.kill(os.getpid(), signal_number)
    assert interrupt.is_requested
    assert len(messages) == 1


def test_a_signal_that_is_ignored_stays_ignored(interrupt: Interrupt) -> None:
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with interrupt.handle_signals(print):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.is_requested
    finally:
        signal.signal(signal.SIGHUP, old_handler)


def test_a_request_that_cannot_be_written_is_one_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    interrupt = Interrupt(tmp_path / "file" / ".interrupt")
    interrupt.request()
    assert interrupt.is_requested
    assert not interrupt.path.exists()


def test_a_new_start_forgets_requests(interrupt: Interrupt, tmp_path: Path) -> None:
    interrupt.path.touch()
    interrupt.get_arm_path("0.1").touch()
    assert not interrupt.is_requested
    assert not interrupt.is_arm_requested("0.1")
    interrupt.clear()
    assert not interrupt.path.exists()
    assert not interrupt.is_any_arm_requested
    interrupt.request()
    interrupt.clear()
    assert not interrupt.is_requested
    assert list(tmp_path.iterdir()) == []
    interrupt.clear()
    make_interrupt(interrupt.path.parent).path.touch()  # as another process does
    assert interrupt.is_requested
    assert not interrupt.is_arm_requested("0.1")


def test_a_time_limit_requests_a_stop_and_says_why(interrupt: Interrupt) -> None:
    requested = threading.Event()
    lines: list[str] = []

    def notify(text: str) -> None:
        lines.append(text)
        requested.set()

    with interrupt.limit_time(TimeLimit(0.5, time.monotonic() - 1), notify):
        assert requested.wait(timeout=60)
    assert interrupt.is_requested
    assert interrupt.path.exists()
    assert interrupt.reason == "the study was interrupted after the 0.5 hours of --max-hours"
    assert lines == ["--max-hours 0.5: stopping after the current steps, which are finished and saved."]


def test_a_body_that_ends_before_the_limit_is_not_stopped(interrupt: Interrupt) -> None:
    limit, num_threads = start_time_limit(2.0), threading.active_count()
    assert 7190 < limit.deadline - time.monotonic() <= 7200
    with interrupt.limit_time(start_time_limit(None), print):
        assert threading.active_count() == num_threads
    with interrupt.limit_time(limit, print):
        assert threading.active_count() == num_threads + 1
    assert not interrupt.is_requested

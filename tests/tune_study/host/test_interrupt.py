import os
import signal
from pathlib import Path

import pytest

from tune_study.host.interrupt import Interrupt


@pytest.fixture(autouse=True)
def _separate_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", 0.0)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_an_end(tmp_path: Path, signal_number: signal.Signals) -> None:
    interrupt, messages = Interrupt(tmp_path / ".interrupt"), list[str]()
    old_handler = signal.getsignal(signal_number)
    with interrupt.handle_signals(messages.append):
        assert not interrupt.is_requested
        os.kill(os.getpid(), signal_number)
        assert interrupt.is_requested
        assert interrupt.is_visible
        assert messages == [
            f"{signal_number.name}: stopping after the current steps, which are finished and saved. "
            f"Press Ctrl-C again to stop immediately."
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal_number)
    assert signal.getsignal(signal_number) is old_handler


def test_two_signals_at_once_are_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", 60.0)
    interrupt, messages = Interrupt(tmp_path / ".interrupt"), list[str]()
    with interrupt.handle_signals(messages.append):
        for signal_number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signal_number)
    assert len(messages) == 1


def test_a_hang_up_asks_and_never_hurries(tmp_path: Path) -> None:
    interrupt, messages = Interrupt(tmp_path / ".interrupt"), list[str]()
    with interrupt.handle_signals(messages.append):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
    assert interrupt.is_requested
    assert len(messages) == 1


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        interrupt = Interrupt(tmp_path / ".interrupt")
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
    assert not interrupt.is_visible


def test_a_new_start_forgets_the_request(tmp_path: Path) -> None:
    interrupt = Interrupt(tmp_path / ".interrupt")
    interrupt.request()
    interrupt.clear()
    assert not interrupt.is_requested
    assert list(tmp_path.iterdir()) == []
    interrupt.clear()

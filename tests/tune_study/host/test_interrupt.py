import os
import signal
from pathlib import Path

import pytest

from tune_study.host.interrupt import Interrupt


@pytest.fixture(autouse=True)
def _slow_fingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_an_end(tmp_path: Path, number: signal.Signals) -> None:
    interrupt, said = Interrupt(tmp_path / ".interrupt"), list[str]()
    before = signal.getsignal(number)
    with interrupt.handle_signals(said.append):
        assert not interrupt.is_requested
        os.kill(os.getpid(), number)
        assert interrupt.is_requested
        assert interrupt.is_visible
        assert said == [
            f"{number.name}: stopping after the current steps, which are finished and saved. "
            f"Press Ctrl-C again to stop immediately."
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_two_signals_at_once_are_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.host.interrupt._ONE_EVENT_S", 60.0)
    interrupt, said = Interrupt(tmp_path / ".interrupt"), list[str]()
    with interrupt.handle_signals(said.append):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert len(said) == 1


def test_a_hang_up_asks_and_never_hurries(tmp_path: Path) -> None:
    interrupt, said = Interrupt(tmp_path / ".interrupt"), list[str]()
    with interrupt.handle_signals(said.append):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
    assert interrupt.is_requested
    assert len(said) == 1


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        interrupt = Interrupt(tmp_path / ".interrupt")
        with interrupt.handle_signals(print):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.is_requested
    finally:
        signal.signal(signal.SIGHUP, before)


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

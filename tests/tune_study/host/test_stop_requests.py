"""Tests of requests to stop that are no signals: a time limit, and files that another process makes."""

import threading
import time
from pathlib import Path

import pytest

from tune_study.host.interrupt import Interrupt, TimeLimit, make_interrupt, start_time_limit


@pytest.fixture
def interrupt(tmp_path: Path) -> Interrupt:
    return make_interrupt(tmp_path)


def test_a_file_of_an_earlier_start_is_no_request(interrupt: Interrupt) -> None:
    interrupt.path.touch()
    interrupt.get_arm_path("0.1").touch()
    assert not interrupt.is_requested
    assert not interrupt.is_arm_requested("0.1")
    interrupt.clear()
    assert not interrupt.is_visible
    assert not interrupt.is_any_arm_requested


def test_a_file_that_another_process_makes_is_a_request(interrupt: Interrupt) -> None:
    interrupt.clear()
    make_interrupt(interrupt.path.parent).path.touch()
    assert interrupt.is_requested
    assert not interrupt.is_arm_requested("0.1")


def test_an_arm_is_stopped_alone(interrupt: Interrupt) -> None:
    interrupt.clear()
    interrupt.get_arm_path("0.1").touch()
    assert interrupt.is_arm_requested("0.1")
    assert not interrupt.is_arm_requested("0.01")
    assert not interrupt.is_requested
    assert interrupt.is_any_arm_requested


def test_a_time_limit_requests_a_stop_and_says_why(interrupt: Interrupt) -> None:
    requested = threading.Event()
    lines: list[str] = []

    def notify(text: str) -> None:
        lines.append(text)
        requested.set()

    with interrupt.limit_time(TimeLimit(0.5, time.monotonic() - 1), notify):
        assert requested.wait(timeout=60)
    assert interrupt.is_requested
    assert interrupt.is_visible
    assert interrupt.reason == "the study was interrupted after the 0.5 hours of --max-hours"
    assert lines == ["--max-hours 0.5: stopping after the current steps, which are finished and saved."]


def test_a_body_that_ends_before_the_limit_is_not_stopped(interrupt: Interrupt) -> None:
    num_threads = threading.active_count()
    with interrupt.limit_time(start_time_limit(1.0), lambda text: None):
        assert threading.active_count() == num_threads + 1
    with interrupt.limit_time(start_time_limit(None), lambda text: None):
        pass
    assert not interrupt.is_requested


def test_the_deadline_is_hours_from_the_start() -> None:
    limit = start_time_limit(2.0)
    assert limit is not None
    assert 7190 < limit.deadline - time.monotonic() <= 7200

"""Retry operations while the disk is full, so that a run waits instead of failing."""

import time
from collections.abc import Callable
from typing import TypeVar

from trainable.runs.failures import is_disk_full

T = TypeVar("T")

_RETRY_INTERVAL_S = 1.0
"""Seconds between two attempts. Short, because an attempt costs no more than one failed write."""


def call_with_retry(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """The result of `operation`, which is retried for at most `patience` seconds while the disk is full.

    `operation` must be safe to repeat after a partial failure. notify: called with a message when the waiting begins,
    and when an attempt succeeds after it. should_stop: asked after each failed attempt whether to give up at once.
    Raises the last OSError after `patience` seconds or if `should_stop` says so, and every other error immediately.
    """
    deadline, is_waiting = time.monotonic() + patience, False
    while True:
        try:
            result = operation()
        except OSError as error:
            if not is_disk_full(error):
                raise
            if should_stop():  # a user who presses Ctrl-C during a wait does not want to see the end of it
                raise
            if time.monotonic() >= deadline:
                error.add_note(f"Disk still full after {patience:g} s (trainer.disk_patience).")
                raise
            if not is_waiting:  # one message for the whole wait, not one per attempt
                notify(f"waiting up to {patience:g} s for disk space: {error}")
                is_waiting = True
            # The deadline may have passed since it was checked, and `sleep` refuses negative numbers.
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, deadline - time.monotonic())))
            continue
        if is_waiting:
            notify("disk space is available again")
        return result

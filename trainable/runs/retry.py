"""Retry operations on a full disk or an unreachable storage, so that the run waits instead of failing."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trainable.runs.failures import is_disk_full

T = TypeVar("T")

_RETRY_INTERVAL_S = 1.0
"""Seconds between two attempts. Each attempt costs one failed write."""


class RetryPolicy(NamedTuple):
    """Which errors are retried, and the texts that report it.

    is_retryable: whether an error may pass. waiting_for: what the caller waits for. recovery_message: the condition has
    passed. timeout_message: it has not passed within {patience} seconds.
    """

    is_retryable: Callable[[OSError], bool]
    waiting_for: str
    recovery_message: str
    timeout_message: str


DISK_FULL_RETRY = RetryPolicy(
    is_disk_full,
    "for disk space",
    "disk space is available again",
    "Disk still full after {patience:g} s (trainer.disk_patience).",
)


def call_with_retry(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    policy: RetryPolicy = DISK_FULL_RETRY,
) -> T:
    """The result of `operation`, which is retried for at most `patience` seconds on errors that `policy` allows.

    `operation` must be safe to repeat after a partial failure. notify: called when the waiting begins and when it
    succeeds. should_stop: whether to stop waiting immediately. Raises the last OSError after `patience` seconds, and
    every other error immediately.
    """
    deadline, is_waiting = time.monotonic() + patience, False
    while True:
        try:
            result = operation()
        except OSError as error:
            if not policy.is_retryable(error):
                raise
            if should_stop():
                raise
            if time.monotonic() >= deadline:
                error.add_note(policy.timeout_message.format(patience=patience))
                raise
            if not is_waiting:  # one message for the whole wait, not one per attempt
                notify(f"waiting up to {patience:g} s {policy.waiting_for}: {error}")
                is_waiting = True
            # The clock has moved on since the deadline was checked, so the rest may be negative.
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, deadline - time.monotonic())))
            continue
        if is_waiting:
            notify(policy.recovery_message)
        return result

"""Waiting for what may pass: a full disk, or a storage that does not answer, stops writing, not the run."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trainable.runs.failures import is_disk_full

T = TypeVar("T")

_RETRY_INTERVAL_S = 1.0
"""Seconds between two attempts; each attempt costs one failed write."""


class RetryPolicy(NamedTuple):
    """What is waited for. is_met: whether an error is of this kind. Words: what is waited for, that it is there, and
    that it never came within so many seconds ({patience})."""

    is_retryable: Callable[[OSError], bool]
    waiting_for: str
    recovery_message: str
    timeout_message: str


DISK_FULL_RETRY = RetryPolicy(
    is_disk_full,
    "for room on the disk",
    "there is room on the disk again",
    "No room was made within {patience:g} s (trainer.disk_patience).",
)


def call_with_retry(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    policy: RetryPolicy = DISK_FULL_RETRY,
) -> T:
    """The result of `write`, tried again while it meets `obstacle`, for at most `patience` seconds.

    `write` must be safe to repeat after it failed half-way. say: told when the waiting begins and when it ends well.
    is_over: whether to stop waiting at once. Raises the last OSError when patience is over, and others at once.
    """
    deadline, is_waiting = time.monotonic() + patience, False
    while True:
        try:
            result = operation()
        except OSError as error:
            if not policy.is_retryable(error):
                raise
            if time.monotonic() >= deadline or should_stop():
                error.add_note(policy.timeout_message.format(patience=patience))
                raise
            if not is_waiting:
                notify(f"waiting up to {patience:g} s {policy.waiting_for}: {error}")
                is_waiting = True
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, deadline - time.monotonic())))
            continue
        if is_waiting:
            notify(policy.recovery_message)
        return result

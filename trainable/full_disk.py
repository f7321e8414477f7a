"""Waiting for room: a full disk stops the writing of a run, not the run."""

import time
from collections.abc import Callable
from typing import TypeVar

from trainable.failures import is_full

T = TypeVar("T")

_PAUSE_S = 1.0
"""Seconds between two attempts; each attempt costs one failed write."""


def until_written(
    write: Callable[[], T], patience: float, say: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
) -> T:
    """The result of `write`, tried again while it says that the disk is full, for at most `patience` seconds.

    `write` must be safe to repeat after it failed half-way. say: told when the waiting begins and when it ends well.
    is_over: whether to stop waiting at once. Raises the last OSError when patience is over, with a note of what was
    tried; every other error at once.
    """
    deadline = time.monotonic() + patience
    is_waiting = False
    while True:
        try:
            result = write()
        except OSError as error:
            if not is_full(error):
                raise
            if time.monotonic() >= deadline or is_over():
                error.add_note(f"No room was made within {patience:g} s (trainer.disk_patience).")
                raise
            if not is_waiting:
                say(f"waiting up to {patience:g} s for room on the disk: {error}")
                is_waiting = True
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
            continue
        if is_waiting:
            say("there is room on the disk again")
        return result

"""Waiting for what may pass: a full disk, or a storage that does not answer, stops writing, not the run."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trainable.runs.failures import is_full

T = TypeVar("T")

_PAUSE_S = 1.0
"""Seconds between two attempts; each attempt costs one failed write."""


class Obstacle(NamedTuple):
    """What is waited for. is_met: whether an error is of this kind. Words: what is waited for, that it is there, and
    that it never came within so many seconds ({patience})."""

    is_met: Callable[[OSError], bool]
    awaited: str
    is_there: str
    never: str


FULL_DISK = Obstacle(
    is_full,
    "for room on the disk",
    "there is room on the disk again",
    "No room was made within {patience:g} s (trainer.disk_patience).",
)


def until_written(
    write: Callable[[], T],
    patience: float,
    say: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
    obstacle: Obstacle = FULL_DISK,
) -> T:
    """The result of `write`, tried again while it meets `obstacle`, for at most `patience` seconds.

    `write` must be safe to repeat after it failed half-way. say: told when the waiting begins and when it ends well.
    is_over: whether to stop waiting at once. Raises the last OSError when patience is over, and others at once.
    """
    deadline, is_waiting = time.monotonic() + patience, False
    while True:
        try:
            result = write()
        except OSError as error:
            if not obstacle.is_met(error):
                raise
            if time.monotonic() >= deadline or is_over():
                error.add_note(obstacle.never.format(patience=patience))
                raise
            if not is_waiting:
                say(f"waiting up to {patience:g} s {obstacle.awaited}: {error}")
                is_waiting = True
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
            continue
        if is_waiting:
            say(obstacle.is_there)
        return result

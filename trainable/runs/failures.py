"""Classify the failures of a run, decide whether a retry can help, and wait while the disk is full.

Imports neither torch nor Ray, because the driver of a study uses it too.
"""

import errno
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trainable.config.own_parts import find_place

T = TypeVar("T")

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, an exceeded quota, an exceeded limit on the size of a file."""

_ACCESS_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP)
"""A file or folder that must not be written, is missing, or is of the wrong kind (ELOOP: a symbolic link). A retry
would meet the same one."""

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""Fragments of the messages of CUDA, of torch's CPU allocator and of the operating system, in lower case."""

_PASSING_MEMORY_PHRASES = (
    "error in memory profiling",
    "less than desired gpu memory utilization",
    "no available memory for the cache blocks",
)
"""Fragments of errors of vLLM 0.32, in lower case. They tell what the memory of the whole device was at one moment,
which depends on its other processes: a neighbor that grows, or a predecessor whose memory is not free yet."""

_TRANSIENT_ERRORS = (RuntimeError, OSError, EOFError, TimeoutError, InterruptedError)
"""Errors of the machine. RuntimeError is among them, because torch raises it for device errors."""

PROCESS_DIED, NON_FINITE = "process died", "non-finite"


class NonFiniteError(ArithmeticError):
    """Losses, gradients or weights are no longer finite; the message names the step and the tensors."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names the file and says what is wrong with it."""


class Failure(NamedTuple):
    """Why a run failed: its kind, a sentence, whether the run is retried, and the traceback."""

    kind: str
    """configuration, non-finite, out of memory, storage, process died or error. A status shows `failed (<kind>)`."""
    message: str
    is_retried: bool
    trace: str = ""


class RunFailedError(RuntimeError):
    """Carries a failure from the process of a run to the driver: text and flags only, so that it can be pickled."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, a quota or a file-size limit leaves no space to write."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS


def classify_failure(error: BaseException, has_rows: bool) -> Failure:
    """Classify an error that was raised inside a run.

    has_rows: whether the run has written a row.

    An error of the run's own code is final: it depends on settings and code, and those stay as they are. An error of
    the machine (a device error, a dropped connection, memory that runs out in the middle of a run that had fitted,
    memory that vLLM finds taken by other processes) may not occur again, so the run is retried. Running out of memory
    before the first row is final, because the settings do not fit. A full disk is final too, because the run has
    already waited for it, and so is a folder that must not be written.
    """
    kind, is_retried = _classify_kind(error, has_rows)
    # A status and a table have room for one line; `trace` has the entire text.
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    place = find_place(error)
    message = " ".join(
        [f"{type(error).__name__}: {first_line}", *([f"({place})"] if place else []), *getattr(error, "__notes__", [])]
    )
    return Failure(kind, message, is_retried, "".join(traceback.format_exception(error)))


def _classify_kind(error: BaseException, has_rows: bool) -> tuple[str, bool]:
    """The kind of the failure, and whether the run is retried."""
    if isinstance(error, NonFiniteError):
        return NON_FINITE, False
    # Before the tests for wrong settings: vLLM raises AssertionError and ValueError for memory that others may free.
    if any(phrase in str(error).lower() for phrase in _PASSING_MEMORY_PHRASES):
        return "out of memory", True
    # Before the test for transient errors: torch's OutOfMemoryError is a RuntimeError.
    if is_out_of_memory(error):
        return "out of memory", has_rows
    if isinstance(error, OSError) and error.errno in (*_DISK_FULL_ERRNOS, *_ACCESS_ERRNOS):
        return "storage", False
    # Settings are checked before the first row, with ValueErrors. After it, a ValueError is an error of the code.
    if isinstance(error, ValueError) and not has_rows:
        return "configuration", False
    # NotImplementedError and RecursionError are RuntimeErrors that a retry cannot fix.
    is_transient = isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, NotImplementedError | RecursionError)
    return "error", is_transient


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a GPU torch raises OutOfMemoryError, on a CPU a RuntimeError whose message says so."""
    # By name, because importing torch would cost the driver seconds and memory.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT_OF_MEMORY_PHRASES)


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
            # A user who presses Ctrl-C during a wait does not want to see the end of it.
            if not is_disk_full(error) or should_stop():
                raise
            if time.monotonic() >= deadline:
                error.add_note(f"Disk still full after {patience:g} s (trainer.disk_patience).")
                raise
            if not is_waiting:  # one message for the whole wait, not one per attempt
                notify(f"waiting up to {patience:g} s for disk space: {error}")
                is_waiting = True
            # The deadline may have passed since it was checked, and `sleep` refuses negative numbers.
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        else:
            if is_waiting:
                notify("disk space is available again")
            return result

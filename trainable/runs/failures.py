"""Classify the failures of a run, decide whether a retry can help, and wait while the disk is full.

Imports neither torch nor Ray, because the driver of a study uses it, too.
"""

import errno
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trainable.config.own_parts import find_place

T = TypeVar("T")

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, an exceeded quota, or an exceeded file-size limit."""

_ACCESS_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP)
"""A file or folder that is not writable, missing, or of the wrong kind (ELOOP: a symbolic link). A retry would not
help."""

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""Fragments of error messages of CUDA, torch's CPU allocator and the operating system, in lower case."""

_PASSING_MEMORY_PHRASES = (
    "error in memory profiling",
    "less than desired gpu memory utilization",
    "no available memory for the cache blocks",
)
"""Fragments of error messages of vLLM 0.32, in lower case, about the memory of the whole device. It depends on other
processes: a neighbor that grows, or a predecessor whose memory is not free yet."""

_TRANSIENT_ERRORS = (RuntimeError, OSError, EOFError, TimeoutError, InterruptedError)
"""Errors of the machine, including RuntimeError, which torch raises for device errors."""

PROCESS_DIED, NON_FINITE, NODE_UNFIT = "process died", "non-finite", "node"


class NonFiniteError(ArithmeticError):
    """Raised if losses, gradients or weights are no longer finite. The message names the step and the tensors."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be used. The message names the file and its problem."""


class NodeError(Exception):
    """Raised if the node of a run lacks what the run needs, while another node may have it."""


class MissingModelError(ValueError, NodeError):
    """Raised if a model is not on this machine. The message names the command that fetches it."""


class Failure(NamedTuple):
    """Why a run failed: the kind of failure, a sentence, whether the run is retried, and the traceback."""

    kind: str
    """configuration, non-finite, out of memory, storage, node, process died or error.

    A status shows `failed (<kind>)`."""
    message: str
    is_retried: bool
    trace: str = ""
    node_id: str = ""
    """Ray's id of the node that lacks what the run needs, if the kind is `node`."""


class RunFailedError(RuntimeError):
    """Carries a failure from the process of a run to the driver, as text and flags, which can be pickled."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


def is_disk_full(error: BaseException) -> bool:
    """Check whether `error` means that the disk, a quota or a file-size limit leaves no space to write."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS


def classify_failure(error: BaseException, has_rows: bool) -> Failure:
    """Classify an error that was raised inside a run. has_rows: whether the run has written a row.

    Errors of the code are final, since settings and code stay the same. Errors of the machine may not occur again, so
    the run is retried: a device error, a dropped connection, memory that runs out in a run that had fit, or memory that
    vLLM finds taken by other processes. Running out of memory before the first row is final, because the settings do
    not fit. A full disk, for which the run has waited already, and a folder that is not writable are final, too.
    """
    kind, is_retried = _classify_kind(error, has_rows)
    # Statuses and tables have room for one line. `trace` has the entire text.
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    place = find_place(error)
    message = " ".join(
        [f"{type(error).__name__}: {first_line}", *([f"({place})"] if place else []), *getattr(error, "__notes__", [])]
    )
    return Failure(kind, message, is_retried, "".join(traceback.format_exception(error)))


def _classify_kind(error: BaseException, has_rows: bool) -> tuple[str, bool]:
    """Find the kind of the failure, and whether to retry the run."""
    if isinstance(error, NonFiniteError):
        return NON_FINITE, False
    # Before wrong settings: vLLM raises AssertionError and ValueError for memory that others may free.
    if any(phrase in str(error).lower() for phrase in _PASSING_MEMORY_PHRASES):
        return "out of memory", True
    # Before transient errors: torch's OutOfMemoryError is a RuntimeError.
    if is_out_of_memory(error):
        return "out of memory", has_rows
    if isinstance(error, OSError) and error.errno in (*_DISK_FULL_ERRNOS, *_ACCESS_ERRNOS):
        return "storage", False
    # Checks of settings raise ValueErrors before the first row. After it, a ValueError is an error of the code.
    if isinstance(error, ValueError) and not has_rows:
        return "configuration", False
    # NotImplementedError and RecursionError are RuntimeErrors that a retry cannot fix.
    is_transient = isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, NotImplementedError | RecursionError)
    return "error", is_transient


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether memory ran out. torch raises OutOfMemoryError on a GPU, and a RuntimeError with text on a CPU."""
    # By name, because importing torch would cost the driver seconds and memory.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT_OF_MEMORY_PHRASES)


_RETRY_INTERVAL_S = 1.0
"""Seconds between two attempts. Short, since an attempt costs only a failed write."""


def call_with_retry(
    operation: Callable[[], T],
    patience: float,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    place: str = "",
) -> T:
    """Call `operation`, and retry for up to `patience` seconds while the disk is full. Return its result.

    `operation` must be safe to repeat after a partial failure. notify: called with a message when waiting begins, and
    when an attempt succeeds afterwards. should_stop: called after each failed attempt; True gives up at once.
    place: the name of a storage, for which every OSError is retried but those of missing or forbidden files. Raises the
    last OSError after `patience` seconds or if `should_stop` is true, and every other error immediately.
    """
    wanted = place or "disk space"
    deadline, is_waiting = time.monotonic() + patience, False
    while True:
        try:
            result = operation()
        except OSError as error:
            # A user who presses Ctrl-C does not want to wait any longer.
            is_passing = is_disk_full(error) or (place and error.errno not in _ACCESS_ERRNOS)
            if not is_passing or should_stop():
                raise
            if time.monotonic() >= deadline:
                error.add_note(f"Waited {patience:g} s for {wanted} (trainer.disk_patience).")
                raise
            if not is_waiting:  # one message for the whole wait, not one per attempt
                notify(f"waiting up to {patience:g} s for {wanted}: {error}")
                is_waiting = True
            # The deadline may have passed since the check, and `sleep` rejects negative numbers.
            time.sleep(min(_RETRY_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        else:
            if is_waiting:
                notify(f"{wanted} is available again")
            return result

"""What a run can fail with, and whether trying again could help. No torch, no Ray: the study's side reads it too."""

import errno
import traceback
from typing import NamedTuple

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ACCESS_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory")
_TRANSIENT_ERRORS = (RuntimeError, OSError, EOFError, TimeoutError, InterruptedError)

PROCESS_DIED, NON_FINITE = "process died", "non-finite"
FAILURE_KINDS = ("configuration", NON_FINITE, "out of memory", "storage", PROCESS_DIED, "error")
"""Every kind of failure; a status reads `failed (<kind>)`."""


class NonFiniteError(ArithmeticError):
    """Losses, gradients or weights stopped being finite; the message names step and tensors."""


class StorageError(RuntimeError):
    """A storage (an object store, a shared folder) that cannot be used, or not any more; the message says why."""


class Failure(NamedTuple):
    """Why a run failed: one of KINDS, a sentence, whether the run is tried again, and the traceback."""

    kind: str
    message: str
    is_retried: bool
    trace: str = ""


class RunFailedError(RuntimeError):
    """A failure on its way from the process of a run to the study: text and flags only, so that it can be sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, a quota or a file-size limit leaves no room to write."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS


def classify_failure(error: BaseException, has_rows: bool) -> Failure:
    """The failure that `error` is, raised inside a run.

    has_rows: whether the run has written a row. Same settings and seed give the same numbers, so what the run's own
    code raises would be raised again: it is final. What the machine does (a device's error, a dropped connection, a
    full memory in the middle of a run that had fitted) may pass: it is tried again. Out of memory before the first
    row is a setting that does not fit, and final; a full or forbidden folder and a storage that does not answer are
    final, since the run waited for them.
    """
    kind, is_retried = _classify_kind(error, has_rows)
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    message = " ".join([f"{type(error).__name__}: {first_line}", *getattr(error, "__notes__", [])])
    return Failure(kind, message, is_retried, "".join(traceback.format_exception(error)))


def _classify_kind(error: BaseException, has_rows: bool) -> tuple[str, bool]:
    if isinstance(error, NonFiniteError):
        return NON_FINITE, False
    if is_out_of_memory(error):
        return "out of memory", has_rows
    is_storage_error = isinstance(error, OSError) and error.errno in (*_DISK_FULL_ERRNOS, *_ACCESS_ERRNOS)
    if is_storage_error or isinstance(error, StorageError):
        return "storage", False
    if isinstance(error, ValueError) and not has_rows:
        return "configuration", False
    # NotImplementedError and RecursionError are RuntimeErrors that no second try mends.
    is_transient = isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, NotImplementedError | RecursionError)
    return "error", is_transient


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch names its error OutOfMemoryError on a GPU and says it in words on the processor."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT_OF_MEMORY_PHRASES)

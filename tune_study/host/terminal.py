"""Keep a study running when its output fails: closed streams, a pipe whose reader has exited, a full disk."""

import errno
import os
import sys
from typing import TextIO

_FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class FailSafeStream:
    """A console stream whose writes cannot fail.

    After a failed write, the stream's file descriptor points to the null device, so that all later output is discarded,
    also from code that writes to the descriptor directly. The attribute `error` is the first failure, or None.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write; if that fails, redirect the stream to the null device."""
        try:
            return self._stream.write(text)
        except OSError as error:  # the reader of a pipe has exited, the terminal was closed, or the disk is full
            self._redirect_to_null(error)
            return len(text)  # the caller need not know

    def flush(self) -> None:
        """Flush; if that fails, redirect the stream to the null device."""
        try:
            self._stream.flush()
        except OSError as error:
            self._redirect_to_null(error)

    def _redirect_to_null(self, error: OSError) -> None:
        """Point the descriptor to the null device, which also covers other libraries that print."""
        self.error = self.error or error
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, self._stream.fileno())
        os.close(null_descriptor)

    def __getattr__(self, name: str) -> object:
        """Get all other attributes, such as encoding, isatty and fileno, from the wrapped stream."""
        return getattr(self._stream, name)


def protect_output() -> None:
    """Replace standard output and standard error by streams whose writes cannot fail, even if they are closed.

    A closed stream is opened on the null device. Call this before any other file is opened: it would get the closed
    stream's descriptor, and prints to that descriptor would end up in the file.
    """
    for descriptor, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free descriptor, which is this one; children inherit only 0-2
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:  # Python has no object for a stream that was closed when it started
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False))
    sys.stdout, sys.stderr = FailSafeStream(sys.stdout), FailSafeStream(sys.stderr)


def finish_output(exit_code: int) -> int:
    """Flush standard output; return the command's exit code: `exit_code`, or 1 if a full disk cut the output.

    A closed terminal and a pipe whose reader has exited change nothing, since nobody misses the output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    error = getattr(sys.stdout, "error", None)
    if error is None or error.errno not in _FULL_DISK_ERRORS:
        return exit_code
    print(
        f"tune_study: standard output could not be written ({os.strerror(error.errno)}), so lines are missing there. "
        f"Files of results are not affected.",
        file=sys.stderr,
        flush=True,
    )
    return exit_code or 1

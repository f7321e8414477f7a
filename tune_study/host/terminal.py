"""Keep a study running when its output fails: a closed terminal, or a pipe whose reader has exited."""

import os
import sys
from typing import TextIO


class FailSafeStream:
    """A console stream whose writes cannot fail.

    After a write has failed, the file descriptor of the stream points to the null device. Everything that is written
    later is discarded, also by code that writes to the descriptor directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; if that fails, redirect the stream to the null device."""
        try:
            return self._stream.write(text)
        except OSError:  # the reader of a pipe has exited, or the terminal was closed
            self._redirect_to_null()
            return len(text)  # all of it was written, as far as the caller has to know

    def flush(self) -> None:
        """Flush; if that fails, redirect the stream to the null device."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Point the descriptor to the null device, which also covers other libraries that print."""
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, self._stream.fileno())
        os.close(null_descriptor)

    def __getattr__(self, name: str) -> object:
        """All other attributes, such as encoding, isatty and fileno, come from the wrapped stream."""
        return getattr(self._stream, name)


def protect_output() -> None:
    """Replace standard output and standard error by streams whose writes cannot fail."""
    sys.stdout, sys.stderr = FailSafeStream(sys.stdout), FailSafeStream(sys.stderr)

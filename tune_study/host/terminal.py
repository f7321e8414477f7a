"""Output that cannot end a study: a terminal that was closed, a pipe whose reader is gone."""

import os
import sys
from typing import TextIO


class FailSafeStream:
    """A stream for a console. Once writing fails, its file descriptor is turned to the null device, for all writers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or turn the stream away."""
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        """Flush, or turn the stream away."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """From now on the descriptor leads nowhere, also for what other libraries print."""
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, self._stream.fileno())
        os.close(null_descriptor)

    def __getattr__(self, name: str) -> object:
        """All else as the stream has it: encoding, isatty, fileno."""
        return getattr(self._stream, name)


def protect_output() -> None:
    """Make this process's standard output and error unbreakable."""
    sys.stdout, sys.stderr = FailSafeStream(sys.stdout), FailSafeStream(sys.stderr)

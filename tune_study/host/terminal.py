"""Output that cannot end a study: a terminal that was closed, a pipe whose reader is gone."""

import os
import sys
from typing import TextIO


class Unbreakable:
    """A stream for a console. Once writing fails, its file descriptor is turned to the null device, for all writers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or turn the stream away."""
        try:
            return self._stream.write(text)
        except OSError:
            self._turn_away()
            return len(text)

    def flush(self) -> None:
        """Flush, or turn the stream away."""
        try:
            self._stream.flush()
        except OSError:
            self._turn_away()

    def _turn_away(self) -> None:
        """From now on the descriptor leads nowhere, also for what other libraries print."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> object:
        """All else as the stream has it: encoding, isatty, fileno."""
        return getattr(self._stream, name)


def protect_output() -> None:
    """Make this process's standard output and error unbreakable."""
    sys.stdout, sys.stderr = Unbreakable(sys.stdout), Unbreakable(sys.stderr)
